"""Bytes on their way from a mapped file to a device: through two buffers, with the mapped pages given back.

Owns what the way costs in memory of the host, and how far it has come. Knows no format. A matrix comes in slices of
whole tiles of rows, so that what is made of a slice stays small too.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgelm.kernels.layout import TILE

SLICE_WEIGHTS = 2**21  # packing takes some 30 bytes for each on the device
UPLOAD_BYTES = 2**23  # of what goes up in one piece
NUM_BUFFERS = 2

Rows = slice | NDArray[np.int64]  # which rows of a matrix, in which order
Progress = Callable[[int], None]  # is told a number of bytes


class Uploads:
    """Brings arrays to one device. Of CUDA, one copy runs while the next buffer is filled from the file."""

    def __init__(self, device: torch.device | str, progress: Progress | None = None) -> None:
        self.device = torch.device(device)
        self._progress = progress
        self._buffers: list[Tensor | None] = [None] * NUM_BUFFERS
        self._copied: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS
        self._next = 0

    def send(self, array: NDArray[np.generic]) -> Tensor:
        """Return an array of numbers as bytes on the device: uint8, the last dimension that of the bytes.

        The tensor is overwritten by the second `send` after this one, except on CUDA.
        """
        if array.ndim == 0:
            array = array.reshape(1)
        index, self._next = self._next, (self._next + 1) % NUM_BUFFERS
        buffer = self._free_buffer(index, array.nbytes)
        staged = buffer[: array.nbytes].view(*array.shape[:-1], -1)
        np.copyto(staged.numpy().view(array.dtype), array)
        if self._progress is not None:
            self._progress(array.nbytes)
        if self.device.type == "cpu":
            return staged
        there = staged.to(self.device, non_blocking=True)
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self._copied[index] = event
        return there

    def send_whole(self, array: NDArray[np.generic]) -> Tensor:
        """Return a copy of a whole array as bytes on the device, brought there in pieces."""
        row_bytes = max(array.nbytes // max(len(array), 1), 1)
        step = max(UPLOAD_BYTES // row_bytes, 1)
        there = torch.empty(
            (*array.shape[:-1], array.shape[-1] * array.itemsize), dtype=torch.uint8, device=self.device
        )
        for start in range(0, len(array), step):
            there[start : start + step] = self.send(array[start : start + step])
        return there

    def _free_buffer(self, index: int, nbytes: int) -> Tensor:
        """Return a buffer that is large enough, once nothing is copied from it any more."""
        event = self._copied[index]
        if event is not None:
            event.synchronize()
        buffer = self._buffers[index]
        if buffer is None or buffer.numel() < nbytes:
            pinned = self.device.type == "cuda"
            buffer = torch.empty(max(nbytes, 1), dtype=torch.uint8, pin_memory=pinned)
            self._buffers[index] = buffer
        return buffer


def row_slices(num_rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield the beginnings and ends of slices of whole tiles; only the last may have a part of one."""
    step = max(SLICE_WEIGHTS // max(columns, 1) // TILE, 1) * TILE
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def give_back(view: memoryview) -> None:
    """Let the system forget the pages of a mapped file that a view shows; reading them again brings them back.

    They stay in the system's cache of files as long as there is room, but are no more memory of this process.
    """
    mapped = view.obj
    if not isinstance(mapped, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED") or not len(view):
        return
    whole = np.frombuffer(mapped, np.uint8)
    offset = np.frombuffer(view, np.uint8).ctypes.data - whole.ctypes.data
    start = offset - offset % mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, start, min(offset + len(view), len(whole)) - start)
