"""The types of ggml's tensors: their numbers in files, names, and sizes.

Owns the few that llama.cpp knows and the gguf library does not, and those that llama.cpp gave up.
"""

from __future__ import annotations

from typing import NamedTuple

from gguf.constants import GGML_QUANT_SIZES


class TensorType(NamedTuple):
    """How the numbers of a tensor are stored: `block_bytes` for each `block_len` numbers of a row."""

    id: int
    name: str
    block_len: int
    block_bytes: int


TENSOR_TYPES = {
    int(kind): TensorType(int(kind), kind.name, block_len, size) for kind, (block_len, size) in GGML_QUANT_SIZES.items()
}
# where llama.cpp's own table is newer than that of the gguf library, or differs from it
TENSOR_TYPES |= {9: TensorType(9, "Q8_1", 32, 36), 42: TensorType(42, "Q2_0", 64, 18)}
DROPPED_TYPES = {  # id: its name, and what took its place
    4: ("Q4_2", "Q4_0"),
    5: ("Q4_3", "Q4_1"),
    31: ("Q4_0_4_4", "Q4_0"),
    32: ("Q4_0_4_8", "Q4_0"),
    33: ("Q4_0_8_8", "Q4_0"),
    36: ("IQ4_NL_4_4", "IQ4_NL"),
    37: ("IQ4_NL_4_8", "IQ4_NL"),
    38: ("IQ4_NL_8_8", "IQ4_NL"),
}
