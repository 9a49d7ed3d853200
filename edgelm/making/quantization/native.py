"""llama.cpp's function that quantizes a GGUF, and the plan of its types and sizes.

Owns the parameters of the function and the reading of its log, its only report. It cannot be cancelled, so it runs in a
worker that can be killed. Knows nothing of texts and terminals.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.llama.api import fill_struct, native_log, start_backend
from edgelm.backends.llama.binding import L
from edgelm.base.errors import EdgeLMError, EngineError, ModelError, RequestError
from edgelm.base.machine.cpu import usable_cores
from edgelm.checkpoints.files import shown
from edgelm.checkpoints.gguf import GGUF
from edgelm.checkpoints.gguf_parse import TENSOR_TYPES
from edgelm.checkpoints.summary import blocks_ahead
from edgelm.making.quantization.recipe import Recipe
from edgelm.making.quantization.types import ABORT_WITHOUT, COPY, NEED_IMPORTANCE, file_type, tensor_type

Importance = Mapping[str, NDArray[np.float32]]  # by the names of tensors: [columns] or [experts, columns]

QUANTIZED = frozenset(kind.name for kind in TENSOR_TYPES.values() if kind.block_len > 1)
TABLES = ("token_embd.weight", "per_layer_token_embd.weight")
OUTPUT = "output.weight"
WITHOUT_DATA = "Q4_K"
BACKSLASHED = r"\\\1"
MAX_TEXT = 127  # bytes of a key's text, in llama.cpp's structure
LINE_S = 0.2  # between two reports

_START = re.compile(r"\[ *(\d+)/ *(\d+)\] (\S+) +- \[")
_NEW = re.compile(r"\((\w+)\)\s*$")
_FALLBACK = re.compile(r"(\S+) +- ncols .*required for type +(\w+)\)")
_SPECIAL = re.compile(r"([.\[\]{}()\\*+?^$|])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to quantize, beside the recipe."""

    output_type: str | None = None  # of the output matrix; None: as the rule of the file type says
    embedding_type: str | None = None
    allow_requantize: bool = False  # matrices that are quantized already
    threads: int = 0  # 0: one for each core
    keys: Mapping[str, str | int] = field(default_factory=dict)  # of metadata, added to those of the source


class PlannedTensor(NamedTuple):
    """A tensor and the type that it will get."""

    name: str
    source: str  # type
    type: str
    nbytes: int
    asked: str = ""  # the type that it cannot have; empty: it gets what was asked


class Step(NamedTuple):
    """A tensor that is quantized now."""

    name: str
    number: int  # from 1
    total: int
    left_s: float | None  # None: unknown


def plan(source: GGUF, recipe: Recipe, importance: Importance | None, options: Options) -> list[PlannedTensor]:
    """Return the types that llama.cpp will choose, without writing anything. Raises EdgeLMError."""
    _check_names(source, recipe, options)
    reader = _PlanReader()
    _run(source, Path(os.devnull), recipe, importance, options, reader.read, dry_run=True)
    planned = []
    for tensor in source.tensors.values():
        kind = reader.types.get(tensor.name) or tensor.type.name
        chosen = tensor_type(kind) if kind != tensor.type.name else tensor.type
        nbytes = prod(tensor.shape) // chosen.block_len * chosen.block_bytes
        asked = reader.fallbacks.get(tensor.name, kind)
        if asked == kind and tensor.name in recipe.tensor_types:  # no matrix, or one that llama.cpp never quantizes
            asked = tensor_type(recipe.tensor_types[tensor.name]).name
        planned.append(PlannedTensor(tensor.name, tensor.type.name, kind, nbytes, "" if asked == kind else asked))
    return planned


def _check_names(source: GGUF, recipe: Recipe, options: Options) -> None:
    """Raise RequestError for unknown tensors, and for types that a tensor cannot have, where llama.cpp would abort."""
    for name in recipe.tensor_types:
        if name not in source.tensors:
            raise RequestError(f"{source.name} has no tensor {shown(name)}", "take a name that the model has")
    given = dict.fromkeys(TABLES, ("--embedding-type", options.embedding_type))
    given[OUTPUT] = "--output-type", options.output_type
    for name, (flag, text) in given.items():
        kind = tensor_type(text) if text else None
        if kind and name in source.tensors and source.tensors[name].shape[0] % kind.block_len:
            raise RequestError(f"the rows of {name} are no multiple of {kind.name}'s blocks", f"take {flag} Q8_0")


def quantize(
    source: GGUF,
    destination: Path,
    recipe: Recipe,
    importance: Importance | None = None,
    options: Options | None = None,
    progress: Callable[[Step], object] = lambda _step: None,
) -> list[PlannedTensor]:
    """Quantize a GGUF, all parts of a split one into one file, and return the types. `destination` is replaced.

    After an error, a part of the file may remain. Raises RequestError for a recipe that the source or its importance
    data does not allow, ModelError for a source with damaged weights, EdgeLMError where the file cannot be written.
    """
    options = options or Options()
    check_importance(source, importance)
    planned = plan(source, recipe, importance, options)
    check_sources(planned, options)
    check_data(planned, recipe, importance)
    sizes = {tensor.name: prod(tensor.shape) for tensor in source.tensors.values()}
    reader = _ProgressReader(sizes, progress)
    _run(source, destination, recipe, importance, options, reader.read)
    return planned


def check_importance(source: GGUF, importance: Importance | None) -> None:
    """Raise RequestError for importance data of another model."""
    if importance is None:
        return
    known = [name for name in importance if name in source.tensors]
    if not known:
        raise RequestError(f"the importance matrix is not of {source.name}", "make one of this model")
    for name in known:
        shape = source.tensors[name].shape
        columns = shape[0] * (shape[2] if len(shape) > 2 else 1)
        if importance[name].size != columns and name not in TABLES:
            raise RequestError(
                f"the importance matrix is of another model: {shown(name)} has {columns:,} columns, "
                f"not {importance[name].size:,}",
                "make one of this model",
            )


def check_sources(planned: list[PlannedTensor], options: Options) -> None:
    """Raise RequestError for matrices that are quantized already, unless that is allowed."""
    for tensor in planned:
        if _is_requantized(tensor) and not options.allow_requantize:
            raise RequestError(
                f"the source is quantized already: {shown(tensor.name)} is {tensor.source}",
                "take the original in F32, F16 or BF16; --allow-requantize takes this one, and the errors add up",
            )


def _is_requantized(tensor: PlannedTensor) -> bool:
    return tensor.type != tensor.source and tensor.source in QUANTIZED and tensor.type in QUANTIZED


def check_data(planned: list[PlannedTensor], recipe: Recipe, importance: Importance | None) -> None:
    """Raise RequestError for a tensor whose type needs importance data, where there are none."""
    for tensor in planned:
        if tensor.type == tensor.source or (importance and tensor.name in importance) or not _needs(tensor, recipe):
            continue
        if tensor.name in (*TABLES, OUTPUT):
            flag = "--output-type" if tensor.name == OUTPUT else "--embedding-type"
            hint = f"add {flag} Q4_K"
        else:
            hint = (
                "leave out --no-imatrix, or take another type" if importance is None else "calibrate on a longer text"
            )
        raise RequestError(f"{tensor.type} needs importance data, and {shown(tensor.name)} has none", hint)


def without_data(source: GGUF, recipe: Recipe, importance: Importance | None, options: Options) -> Recipe:
    """Return a recipe that gives matrices of layers which predict ahead a type that needs no importance data.

    No text runs through these layers, so there are none.
    """
    ahead = blocks_ahead(source)
    if not ahead:
        return recipe
    lacking = [
        tensor.name
        for tensor in plan(source, recipe, importance, options)
        if tensor.name.startswith(ahead) and _needs(tensor, recipe) and tensor.name not in (importance or {})
    ]
    return replace(recipe, tensor_types={**dict.fromkeys(lacking, WITHOUT_DATA), **recipe.tensor_types})


def _needs(tensor: PlannedTensor, recipe: Recipe) -> bool:
    if tensor.name in (*TABLES, OUTPUT):
        return tensor.type in ABORT_WITHOUT
    return tensor.type in NEED_IMPORTANCE or (tensor.type == "Q2_K" and recipe.file_type == "Q2_K_S")


class _Native:
    """The parameters of llama.cpp's function, and the memory that they point to."""

    def __init__(self, recipe: Recipe, importance: Importance | None, options: Options, *, dry_run: bool) -> None:
        chosen = file_type(recipe.file_type)
        assert chosen.is_quantized or not recipe.tensor_types, "llama.cpp ignores them where the file is not quantized"
        self.params = fill_struct(
            L.llama_model_quantize_default_params(),
            ftype=chosen.id,
            only_copy=chosen.name == COPY,
            pure=recipe.pure,
            nthread=options.threads or usable_cores().physical,
            # Matrices that are only dequantized lose nothing; `check_sources` refuses the others.
            allow_requantize=True,
            output_tensor_type=tensor_type(options.output_type).id if options.output_type else L.GGML_TYPE_COUNT,
            token_embedding_type=tensor_type(options.embedding_type).id
            if options.embedding_type
            else L.GGML_TYPE_COUNT,
            dry_run=dry_run,
        )
        if recipe.tensor_types:
            overrides = (L.llama_model_tensor_override * (len(recipe.tensor_types) + 1))()
            for entry, (name, kind) in zip(overrides, recipe.tensor_types.items(), strict=False):
                entry.pattern, entry.type = _pattern(name), tensor_type(kind).id
            self._overrides = overrides
            self.params.tt_overrides = ctypes.cast(overrides, type(self.params.tt_overrides))
        named = {"general.file_type": file_type(recipe.named).id} if recipe.named else {}
        if stated := {**options.keys, **named}:
            keys = (L.llama_model_kv_override * (len(stated) + 1))()
            for entry, (key, value) in zip(keys, stated.items(), strict=False):
                entry.key = key.encode()
                if isinstance(value, int):
                    entry.tag, entry.value.val_i64 = L.LLAMA_KV_OVERRIDE_TYPE_INT, value
                else:
                    entry.tag = L.LLAMA_KV_OVERRIDE_TYPE_STR
                    entry.value.val_str = value.encode()[:MAX_TEXT].decode("utf-8", "ignore").encode()
            self._keys = keys
            self.params.kv_overrides = ctypes.cast(keys, type(self.params.kv_overrides))
        if importance:
            entries = (L.llama_model_imatrix_data * (len(importance) + 1))()
            self._arrays = [np.ascontiguousarray(values, np.float32).reshape(-1) for values in importance.values()]
            for entry, name, values in zip(entries, importance, self._arrays, strict=False):
                entry.name, entry.size = name.encode(), values.size
                entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            self._entries = entries
            self.params.imatrix = ctypes.cast(entries, type(self.params.imatrix))


def _id_of(kind: str | None) -> int:
    return tensor_type(kind).id if kind else int(L.GGML_TYPE_COUNT)


def _pattern(name: str) -> bytes:
    """Return a regular expression of C++ for one name."""
    return f"^{_SPECIAL.sub(BACKSLASHED, name)}$".encode()


class _PlanReader:
    """The types in the log of a dry run."""

    def __init__(self) -> None:
        self.types: dict[str, str] = {}
        self.fallbacks: dict[str, str] = {}  # the types that tensors cannot have
        self._tensor = ""

    def read(self, text: str) -> None:
        if match := _START.search(text):
            self._tensor = match[3]
        elif match := _FALLBACK.search(text):
            self.fallbacks[match[1]] = match[2].upper()
        elif self._tensor and (match := _NEW.search(text)):
            self.types[self._tensor] = match[1].upper()


class _ProgressReader:
    """Reports the tensor that the log names. The time left goes by the numbers of the tensors before it."""

    def __init__(self, sizes: Mapping[str, int], progress: Callable[[Step], object]) -> None:
        self._sizes = sizes
        self._total = sum(sizes.values())
        self._progress = progress
        self._done = 0
        self._started_at = time.monotonic()
        self._reported_at = 0.0

    def read(self, text: str) -> None:
        if not (match := _START.search(text)):
            return
        now = time.monotonic()
        if now - self._reported_at >= LINE_S:
            left = (now - self._started_at) * (self._total / self._done - 1) if self._done else None
            self._progress(Step(match[3], int(match[1]), int(match[2]), left))
            self._reported_at = now
        self._done += self._sizes.get(match[3], 0)


def _run(
    source: GGUF,
    destination: Path,
    recipe: Recipe,
    importance: Importance | None,
    options: Options,
    read: Callable[[str], None],
    *,
    dry_run: bool = False,
) -> None:
    """Call llama.cpp's function, and give the pieces of its log to `read`. Raises EdgeLMError."""
    native = _Native(recipe, importance, options, dry_run=dry_run)
    start_backend()
    native_log.clear()
    native_log.listen = read
    try:
        failed = L.llama_model_quantize(os.fsencode(source.path), os.fsencode(destination), ctypes.byref(native.params))
    finally:
        native_log.listen = None
    if failed:
        raise _failure(source)


def _failure(source: GGUF) -> EdgeLMError:
    """Return the error of llama.cpp's function, by its log."""
    reason = next((line for line in native_log.errors if not line.startswith("=")), "llama.cpp gives no reason")
    reason = reason.removeprefix("failed to quantize: ")
    if "iostream" in reason:
        return EdgeLMError(
            f"the new file of {source.name} could not be written whole",
            "the disk is full, or a limit of file sizes is reached",
        )
    if "invalid data" in reason or "validation failed" in reason:
        return ModelError(
            f"{source.name} has weights that are no numbers: {reason}",
            "convert it again, or download it again (edgelm pull --verify MODEL)",
        )
    return EngineError(f"{source.name} cannot be quantized: {reason}")
