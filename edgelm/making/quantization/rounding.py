"""The values of a matrix after quantization: ggml's own functions, so that they are those of the file written later.

Owns the calls to ggml. Knows nothing of files, models and the choice of types.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.llama.binding import BUILD
from edgelm.checkpoints.gguf_parse import TensorType

Floats = NDArray[np.float32]

CHUNK_NUMBERS = 2**20  # of a call: another thread takes the next ones

_To_float = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
_From_float = ctypes.CFUNCTYPE(
    ctypes.c_size_t,
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
    *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
)


class _Traits(ctypes.Structure):
    """The structure ggml_type_traits."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", _To_float),
        ("from_float_ref", ctypes.c_void_p),
    )


def dequantized(data: NDArray[np.uint8], kind: TensorType) -> Floats:
    """Return the numbers in the bytes of whole blocks as float32: [numbers]."""
    if kind.name == "F32":
        return data.view(np.float32)
    numbers = np.empty(len(data) // kind.block_bytes * kind.block_len, np.float32)
    convert = _to_float(kind.id)
    convert(data.ctypes.data, numbers.ctypes.data, numbers.size)
    return numbers


def rounded(values: Floats, kind: TensorType, importance: Floats | None) -> Floats:
    """Return matrices [matrices, rows, columns] as they are after quantization.

    `importance` weighs the errors of the columns: [matrices, columns].
    """
    result = np.empty_like(values)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(_round, values, result, kind, importance, *part) for part in _parts(values.shape)]:
            done.result()
    return result


def _parts(shape: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    num_matrices, num_rows, num_columns = shape
    height = max(1, CHUNK_NUMBERS // num_columns)
    for matrix in range(num_matrices):
        for start in range(0, num_rows, height):
            yield matrix, slice(start, min(start + height, num_rows))


def _round(
    values: Floats, result: Floats, kind: TensorType, importance: Floats | None, matrix: int, rows: slice
) -> None:
    part = np.ascontiguousarray(values[matrix, rows])
    num_rows, num_columns = part.shape
    blocks = np.empty(part.size // kind.block_len * kind.block_bytes, np.uint8)
    weights = None if importance is None else np.ascontiguousarray(importance[matrix])
    pointer = None if weights is None else weights.ctypes.data
    _from_float()(kind.id, part.ctypes.data, blocks.ctypes.data, 0, num_rows, num_columns, pointer)
    result[matrix, rows] = dequantized(blocks, kind).reshape(part.shape)


@cache
def _from_float() -> ctypes._FuncPointer:
    return _From_float(("ggml_quantize_chunk", _library()))


@cache
def _to_float(kind: int) -> ctypes._FuncPointer:
    traits = ctypes.CFUNCTYPE(ctypes.POINTER(_Traits), ctypes.c_int)(("ggml_get_type_traits", _library()))
    function: ctypes._FuncPointer = traits(kind).contents.to_float
    return function


@cache
def _library() -> ctypes.CDLL:
    """Return the library of ggml that llama.cpp has loaded: the binding leaves its functions out."""
    return ctypes.CDLL(str(next(path for path in sorted(BUILD.lib_dir.glob("libggml-base.*")) if path.is_file())))
