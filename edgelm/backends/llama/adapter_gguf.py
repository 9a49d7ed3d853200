"""Writes an adapter of PEFT's as the GGUF that llama.cpp loads, for one model.

Owns the names of layers in a GGUF, the rows that its converter permutes, the stacks of experts, and the scaling.
adapter.py checks a GGUF adapter.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGUFType, GGUFWriter
from numpy.typing import NDArray

from edgelm.base.disk import require_space
from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.checkpoints.adapter import Adapter, LowRank, plain_name
from edgelm.checkpoints.files import shown
from edgelm.checkpoints.gguf import GGUF
from edgelm.checkpoints.shape import gguf_shape
from edgelm.models.families import FAMILIES, Family, family_of_gguf

FORMAT = 1  # of the written files: a part of their identity
OTHER_MODEL = "give an adapter that was trained on this model"
MERGE = "merge it into the model's folder: edgelm convert FOLDER OUT.gguf --lora ADAPTER"
EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
MIN_ALPHA = 1e-6
_LAYERS = frozenset(
    "embedding output qkv q k v out gate_up gate up down router expert_gate expert_up expert_down".split()
)

Array = NDArray[np.float32]


class Change(NamedTuple):
    """The change of one tensor of a GGUF: of a matrix, or of a part of a tensor with all experts."""

    layer: LowRank
    expert: int | None
    heads: int  # whose rows the GGUF has in another order; 0: the same order


def changes_of(model: GGUF, adapter: Adapter) -> dict[str, list[Change]]:
    """Return the changes by the tensors of the GGUF. Raises ModelError for those that llama.cpp cannot apply."""
    family = family_of_gguf(model.architecture)
    if family is None:
        message = f"edgelm does not know how an adapter's layers are named in a GGUF of {model.architecture}"
        raise ModelError(message, "give a GGUF of the adapter, made by llama.cpp's convert_lora_to_gguf.py")
    for whole in adapter.whole.values():
        if whole.trained:
            message = f"{adapter.name} replaces {shown(whole.name)}, which llama.cpp cannot do beside a model"
            raise ModelError(message, MERGE)
    names = _Names(family)
    shape = gguf_shape(model.values)
    changes: dict[str, list[Change]] = {}
    for layer in adapter.low_rank.values():
        if layer.magnitude:
            raise ModelError(f"{adapter.name} is DoRA, which llama.cpp cannot apply beside a model", MERGE)
        place = names.find(layer.module)
        if place is None or place.layer >= shape.num_layers:
            message = f"{adapter.name} changes {shown(layer.module)}, which {model.name} does not have"
            raise ModelError(message, OTHER_MODEL)
        if place.field not in _LAYERS and place.name in model.tensors:  # in another order, or no matrix there
            message = f"{adapter.name} changes {shown(layer.module)}, which edgelm cannot apply beside a GGUF"
            raise ModelError(message, MERGE)
        heads = {"q": shape.num_heads, "k": shape.num_kv_heads}.get(place.field) if family.gguf_interleaved else None
        change = Change(layer, place.expert, heads[place.layer] if heads else 0)
        changes.setdefault(place.name, []).append(change)
    for name, parts in changes.items():
        _check_change(model, adapter, name, parts)
    return changes


def _check_change(model: GGUF, adapter: Adapter, name: str, parts: list[Change]) -> None:
    tensor = model.tensors.get(name)
    if tensor is None and name == OUTPUT:
        message = f"{adapter.name} changes the output matrix, which is the embedding of {model.name}, too"
        raise ModelError(message, "train the adapter without lm_head")
    if tensor is None:
        raise ModelError(f"{adapter.name} changes {shown(name)}, which {model.name} does not have", OTHER_MODEL)
    experts = [part.expert for part in parts]
    num_experts = tensor.shape[2] if len(tensor.shape) == 3 else None
    fits = experts == [None] if num_experts is None else None not in experts and len(set(experts)) == len(experts)
    if not fits or (num_experts is not None and max(expert or 0 for expert in experts) >= num_experts):
        raise ModelError(f"{adapter.name} changes other experts of {shown(name)} than {model.name} has", OTHER_MODEL)
    for part in parts:
        if part.layer.shape != tensor.shape[1::-1]:
            sizes = (" x ".join(map(str, shape)) for shape in (part.layer.shape, tensor.shape[1::-1]))
            message = f"{adapter.name} changes {shown(part.layer.module)} as {next(sizes)}"
            raise ModelError(f"{message}, and that of {model.name} is {next(sizes)}", OTHER_MODEL)


class _Place(NamedTuple):
    name: str  # in the GGUF
    field: str  # of `Names`
    layer: int
    expert: int | None


class _Names:
    """From the layers' names in a folder to those of the tensors in a GGUF."""

    def __init__(self, family: Family) -> None:
        self._gguf = family.gguf_names
        # A GGUF of Llama may be of Mistral and Mixtral, which have no architecture of their own.
        folders = [family, *(other for other in FAMILIES if not other.gguf and family.gguf == "llama")]
        self._patterns = [
            (field.name, re.compile(_pattern(plain_name(getattr(names, field.name)))))
            for names in dict.fromkeys(folder.folder_names for folder in folders)
            for field in fields(names)
            if getattr(names, field.name) and getattr(self._gguf, field.name)
        ]

    def find(self, module: str) -> _Place | None:
        """Return the place of a layer; None: there is none with this name."""
        for field, pattern in self._patterns:
            if match := pattern.fullmatch(plain_name(module)):
                layer, expert = (int(number) if (number := match.groupdict().get(key)) else None for key in "ie")
                name = getattr(self._gguf, field).format(i=layer) + ".weight"
                return _Place(name, field, layer or 0, expert)
        return None


def _pattern(name: str) -> str:
    """Return the regular expression of a name with {i} and {e}."""
    pattern = re.escape(name)
    for key in "ie":
        pattern = pattern.replace(rf"\{{{key}\}}", rf"(?P<{key}>\d{{1,4}})")
    return pattern


# -- the file ----------------------------------------------------------------------------------------------------------


def identity_of(model: GGUF, adapter: Adapter) -> bytes:
    """Return 16 bytes that identify the written file: the adapter's files, and what it takes from the model."""
    shape = gguf_shape(model.values)
    facts = FORMAT, model.architecture, shape, adapter.content()
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()


def write_adapter_gguf(path: Path, model: GGUF, adapter: Adapter, changes: dict[str, list[Change]]) -> None:
    """Write the GGUF in one step: another process sees the whole file or none."""
    require_space(path.parent, 2 * adapter.num_bytes, "the adapter as a GGUF")  # of 16 bits it becomes float32
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    writer = GGUFWriter(temporary, model.architecture)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        writer.add_type(GGUFType.ADAPTER)
        writer.add_string("adapter.type", "lora")
        alpha = adapter.alpha if abs(adapter.alpha) > MIN_ALPHA else 1.0  # llama.cpp takes 0 for none
        writer.add_float32("adapter.lora.alpha", alpha)
        for name, parts in changes.items():
            num_experts = model.tensors[name].shape[2] if parts[0].expert is not None else 0
            for part, array in _matrices(adapter, parts, alpha, num_experts):
                writer.add_tensor(f"{name}.{part}", array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        temporary.replace(path)
    except OSError as error:
        raise EdgeLMError(
            f"the adapter cannot be written to {path.parent}: {error.strerror}", "free some space, or move that folder"
        ) from None
    finally:
        with suppress(OSError):
            writer.close()
            temporary.unlink()


def _matrices(adapter: Adapter, parts: list[Change], alpha: float, num_experts: int) -> Iterator[tuple[str, Array]]:
    """Yield A and B of one tensor. llama.cpp scales by alpha / rank, so B takes the rest of the scaling.

    Experts are stacked: those without a change, and columns beyond an expert's own rank, are zeros.
    """
    rank = max(part.layer.rank for part in parts)
    loaded = []
    for part in parts:
        a, b = adapter.tensor(part.layer.a), adapter.tensor(part.layer.b)
        factor = part.layer.scaling * rank / alpha
        loaded.append((a, _interleaved(b if factor == 1 else b * np.float32(factor), part.heads)))
    a, b = loaded[0]
    if num_experts:
        all_a = np.zeros((num_experts, rank, a.shape[1]), np.float32)
        all_b = np.zeros((num_experts, len(b), rank), np.float32)
        for part, (a, b) in zip(parts, loaded, strict=True):
            all_a[part.expert, : len(a)] = a
            all_b[part.expert, :, : len(a)] = b
        a, b = all_a, all_b
    yield "lora_a", np.ascontiguousarray(a.T) if parts[0].layer.embedding else a
    yield "lora_b", b


def _interleaved(b: Array, heads: int) -> Array:
    """Return the rows of B of a query or key in the order of the GGUF: the two halves of each head alternate."""
    if not heads:
        return b
    halves = b.reshape(heads, 2, len(b) // heads // 2, b.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(b.shape)
