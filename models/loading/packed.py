"""Matrices on their way from mapped files into the layouts of the kernels, slice after slice.

Owns the upload through two buffers, the slices of rows, filling the planes of a weight, and the protocol of a
matrix in a file. Knows no format: those are in stored.py and quantized_folder.py. Slices and buffers keep host memory
small.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from edgelm.base.errors import ModelError
from edgelm.kernels.layout import (
    CHUNK,
    SUPER,
    TILE,
    DenseWeight,
    Layout,
    PackedWeight,
    ScaleKind,
    Weight,
    pack_codes,
    pack_scales,
)

SLICE_WEIGHTS = 2**21  # packing takes about 30 bytes for each on the device
UPLOAD_BYTES = 2**23  # in one copy to the device
NUM_BUFFERS = 2
SCALE_TYPES: dict[ScaleKind, torch.dtype] = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "e8m0": torch.uint8,
    "u8": torch.uint8,
    "i8": torch.int8,
}
Rows = slice | NDArray[np.int64]  # rows of a matrix, in the order to read them
Progress = Callable[[int], None]  # receives a number of bytes


class Parts(NamedTuple):
    """The parts of some rows of a quantized matrix, row after row, without padding."""

    codes: Tensor  # uint8 or int8 [rows, columns]
    scales: Tensor  # [rows, groups] of the layout's scale type
    offsets: Tensor | None = None  # as scales; uint8 for the offset kind "zero"
    supers: Tensor | None = None  # float16 [rows, columns / 256, 1 or 2]


class StoredMatrix(Protocol):
    """A matrix in a file. `read` is called for many slices, and may keep shared parts on the device."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int]: ...  # rows, columns
    @property
    def kind(self) -> Layout | torch.dtype: ...  # a dtype: it is not quantized
    def read(self, rows: Rows, uploads: Uploads) -> Parts | Tensor: ...  # a tensor: [rows, columns] of that dtype
    def order(self) -> Tensor | None: ...  # of the columns, int64
    def close(self) -> None: ...  # after the last read


class Uploads:
    """Copies arrays to one device. On CUDA, a copy runs while the next buffer is filled from the file."""

    def __init__(self, device: torch.device | str, progress: Progress | None = None) -> None:
        self.device = torch.device(device)
        self._progress = progress
        self._buffers: list[Tensor | None] = [None] * NUM_BUFFERS
        self._copied: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS
        self._next = 0

    def send(self, array: NDArray[np.generic]) -> Tensor:
        """Return an array as bytes on the device: uint8, the bytes in the last dimension.

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
        copy = staged.to(self.device, non_blocking=True)
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self._copied[index] = event
        return copy

    def send_whole(self, array: NDArray[np.generic]) -> Tensor:
        """Return a copy of a whole array as bytes on the device, sent in pieces."""
        row_bytes = max(array.nbytes // max(len(array), 1), 1)
        step = max(UPLOAD_BYTES // row_bytes, 1)
        copy = torch.empty((*array.shape[:-1], array.shape[-1] * array.itemsize), dtype=torch.uint8, device=self.device)
        for start in range(0, len(array), step):
            copy[start : start + step] = self.send(array[start : start + step])
        return copy

    def _free_buffer(self, index: int, nbytes: int) -> Tensor:
        """Return a buffer that is large enough, after the last copy from it has ended."""
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
    """Yield the start and end of slices of whole tiles; only the last may end within a tile."""
    step = max(SLICE_WEIGHTS // max(columns, 1) // TILE, 1) * TILE
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def release_pages(view: memoryview) -> None:
    """Release the pages of a mapped file under a view. Reading them again brings them back.

    They stay in the system's file cache while there is room, but no longer count as memory of this process.
    """
    mapped = view.obj
    if not isinstance(mapped, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED") or not len(view):
        return
    whole = np.frombuffer(mapped, np.uint8)
    offset = np.frombuffer(view, np.uint8).ctypes.data - whole.ctypes.data
    start = offset - offset % mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, start, min(offset + len(view), len(whole)) - start)


class PlaneFiller:
    """The planes of one weight or of a stack, to be filled with rows."""

    def __init__(self, layout: Layout, rows: int, columns: int, device: torch.device, num_matrices: int = 0) -> None:
        self.layout = layout
        self.rows = rows
        self.columns = columns
        self._step = max(CHUNK, layout.group, SUPER if layout.two_level else 0)
        width = -(-columns // self._step) * self._step
        self._stacked = num_matrices > 0
        stack = (num_matrices,) if num_matrices else ()
        tiles = -(-rows // TILE)
        chunks = width // CHUNK
        entries = width // max(CHUNK, layout.group)

        def plane(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty((*stack, tiles, *shape), dtype=dtype, device=device)

        scale_type = SCALE_TYPES[layout.scale]
        self._codes = plane(torch.int32, chunks, 256 if layout.bits == 8 else 128)
        self._high = plane(torch.int32, chunks, 32 * (layout.bits - 4)) if layout.bits in (5, 6) else None
        self._scales = plane(scale_type, entries, TILE, layout.per_entry)
        self._offsets = None
        if layout.offset != "none":
            self._offsets = plane(
                torch.uint8 if layout.offset == "zero" else scale_type, entries, TILE, layout.per_entry
            )
        self._supers = None
        if layout.two_level:
            self._supers = plane(torch.float16, width // SUPER, TILE, 2 if layout.offset == "min" else 1)

    def put(self, parts: Parts, first_row: int, matrix: int = 0) -> None:
        """Pack rows of a matrix from the start of a tile on; only the matrix's last rows may end within a tile."""
        rows, columns = parts.codes.shape
        assert columns == self.columns
        assert first_row % TILE == 0
        assert rows % TILE == 0 or first_row + rows == self.rows
        short, narrow = -rows % TILE, -columns % self._step
        tiles = slice(first_row // TILE, (first_row + rows + short) // TILE)
        codes, high = pack_codes(pad(parts.codes, (0, narrow, 0, short)), self.layout.bits, self.layout.group)
        groups = (columns + narrow) // self.layout.group

        def scales(plane: Tensor) -> Tensor:
            return pack_scales(pad(plane, (0, groups - plane.shape[-1], 0, short)), self.layout.per_entry)

        self._plane(self._codes, matrix)[tiles] = codes
        self._plane(self._scales, matrix)[tiles] = scales(parts.scales)
        if self._high is not None:
            assert high is not None
            self._plane(self._high, matrix)[tiles] = high
        if self._offsets is not None:
            assert parts.offsets is not None
            self._plane(self._offsets, matrix)[tiles] = scales(parts.offsets)
        if self._supers is not None:
            assert parts.supers is not None
            supers = [pack_scales(pad(factor, (0, 0, 0, short)), 1) for factor in parts.supers.unbind(-1)]
            self._plane(self._supers, matrix)[tiles] = torch.cat(supers, -1)

    def weight(self, order: Tensor | None = None) -> PackedWeight:
        """Return the weight after all rows were put."""
        return PackedWeight(
            self.layout,
            self.rows,
            self.columns,
            codes=self._codes,
            scales=self._scales,
            high=self._high,
            offsets=self._offsets,
            supers=self._supers,
            order=order,
        )

    def _plane(self, plane: Tensor, matrix: int) -> Tensor:
        return plane[matrix] if self._stacked else plane


def pack(layout: Layout, parts: Parts) -> PackedWeight:
    """Return a weight from the parts of a whole matrix."""
    rows, columns = parts.codes.shape
    filler = PlaneFiller(layout, rows, columns, parts.codes.device)
    filler.put(parts, 0)
    return filler.weight()


def load_matrices(
    matrices: Sequence[StoredMatrix], uploads: Uploads, rows: NDArray[np.int64] | None, *, stack: bool
) -> Weight:
    """Read matrices into one weight; `rows` selects rows of each matrix, in order.

    Raises ModelError where matrices differ in shape or quantization.
    """
    require_same_kind(matrices)
    first = matrices[0]
    num_rows, columns = first.shape
    num_rows = num_rows if rows is None else len(rows)
    count = len(matrices) if stack else 0
    filler: PlaneFiller | None = None
    data: Tensor | None = None
    if isinstance(first.kind, Layout):
        filler = PlaneFiller(first.kind, num_rows, columns, uploads.device, count)
    else:
        data = torch.empty(((count,) if stack else ()) + (num_rows, columns), dtype=first.kind, device=uploads.device)
    order = _order(matrices, columns, stack=stack)
    for index, matrix in enumerate(matrices):
        for start, end in row_slices(num_rows, columns):
            part = matrix.read(slice(start, end) if rows is None else rows[start:end], uploads)
            if isinstance(part, Parts):
                assert filler is not None
                filler.put(part, start, index)
            else:
                assert data is not None
                (data[index] if stack else data)[start:end] = part
        matrix.close()
    if filler is not None:
        return filler.weight(None if order is None else order.to(uploads.device))
    assert data is not None
    return DenseWeight(data)


def require_same_kind(matrices: Sequence[StoredMatrix]) -> None:
    """Raise ModelError where matrices of one stack differ in shape or quantization."""
    first = matrices[0]
    for matrix in matrices:
        if matrix.shape != first.shape or matrix.kind != first.kind:
            message = f"{matrix.name} and {first.name} differ in shape or quantization, and are parts of one layer"
            raise ModelError(message, "choose llama.cpp's engine")


def _order(matrices: Sequence[StoredMatrix], columns: int, *, stack: bool) -> Tensor | None:
    """Return the order of the columns, for a stack one order for each matrix; None where no matrix reorders them."""
    orders = [matrix.order() for matrix in matrices]
    if not stack or all(order is None for order in orders):
        return orders[0]
    return torch.stack([torch.arange(columns) if order is None else order for order in orders])
