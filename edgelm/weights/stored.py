"""Matrices as files keep them where it takes one tensor alone: plain numbers, or ggml's blocks.

Owns the reading of slices of them. What is made of several tensors (codes here, scales there) is in
quantized_folder.py.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgelm.kernels.layout import Layout
from edgelm.weights.ggml_blocks import BlockType
from edgelm.weights.packed import Parts
from edgelm.weights.streaming import Rows, Uploads, give_back

PLAIN_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


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
            _give_back_rows(self._view, rows, self.shape[0])
        return sent

    def order(self) -> Tensor | None:
        return None

    def close(self) -> None:
        give_back(self._view)


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
        _give_back_rows(self._view, rows, self.shape[0])
        return self._split(sent)

    def order(self) -> Tensor | None:
        return None

    def close(self) -> None:
        give_back(self._view)


def _give_back_rows(view: memoryview, rows: Rows, num_rows: int) -> None:
    """Give back the pages of rows that follow each other; of others, `close` does it."""
    if isinstance(rows, slice):
        row_bytes = len(view) // num_rows
        give_back(view[rows.start * row_bytes : rows.stop * row_bytes])
