"""Global and shared memory: which addresses there are, and their bytes.

Global memory is the memory of the host's tensors, at their own addresses: a kernel gets real pointers. Shared memory
begins as rubbish, one stretch for each CTA that runs. Owns bounds and alignment. Knows nothing of instructions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from tests.kernels.ptx.errors import BoundsError
from tests.kernels.ptx.parse import Instruction
from tests.kernels.ptx.registers import SHARED_BASE
from tests.kernels.ptx.values import Array

RUBBISH_BYTE = 0xCD


class Part:
    """A stretch of memory that can be read as numbers of any width."""

    def __init__(self, data: Array, start: int) -> None:
        self.data = data  # bytes
        self.start = start
        self._views: dict[np.dtype[np.generic], Array] = {}

    def view(self, dtype: np.dtype[np.generic]) -> Array:
        if dtype not in self._views:
            whole = len(self.data) // dtype.itemsize * dtype.itemsize
            self._views[dtype] = self.data[:whole].view(dtype)
        return self._views[dtype]


class Memory(Protocol):
    """A space of addresses. `split` yields a part of it, which of the accesses lie there, and at which byte each."""

    def split(
        self, addresses: Array, ctas: Array, num_bytes: int, instruction: Instruction
    ) -> Iterator[tuple[int, Part, slice | Array, Array]]: ...


class GlobalMemory:
    """The memory of tensors on the CPU, [storage]. A part's number is that of the storage."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self.parts = [
            Part(torch.empty(0, dtype=torch.uint8).set_(storages[start]).numpy(), start)
            for start in sorted(storages)
            if storages[start].nbytes()
        ]
        self.starts = np.array([part.start for part in self.parts], np.int64)

    def split(
        self, addresses: Array, ctas: Array, num_bytes: int, instruction: Instruction
    ) -> Iterator[tuple[int, Part, slice | Array, Array]]:
        low, high = int(addresses.min()), int(addresses.max())
        at = int(np.searchsorted(self.starts, low, "right")) - 1
        if at >= 0 and high + num_bytes <= self.parts[at].start + len(self.parts[at].data):
            yield at, self.parts[at], slice(None), addresses - self.parts[at].start
            return
        owners = np.searchsorted(self.starts, addresses, "right") - 1
        for owner in np.unique(owners):
            chosen = owners == owner
            part = self.parts[owner] if owner >= 0 else Part(np.zeros(0, np.uint8), 0)
            where = addresses[chosen] - part.start
            beyond = where + num_bytes > len(part.data)
            if beyond.any():
                first = int(where[beyond][0])
                place = f"byte {first} of a tensor's {len(part.data)}" if owner >= 0 else "before all tensors"
                raise BoundsError(
                    f"{instruction}: {int(beyond.sum())} threads access {num_bytes} bytes outside of all tensors,"
                    f" the first at {part.start + first:#x} ({place})"
                )
            yield int(owner), part, chosen, where


class SharedMemory:
    """The shared memory of several CTAs, one after the other."""

    def __init__(self, num_ctas: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.stride = -(-num_bytes // 1024) * 1024
        self.part = Part(np.full(num_ctas * self.stride, RUBBISH_BYTE, np.uint8), 0)

    def fill_with_rubbish(self) -> None:
        self.part.data.fill(RUBBISH_BYTE)

    def split(
        self, addresses: Array, ctas: Array, num_bytes: int, instruction: Instruction
    ) -> Iterator[tuple[int, Part, slice | Array, Array]]:
        inside = addresses - SHARED_BASE
        if int(inside.min()) < 0 or int(inside.max()) + num_bytes > self.num_bytes:
            bad = inside[(inside < 0) | (inside + num_bytes > self.num_bytes)]
            raise BoundsError(
                f"{instruction}: {len(bad)} threads access {num_bytes} bytes outside of shared memory,"
                f" the first at byte {int(bad[0])} of {self.num_bytes}"
            )
        yield 0, self.part, slice(None), inside + ctas * self.stride


def require_aligned(addresses: Array, num_bytes: int, instruction: Instruction) -> None:
    """Raise BoundsError unless all addresses are multiples of the width of an access."""
    wrong = addresses & (num_bytes - 1)
    if wrong.any():
        raise BoundsError(f"{instruction}: address {int(addresses[wrong != 0][0]):#x} is no multiple of {num_bytes}")


def load(
    memory: Memory, addresses: Array, ctas: Array, dtype: np.dtype[np.generic], count: int, instruction: Instruction
) -> Array:
    """Return `count` numbers from each address, [addresses, count]."""
    out = np.empty((len(addresses), count), dtype)
    for _, part, chosen, where in memory.split(addresses, ctas, count * dtype.itemsize, instruction):
        out[chosen] = part.view(dtype)[(where // dtype.itemsize)[:, None] + np.arange(count)]
    return out


def store(memory: Memory, addresses: Array, ctas: Array, values: Array, instruction: Instruction) -> None:
    """Write numbers, [addresses, count]; where addresses are equal the last one stays."""
    count, dtype = values.shape[1], values.dtype
    for _, part, chosen, where in memory.split(addresses, ctas, count * dtype.itemsize, instruction):
        part.view(dtype)[(where // dtype.itemsize)[:, None] + np.arange(count)] = values[chosen]
