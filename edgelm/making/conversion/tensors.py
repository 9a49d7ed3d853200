"""The tensors of a GGUF, each with the rows of the folder that it is made from.

Owns how rows are selected, permuted, stacked, transposed and repacked, a piece at a time. Which tensor is made from
which is in layout.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgelm.making.conversion.number_types import STORED, Kind, num_bytes, rounded
from edgelm.making.conversion.reader import FolderReader, spans

Bytes = NDArray[np.uint8]
MXFP4_BLOCK = 32  # numbers that share a scale


class Content(Protocol):
    """The numbers of a tensor in the GGUF."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The tensors of the folder that it is made from."""

    def pieces(self, reader: FolderReader, kind: Kind) -> Iterator[Bytes]:
        """Yield the bytes of the tensor one after the other."""


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A tensor of the GGUF. `shape` is in the order of numpy: the columns last."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    content: Content

    @property
    def nbytes(self) -> int:
        return num_bytes(self.kind, math.prod(self.shape))


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a tensor of the folder: `count` of them, from `first` on, each `step`-th."""

    tensor: str
    first: int
    count: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of parts, one part after the other, with `offset` added to all numbers.

    `head_rows`: the rows of an attention head, whose two halves alternate in the GGUF; 0: they stay as they are.
    `flat`: each number is a row of its own. `blocks`: the order of equal blocks of columns; empty: as they are.
    `logarithms`: the numbers are those of the rates at which states fade, and become the rates, negative.
    """

    parts: tuple[Part, ...]
    head_rows: int = 0
    offset: float = 0.0
    flat: bool = False
    blocks: tuple[int, ...] = ()
    logarithms: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(part.tensor for part in self.parts)

    def pieces(self, reader: FolderReader, kind: Kind) -> Iterator[Bytes]:
        for part in self.parts:
            columns = 1 if self.flat else reader.sizes(part.tensor)[1]
            as_stored = reader.change is None and not self.offset and not self.logarithms
            as_stored = as_stored and _kind_of(reader, part.tensor) == kind
            for first, count in spans(part.count, columns * part.step, self.head_rows or 1):
                start, length = part.first + first * part.step, (count - 1) * part.step + 1
                if as_stored:
                    raw = self._ordered(reader.raw_rows(part.tensor, start, length, columns)[:: part.step])
                    yield np.ascontiguousarray(raw).view(np.uint8).reshape(-1)
                    continue
                ordered = self._ordered(reader.rows(part.tensor, start, length, columns)[:: part.step])
                values = np.ascontiguousarray(ordered, np.float32)
                if self.logarithms:
                    values = -np.exp(values)
                yield rounded(values + np.float32(self.offset) if self.offset else values, kind)

    def _ordered(self, rows: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return rows with alternating rows of the two halves of each head, or with blocks of columns in order."""
        if self.blocks:
            return rows.reshape(len(rows), len(self.blocks), -1)[:, list(self.blocks)].reshape(rows.shape)
        if not self.head_rows:
            return rows
        halves = rows.reshape(-1, 2, self.head_rows // 2, rows.shape[1])
        return halves.swapaxes(1, 2).reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class TransposedRows:
    """The columns `first`, `first + step`, … of matrices that are stored [matrices, columns, rows], as rows."""

    tensor: str
    num_matrices: int
    first: int = 0
    step: int = 1

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.tensor,)

    def pieces(self, reader: FolderReader, kind: Kind) -> Iterator[Bytes]:
        """Yield one matrix at a time: a row of it needs all rows of the folder's."""
        num_rows, width = reader.sizes(self.tensor)
        height = num_rows // self.num_matrices
        for matrix in range(self.num_matrices):
            rows = np.empty((len(range(self.first, width, self.step)), height), np.float32)
            for first, count in spans(height, width):
                values = reader.rows(self.tensor, matrix * height + first, count)
                rows[:, first : first + count] = values[:, self.first :: self.step].T
            for first, count in spans(len(rows), height):
                yield rounded(rows[first : first + count], kind)


@dataclass(frozen=True, slots=True)
class MXFP4Rows:
    """Rows `first`, `first + step`, … of MXFP4 blocks, in the layout of llama.cpp: a scale, then 16 bytes of codes.

    In a folder, a byte holds two neighbours; there, a number of the first half of a block and one of the second.
    """

    blocks: str  # [experts, rows, blocks, 16]
    scales: str  # [experts, rows, blocks]
    first: int = 0
    step: int = 1

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.blocks, self.scales)

    def pieces(self, reader: FolderReader, kind: Kind) -> Iterator[Bytes]:
        assert kind == Kind.MXFP4
        num_rows, num_blocks = reader.sizes(self.scales)
        for first, count in spans(num_rows, num_blocks * MXFP4_BLOCK, self.step):
            codes = reader.raw_rows(self.blocks, first * num_blocks, count * num_blocks).astype(np.uint8, copy=False)
            scales = reader.raw_rows(self.scales, first, count).view(np.uint8)[self.first :: self.step]
            codes = codes.reshape(count, num_blocks, 16)[self.first :: self.step]
            numbers = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:2], MXFP4_BLOCK)
            halves = numbers[..., :16] | (numbers[..., 16:] << 4)
            yield np.concatenate([scales[..., None], halves], -1).reshape(-1)


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of the configuration that llama.cpp reads as a tensor."""

    values: tuple[float, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        return ()

    def pieces(self, reader: FolderReader, kind: Kind) -> Iterator[Bytes]:
        yield rounded(np.array([self.values], np.float32), kind)


def _kind_of(reader: FolderReader, name: str) -> Kind | None:
    stored = reader.tensor(name).dtype.name
    return None if stored == "F64" else STORED.get(stored)
