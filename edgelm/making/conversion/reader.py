"""Reads the tensors of a folder in pieces, as matrices, without mapping them: memory stays bounded by a piece.

Owns the two-dimensional view of a tensor: rows of its last dimension; a vector is a matrix of one column. Knows nothing
of what the tensors are for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from edgelm.base.errors import ModelError
from edgelm.checkpoints.files import cannot_open, shown
from edgelm.checkpoints.safetensors import Safetensors
from edgelm.checkpoints.safetensors_parse import Tensor
from edgelm.making.conversion.number_types import to_float32

PIECE_ELEMENTS = 2**21  # numbers that are converted at a time: 8 MiB in float32

# Takes the name of a tensor in the folder, float32 rows of it and the number of the first; returns the changed rows.
# It is called for all tensors but those in MXFP4, which are copied as they are.
Change = Callable[[str, NDArray[np.float32], int], NDArray[np.float32]]


class FolderReader:
    """The tensors of an open folder. A context manager: leaving it closes the files."""

    def __init__(self, model: Safetensors, change: Change | None = None) -> None:
        self.model = model
        self.change = change
        self._files = ExitStack()
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def tensor(self, name: str) -> Tensor:
        return self.model.tensors[name]

    def sizes(self, name: str) -> tuple[int, int]:
        """Return the rows and columns of a tensor."""
        shape = self.tensor(name).shape
        if len(shape) < 2:
            return self.tensor(name).num_elements, 1
        return self.tensor(name).num_elements // max(shape[-1], 1), shape[-1]

    def raw_rows(self, name: str, first: int, count: int, columns: int = 0) -> NDArray[np.generic]:
        """Return rows [count, columns] as they are stored: BF16 as uint16. 0 columns: those of the tensor."""
        tensor = self.tensor(name)
        columns = columns or self.sizes(name)[1]
        row_bytes = columns * tensor.dtype.bits // 8
        data = self._read(tensor, first * row_bytes, count * row_bytes)
        return np.frombuffer(data, tensor.dtype.numpy).reshape(count, columns)

    def rows(self, name: str, first: int, count: int, columns: int = 0) -> NDArray[np.float32]:
        """Return the values of rows [count, columns], changed as the caller of the conversion wants it."""
        values = to_float32(self.raw_rows(name, first, count, columns), self.tensor(name).dtype.name)
        return values if self.change is None else self.change(name, values, first)

    def _read(self, tensor: Tensor, offset: int, num_bytes: int) -> bytearray:
        """Read bytes of a tensor. Raises ModelError."""
        data = bytearray(num_bytes)
        view, done = memoryview(data), 0
        try:
            descriptor = self._descriptor(tensor.path)
            while done < num_bytes:
                got = os.preadv(descriptor, [view[done:]], tensor.offset + offset + done)
                if not got:
                    raise ModelError(f"{shown(tensor.path.name)} became shorter while it was read", "convert it again")
                done += got
        except OSError as error:
            raise cannot_open(shown(tensor.path.name), error) from None
        return data

    def _descriptor(self, path: Path) -> int:
        if path not in self._descriptors:
            self._descriptors[path] = self._files.enter_context(path.open("rb", buffering=0)).fileno()
        return self._descriptors[path]


def spans(num_rows: int, columns: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of pieces of a matrix: as many rows as a piece may have, in multiples, but at least one."""
    rows = max(PIECE_ELEMENTS // max(columns, 1) // multiple, 1) * multiple
    for first in range(0, num_rows, rows):
        yield first, min(rows, num_rows - first)
