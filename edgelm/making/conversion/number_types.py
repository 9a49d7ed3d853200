"""The types of numbers that a conversion reads and writes: their sizes, and rounding float32 to them.

Knows nothing of tensors and files.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from edgelm.base.errors import ModelError

Target = Literal["source", "F32", "F16", "BF16", "Q8_0"]
Kind = GGMLQuantizationType
KINDS = {"F32": Kind.F32, "F16": Kind.F16, "BF16": Kind.BF16, "Q8_0": Kind.Q8_0}
STORED = {"F64": Kind.F32, "F32": Kind.F32, "F16": Kind.F16, "BF16": Kind.BF16}  # by the type in the folder


def kind_for(target: Target, stored: str, columns: int) -> Kind:
    """Return the type that a matrix gets, by its type in the folder. Raises ModelError for one without a rounding."""
    if stored not in STORED:
        raise ModelError(f"a tensor of the type {stored} cannot be converted", "convert the model's 16-bit files")
    kind = STORED[stored] if target == "source" else KINDS[target]
    if columns % GGML_QUANT_SIZES[kind][0]:
        return Kind.F16  # as llama.cpp's converter: such rows are no whole number of blocks
    return kind


def num_bytes(kind: Kind, num_elements: int) -> int:
    """Return the bytes of so many numbers, a whole number of blocks."""
    block, size = GGML_QUANT_SIZES[kind]
    assert num_elements % block == 0, (kind, num_elements)
    return num_elements // block * size


def to_float32(raw: NDArray[np.generic], stored: str) -> NDArray[np.float32]:
    """Return the values of numbers as a folder stores them; those of BF16 come as uint16."""
    if stored == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32)


def rounded(values: NDArray[np.float32], kind: Kind) -> NDArray[np.uint8]:
    """Return the bytes of float32 rows [rows, columns] in a type, as llama.cpp rounds to it."""
    assert values.dtype == np.float32
    with np.errstate(over="ignore"):  # more than float16 has is infinite there: the check on the way out tells
        data: NDArray[np.generic] = quantize(np.ascontiguousarray(values), kind)
    return np.ascontiguousarray(data).view(np.uint8).reshape(-1)


def restored(data: NDArray[np.uint8], kind: Kind) -> NDArray[np.float32]:
    """Return the values of bytes in a type."""
    values: NDArray[np.float32] = dequantize(data, kind)
    return values.reshape(-1)
