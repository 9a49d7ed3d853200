"""Matrices of ggml's types become kernel weights with the same numbers, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from edgelm.kernels.layout import PackedWeight, dequantize
from edgelm.models.loading.packed import pack
from edgelm.models.loading.stored import BLOCK_TYPES

BITS = {
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "Q5_0": 5.5,
    "Q5_1": 6.0,
    "Q8_0": 8.5,
    "Q4_K": 4.625,
    "Q5_K": 5.625,
    "Q6_K": 6.5625,
    "IQ4_NL": 4.5,
    "IQ4_XS": 4.3125,
    "MXFP4": 4.25,
}


def packed(name: str, blocks: NDArray[np.uint8]) -> PackedWeight:
    """Pack rows of blocks, uint8 [rows, blocks, bytes]."""
    kind = BLOCK_TYPES[name]
    return pack(kind.layout, kind.split(torch.from_numpy(blocks)))


def by_gguf(name: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return quants.dequantize(blocks.reshape(len(blocks), -1), GGMLQuantizationType[name])


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_random_blocks(name: str) -> None:
    """Random bytes, so that some scales are subnormal, huge, infinite or NaN."""
    rng = np.random.default_rng()
    _, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    for rows, count in ((16, 2), (1, 1), (37, 3)):
        blocks = rng.integers(0, 256, (rows, count, nbytes), np.uint8)
        expected = by_gguf(name, blocks)
        got = dequantize(packed(name, blocks)).numpy()
        assert got.shape == expected.shape
        same = got.view(np.uint32) == expected.view(np.uint32)
        assert (same | (np.isnan(got) & np.isnan(expected))).all()


def test_every_type_is_as_small_as_in_the_file() -> None:
    assert {name: kind.layout.bits_per_weight for name, kind in BLOCK_TYPES.items()} == BITS
