"""The memory of CUDA graphs, as torch keeps it: what a capture frees serves later ones of its pool and stream.

Owns the count of bytes for each pool and stream. Knows nothing of what is captured.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Place = tuple[object, object]  # pool, stream


class GraphPools:
    """The memory that captures allocate. `reserved` is the most that was in use at one time, by pool and stream."""

    def __init__(self) -> None:
        self.reserved: dict[Place, int] = {}
        self._in_use: dict[int, tuple[Place, int, StorageWeakRef]] = {}  # by address of the storage

    def allocate(self, pool: object, stream: object, results: object, arguments: Iterable[object]) -> None:
        """Count the memory of a function's results that is not memory of its arguments."""
        place = pool, stream
        self.reserved.setdefault(place, 0)
        self._in_use = {key: value for key, value in self._in_use.items() if not value[2].expired()}
        known = {tensor.untyped_storage()._cdata for tensor in tensors_in(arguments)}
        for tensor in tensors_in([results]):
            storage = tensor.untyped_storage()
            if tensor.is_meta and storage._cdata not in known | self._in_use.keys():
                self._in_use[storage._cdata] = place, storage.nbytes(), StorageWeakRef(storage)
        used = sum(size for where, size, _ in self._in_use.values() if where == place)
        self.reserved[place] = max(self.reserved[place], used)


def tensors_in(values: Iterable[object]) -> Iterable[torch.Tensor]:
    """Yield the tensors among some values, and in their lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
