"""Matrices of files on their way into the layouts of the kernels, slice after slice.

Owns the filling of a weight's planes, and what any format must offer for it. Knows no format and no file: what reads
one is in ggml_blocks.py and quantized_folder.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from edgelm.errors import ModelError
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
from edgelm.weights.streaming import Rows, Uploads, row_slices

SCALE_TYPES: dict[ScaleKind, torch.dtype] = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "e8m0": torch.uint8,
    "u8": torch.uint8,
    "i8": torch.int8,
}


class Parts(NamedTuple):
    """What some rows of a quantized matrix consist of, row after row, without padding."""

    codes: Tensor  # uint8 or int8 [rows, columns]
    scales: Tensor  # [rows, groups] of the layout's scale type
    offsets: Tensor | None = None  # as scales; of "zero" uint8
    supers: Tensor | None = None  # float16 [rows, columns / 256, 1 or 2]


class StoredMatrix(Protocol):
    """A matrix in a file. `read` may be called for many slices; on its device it keeps what it needs between them."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int]: ...  # rows, columns
    @property
    def kind(self) -> Layout | torch.dtype: ...  # a dtype: it is not quantized
    def read(self, rows: Rows, uploads: Uploads) -> Parts | Tensor: ...  # a tensor: [rows, columns] of that dtype
    def order(self) -> Tensor | None: ...  # of the columns, int64
    def close(self) -> None: ...  # nothing of it is read any more


class PlaneFiller:
    """The planes of one weight, or of a stack, that rows are put into."""

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
        """Pack rows of a matrix that begin with a whole tile; only its last rows may end within one."""
        rows, columns = parts.codes.shape
        assert columns == self.columns
        assert first_row % TILE == 0
        assert rows % TILE == 0 or first_row + rows == self.rows
        short, narrow = -rows % TILE, -columns % self._step
        tiles = slice(first_row // TILE, (first_row + rows + short) // TILE)
        codes, high = pack_codes(pad(parts.codes, (0, narrow, 0, short)), self.layout.bits)
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
            both = [pack_scales(pad(each, (0, 0, 0, short)), 1) for each in parts.supers.unbind(-1)]
            self._plane(self._supers, matrix)[tiles] = torch.cat(both, -1)

    def weight(self, order: Tensor | None = None) -> PackedWeight:
        """Return the weight, once all rows are there."""
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
    """Return a weight of whole matrix parts."""
    rows, columns = parts.codes.shape
    filler = PlaneFiller(layout, rows, columns, parts.codes.device)
    filler.put(parts, 0)
    return filler.weight()


def load(matrices: Sequence[StoredMatrix], uploads: Uploads, rows: NDArray[np.int64] | None, *, stack: bool) -> Weight:
    """Read matrices into one weight; `rows` says which rows of each, in which order.

    Raises ModelError where matrices differ in shape or quantization.
    """
    first = matrices[0]
    for each in matrices:
        if each.shape != first.shape or each.kind != first.kind:
            message = f"{each.name} and {first.name} differ in shape or quantization, and are parts of one layer"
            raise ModelError(message, "choose llama.cpp's engine")
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


def _order(matrices: Sequence[StoredMatrix], columns: int, *, stack: bool) -> Tensor | None:
    """Return the order of the columns, of a stack that of each matrix; None where it is the plain one everywhere."""
    orders = [each.order() for each in matrices]
    if not stack or all(each is None for each in orders):
        return orders[0]
    return torch.stack([torch.arange(columns) if each is None else each for each in orders])
