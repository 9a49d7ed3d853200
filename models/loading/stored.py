"""Matrices that one tensor holds: plain numbers of 16 or 32 bits, or ggml's quantized blocks.

Owns reading slices of them, and taking blocks apart on the device into codes and scales, as ggml-common.h and
ggml-quants.c define them. A type whose codes have fewer than four bits is not supported. Matrices of several tensors
(codes in one, scales in another) are in quantized_folder.py. Knows nothing of the order in which kernels read codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgelm.kernels.layout import Layout
from edgelm.models.loading.packed import Parts, Rows, Uploads, release_pages

PLAIN_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the value, and the scale is half


class BlockType(NamedTuple):
    """A quantized type: the layout of its matrices, and the split of its blocks into parts."""

    layout: Layout
    split: Callable[[Tensor], Parts]  # takes uint8 [rows, blocks, block bytes]


class PlainMatrix:
    """A matrix of numbers of 16 or 32 bits, as the raw bytes of the file."""

    def __init__(
        self, name: str, view: memoryview, shape: tuple[int, int], dtype: torch.dtype, *, transposed: bool = False
    ) -> None:
        self.name = name
        self.kind: Layout | torch.dtype = dtype
        self._view = view
        stored = shape[::-1] if transposed else shape
        self._array: NDArray[np.generic] = np.frombuffer(view, f"<u{dtype.itemsize}").reshape(stored)
        if transposed:
            self._array = self._array.T
        self._dtype = dtype
        self.shape = shape

    def read(self, rows: Rows, uploads: Uploads) -> Tensor:
        sent = uploads.send(self._array[rows]).view(self._dtype)
        if self._array.flags.c_contiguous:
            _release_rows(self._view, rows, self.shape[0])
        return sent

    def order(self) -> Tensor | None:
        return None

    def close(self) -> None:
        release_pages(self._view)


class BlockMatrix:
    """A matrix of one of ggml's quantized types."""

    def __init__(self, name: str, view: memoryview, shape: tuple[int, int], kind: BlockType, block_bytes: int) -> None:
        self.name = name
        self.shape = shape
        self.kind: Layout | torch.dtype = kind.layout
        self._split = kind.split
        self._view = view
        self._blocks: NDArray[np.uint8] = np.frombuffer(view, np.uint8).reshape(shape[0], -1, block_bytes)

    def read(self, rows: Rows, uploads: Uploads) -> Parts:
        sent = uploads.send(self._blocks[rows])
        _release_rows(self._view, rows, self.shape[0])
        return self._split(sent)

    def order(self) -> Tensor | None:
        return None

    def close(self) -> None:
        release_pages(self._view)


def _release_rows(view: memoryview, rows: Rows, num_rows: int) -> None:
    """Release the pages of consecutive rows; for selected rows, `close` does it."""
    if isinstance(rows, slice):
        row_bytes = len(view) // num_rows
        release_pages(view[rows.start * row_bytes : rows.stop * row_bytes])


def _halves(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """Return float16 numbers of each block: [rows, blocks, count]."""
    return blocks[..., start : start + 2 * count].contiguous().view(torch.float16)


def _divided(packed: Tensor, count: int) -> Tensor:
    """Divide the last dimension into equal parts: [.., count, part]."""
    return packed.reshape(*packed.shape[:-1], count, -1)


def _nibbles(packed: Tensor) -> Tensor:
    """Return the low nibbles of bytes, then the high nibbles."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _bits(packed: Tensor, width: int) -> Tensor:
    """Split bytes into numbers of `width` bits, the lowest bits first: a new dimension before the last."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    numbers: Tensor = (packed.unsqueeze(-2) >> shifts.unsqueeze(-1)) & (2**width - 1)
    return numbers


def _rows(codes: Tensor) -> Tensor:
    """Join the codes of a row's blocks: [rows, columns]."""
    return codes.reshape(codes.shape[0], -1)


def _q4_0(blocks: Tensor) -> Parts:
    return Parts(_rows(_nibbles(blocks[..., 2:])), _rows(_halves(blocks, 0)))


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(_rows(_nibbles(blocks[..., 4:])), _rows(_halves(blocks, 0)), _rows(_halves(blocks, 2)))


def _fifth_bits(packed: Tensor) -> Tensor:
    """Return the fifth bits of 32 codes from four bytes: bit j belongs to code j."""
    return _bits(packed, 1).transpose(-2, -1).flatten(-2) << 4


def _q5_0(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return Parts(_rows(codes), _rows(_halves(blocks, 0)))


def _q5_1(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return Parts(_rows(codes), _rows(_halves(blocks, 0)), _rows(_halves(blocks, 2)))


def _q8_0(blocks: Tensor) -> Parts:
    return Parts(_rows(blocks[..., 2:].contiguous().view(torch.int8)), _rows(_halves(blocks, 0)))


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8 scales and 8 mins of 6 bits from the 12 bytes of a K block."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), -1)
    mins = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), -1)
    return scales, mins


def _k_supers(blocks: Tensor) -> Tensor:
    """Return the factors of scales and mins. ggml subtracts a min and a layout adds it, hence the sign."""
    supers = _halves(blocks, 0, 2)
    return torch.stack((supers[..., 0], -supers[..., 1]), -1)


def _q4_k(blocks: Tensor) -> Parts:
    scales, mins = _k_scales(blocks[..., 4:16])
    codes = _nibbles(_divided(blocks[..., 16:], 4))  # [rows, blocks, 4, 64]
    return Parts(_rows(codes), _rows(scales), _rows(mins), _k_supers(blocks))


def _q5_k(blocks: Tensor) -> Parts:
    scales, mins = _k_scales(blocks[..., 4:16])
    low = _divided(_nibbles(_divided(blocks[..., 48:], 4)), 2).flatten(-3, -2)  # [.., 8, 32]
    codes = low | _bits(blocks[..., 16:48], 1) << 4
    return Parts(_rows(codes), _rows(scales), _rows(mins), _k_supers(blocks))


def _q6_k(blocks: Tensor) -> Parts:
    low = _divided(_bits(_divided(blocks[..., :128], 2), 4), 2).flatten(-3, -2)  # [.., 2, 4, 32]
    high = _bits(_divided(blocks[..., 128:192], 2), 2)  # [.., 2, 4, 32]
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return Parts(_rows(low | high << 4), _rows(scales), None, _halves(blocks, 208))


def _iq4_xs(blocks: Tensor) -> Parts:
    low = _bits(blocks[..., 4:8], 4).transpose(-2, -1).flatten(-2)  # [rows, blocks, 8]
    high = _bits(blocks[..., 2:4], 2).transpose(-2, -1).flatten(-2)
    scales = (low | high << 4).view(torch.int8) - 32
    return Parts(_rows(_nibbles(_divided(blocks[..., 8:], 8))), _rows(scales), None, _halves(blocks, 0))


def _mxfp4(blocks: Tensor) -> Parts:
    return Parts(_rows(_nibbles(blocks[..., 1:])), _rows(blocks[..., :1]))


MXFP4 = Layout("mxfp4", 4, 32, "e8m0", "codebook", codebook=E2M1)
BLOCK_TYPES = {
    "Q4_0": BlockType(Layout("q4_0", 4, 32, "f16", zero=8), _q4_0),
    "Q4_1": BlockType(Layout("q4_1", 4, 32, "f16", offset="min"), _q4_1),
    "Q5_0": BlockType(Layout("q5_0", 5, 32, "f16", zero=16), _q5_0),
    "Q5_1": BlockType(Layout("q5_1", 5, 32, "f16", offset="min"), _q5_1),
    "Q8_0": BlockType(Layout("q8_0", 8, 32, "f16", "signed"), _q8_0),
    "Q4_K": BlockType(Layout("q4_k", 4, 32, "u8", offset="min"), _q4_k),
    "Q5_K": BlockType(Layout("q5_k", 5, 32, "u8", offset="min"), _q5_k),
    "Q6_K": BlockType(Layout("q6_k", 6, 16, "i8", zero=32), _q6_k),
    "IQ4_NL": BlockType(Layout("iq4_nl", 4, 32, "f16", "codebook", codebook=IQ4), _q4_0),
    "IQ4_XS": BlockType(Layout("iq4_xs", 4, 32, "i8", "codebook", codebook=IQ4), _iq4_xs),
    "MXFP4": BlockType(MXFP4, _mxfp4),
}
