"""Chooses a type for each matrix of a GGUF so that the file fits a budget, and answers as nearly as before as it can.

Owns the entry, what the measurements depend on, and the report. The search is in search.py. Runs in a worker: it loads
native code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np

from edgelm.base.errors import ModelError, RequestError
from edgelm.base.machine.cpu import usable_cores
from edgelm.base.machine.memory import available_memory_bytes
from edgelm.checkpoints.files import file_identity
from edgelm.checkpoints.gguf import GGUF, open_gguf
from edgelm.checkpoints.gguf_parse import Tensor, TensorType
from edgelm.checkpoints.summary import blocks_ahead
from edgelm.making.quantization.candidates import FILE_TYPES, MAX_GROUPS, Group, grouped, padded
from edgelm.making.quantization.divergence import Cut, DivergenceMeter, TextCut
from edgelm.making.quantization.recipe import Recipe
from edgelm.making.quantization.scratch import Scratch, scratch_copy
from edgelm.making.quantization.search import Progress, Search, Solution
from edgelm.making.quantization.sensitivity import Importance, Kept, Laboratory

SPARE_BYTES = 256  # for keys that llama.cpp adds
WORKSPACE_BYTES = 512 * 2**20  # compute buffers, the logits of a step, vocabulary, Python


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured. The time goes with the product of the first three."""

    num_tokens: int  # of the text, in each measurement
    max_groups: int  # of matrices that get one type together
    num_probes: int = 1  # types with which each group is measured: 1 or 2, which chose no better
    check: bool = True  # whether the choice is measured as a whole

    @classmethod
    def of(cls, num_weights: int) -> Effort:
        """Return the usual effort for a model of this size."""
        if num_weights < 10**9:
            return cls(num_tokens=4096, max_groups=MAX_GROUPS)
        return cls(num_tokens=2048 if num_weights < 4 * 10**9 else 1024, max_groups=MAX_GROUPS // 2)


class Quantizer(Protocol):
    """llama.cpp's function that quantizes files."""

    def matrices(self, source: GGUF) -> Collection[str]:
        """Return the names of the tensors that it quantizes; it copies the others."""
        ...

    def write(self, source: GGUF, destination: Path, recipe: Recipe, importance: Importance | None) -> object: ...


class Row(NamedTuple):
    """A group of matrices in the report."""

    name: str
    numbers: int
    probes: Mapping[str, float]  # measured divergences of the group alone, by type
    type: str  # that was chosen
    nbytes: int
    predicted: float  # divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How the types were chosen. Divergences are means in nats a token, on the text for calibration."""

    rows: tuple[Row, ...]
    nbytes: int  # of the file
    budget_bytes: int
    num_tokens: int
    predicted: float  # the sum of the rows
    measured: float | None  # of all types together; None: not measured

    def document(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return asdict(self) | {"rows": [row._asdict() for row in self.rows]}


def choose_types(
    source: Path,
    budget_bytes: int,
    text: str,
    importance: Importance | None,
    *,
    quantizer: Quantizer,
    cache: Path,
    scratch: Path,
    effort: Effort | None = None,
    cut: Cut | None = None,
    threads: int = 0,
    progress: Callable[[Progress], object] = lambda _progress: None,
) -> tuple[Recipe, Report]:
    """Return the types with which the file of a GGUF has at most `budget_bytes`, and how they were chosen.

    `cache` is a folder for measurements, `scratch` one on a disk with room for a copy of the model. Raises RequestError
    for a budget that no types fit, or a text that is too short; ModelError for a model that cannot be run here.
    """
    with open_gguf(source) as gguf, ExitStack() as resources:
        names, ahead = quantizer.matrices(gguf), blocks_ahead(gguf)
        matrices = [tensor for name, tensor in gguf.tensors.items() if name in names and not name.startswith(ahead)]
        fixed = {
            name: _without_measurement(tensor)
            for name, tensor in gguf.tensors.items()
            if name in names and name.startswith(ahead)
        }
        others = sum(padded(tensor.nbytes) for name, tensor in gguf.tensors.items() if name not in names)
        others += sum(Group(name, (gguf.tensors[name],)).nbytes(kind) for name, kind in fixed.items())
        effort = effort or Effort.of(sum(tensor.num_elements for tensor in matrices))
        cut = cut or TextCut(text, effort.num_tokens)

        def open_meter(stack: ExitStack) -> tuple[Scratch, DivergenceMeter]:
            _require_memory(gguf)
            progress(Progress(stage="loading", done=0, total=1))
            copy = stack.enter_context(
                scratch_copy(gguf, scratch, lambda path: quantizer.write(gguf, path, Recipe("F16"), None))
            )
            cores = threads or usable_cores().physical
            meter = stack.enter_context(DivergenceMeter(copy.path, cut, threads=cores))
            copy.path.unlink(missing_ok=True)  # llama.cpp has mapped it: whatever ends this process, nothing is left
            return copy, meter

        kept = Kept(cache, _key(gguf, cut, importance))
        laboratory = resources.enter_context(Laboratory(gguf, importance, kept, open_meter))
        search = Search(laboratory, grouped(matrices, effort.max_groups), importance or {}, progress, effort.num_probes)
        if budget_bytes < search.least_bytes + others:  # before the copy is made, whose header is that of the file
            _refuse(budget_bytes, search.least_bytes + others + _metadata_bytes(gguf))
        others += laboratory.header_bytes
        if budget_bytes < search.least_bytes + others:
            _refuse(budget_bytes, search.least_bytes + others)
        search.measure()
        solution = search.solve(budget_bytes - others, check=effort.check)
        return _recipe(search, solution, fixed), _report(search, solution, others, budget_bytes, laboratory.num_tokens)


def _require_memory(gguf: GGUF) -> None:
    """Raise ModelError for a model that cannot be run with 16-bit weights: from the disk it would take days."""
    needed = 2 * sum(tensor.num_elements for tensor in gguf.tensors.values()) + WORKSPACE_BYTES
    if needed > (free := available_memory_bytes()):
        raise ModelError(
            f"{gguf.name} has to be run with 16-bit weights to choose types, which takes {_size(needed)} of memory, "
            f"and {_size(free)} are free",
            "close other programs, do it on a larger machine, or give a type in place of auto",
        )


def _refuse(budget_bytes: int, least: int) -> NoReturn:
    raise RequestError(
        f"no types make this model as small as {_size(budget_bytes)}",
        f"give at least {_size(least)}, or take a smaller model",
    )


def _size(nbytes: int) -> str:
    """Return a size that is at least `nbytes` when it is read back."""
    unit, name = next((row for row in ((2**30, "GiB"), (2**20, "MiB")) if nbytes >= row[0]), (2**10, "KiB"))
    return f"{-(-nbytes * 100 // unit) / 100:.2f} {name}"


def _metadata_bytes(gguf: GGUF) -> int:
    """Return at least the size of all that comes before the tensors in a file made from this one."""
    return max(gguf.size - sum(tensor.nbytes for tensor in gguf.tensors.values()), 0) + SPARE_BYTES


def _key(gguf: GGUF, cut: Cut, importance: Importance | None) -> list[Any]:
    """Return all that measurements depend on."""
    digest = hashlib.sha256()
    try:
        for part in file_identity(gguf.paths):
            digest.update(part)
    except OSError as error:
        raise ModelError(f"{gguf.name} cannot be read: {error.strerror}") from None
    for name, values in sorted((importance or {}).items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return [digest.hexdigest(), cut.key]


def _without_measurement(tensor: Tensor) -> TensorType:
    """Return the type of a matrix in a layer that predicts ahead: no text that is measured runs through it."""
    group = Group(tensor.name, (tensor,))
    return min(tensor.type, group.probes[0], key=group.nbytes)


def _recipe(search: Search, solution: Solution, fixed: Mapping[str, TensorType]) -> Recipe:
    sizes: dict[str, int] = dict.fromkeys((kind.name for kind in fixed.values()), 0)
    for group, kind in zip(search.groups, solution.types, strict=True):
        sizes[kind.name] = sizes.get(kind.name, 0) + group.nbytes(kind)
    quantized = {kind.name for kind in (*solution.types, *fixed.values()) if kind.block_len > 1}
    if not quantized:  # llama.cpp takes the types of tensors only in quantized files
        return Recipe("F16")
    most = max(quantized, key=sizes.__getitem__)
    types = {
        tensor.name: kind.name
        for group, kind in zip(search.groups, solution.types, strict=True)
        for tensor in group.tensors
    } | {name: kind.name for name, kind in fixed.items()}
    named = "" if any(kind.block_len > 1 for kind in solution.types) else "F16"  # a head alone names no file
    return Recipe(FILE_TYPES.get(most, most), types, named=named)


def _report(search: Search, solution: Solution, others: int, budget_bytes: int, num_tokens: int) -> Report:
    rows = tuple(
        Row(
            name=group.name,
            numbers=sum(tensor.num_elements for tensor in group.tensors),
            probes=probes,
            type=kind.name,
            nbytes=group.nbytes(kind),
            predicted=predicted,
        )
        for group, kind, probes, predicted in zip(
            search.groups, solution.types, search.probes, solution.predicted, strict=True
        )
    )
    return Report(
        rows=rows,
        nbytes=sum(row.nbytes for row in rows) + others,
        budget_bytes=budget_bytes,
        num_tokens=num_tokens,
        predicted=sum(solution.predicted),
        measured=solution.measured,
    )
