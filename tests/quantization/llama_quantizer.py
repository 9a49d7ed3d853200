"""llama.cpp's function that quantizes, without anything of edgelm around it."""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Collection
from pathlib import Path

from edgelm.backends.llama.api import native_log, start_backend
from edgelm.checkpoints.gguf import GGUF
from edgelm.llama_binding import L
from edgelm.quantization.candidates import TYPES
from edgelm.quantization.recipe import Recipe
from edgelm.quantization.sensitivity import Importance

FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_M": 12}
FILE_TYPES |= {
    "Q4_K_M": 15,
    "Q5_K_M": 17,
    "Q6_K": 18,
    "IQ3_XXS": 23,
    "IQ4_NL": 25,
    "IQ3_S": 26,
    "IQ2_M": 29,
    "IQ4_XS": 30,
}


class LlamaQuantizer:
    """An `automatic.Quantizer`."""

    def matrices(self, source: GGUF) -> Collection[str]:
        logger, lines = logging.getLogger("llama.cpp"), _Lines()
        level = logger.level
        logger.addHandler(lines)
        logger.setLevel(logging.INFO)
        try:
            _quantize(source, Path(os.devnull), Recipe("Q4_1", pure=True), None, dry_run=True)
        finally:
            logger.setLevel(level)
            logger.removeHandler(lines)
        return {match[1] for line in lines.lines if (match := re.search(r"\] (\S+) +- \[.* -> ", line))}

    def write(self, source: GGUF, destination: Path, recipe: Recipe, importance: Importance | None = None) -> None:
        _quantize(source, destination, recipe, importance, dry_run=False)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _quantize(source: GGUF, path: Path, recipe: Recipe, importance: Importance | None, *, dry_run: bool) -> None:
    start_backend()
    native_log.clear()
    params = L.llama_model_quantize_default_params()
    params.nthread, params.allow_requantize, params.dry_run = 1, True, dry_run
    params.ftype, params.pure = FILE_TYPES[recipe.file_type], recipe.pure
    overrides = (L.llama_model_tensor_override * (len(recipe.tensor_types) + 1))()
    for entry, (name, kind) in zip(overrides, recipe.tensor_types.items(), strict=False):
        entry.pattern, entry.type = f"^{re.escape(name)}$".encode(), TYPES[kind].id
    params.tt_overrides = ctypes.cast(overrides, type(params.tt_overrides))
    columns = (L.llama_model_imatrix_data * (len(importance or {}) + 1))()
    for part, (name, values) in zip(columns, (importance or {}).items(), strict=False):
        part.name, part.size = name.encode(), values.size
        part.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    if importance:
        params.imatrix = ctypes.cast(columns, type(params.imatrix))
    result = L.llama_model_quantize(os.fsencode(source.path), os.fsencode(path), ctypes.byref(params))
    assert result == 0, native_log.lines[-3:]
