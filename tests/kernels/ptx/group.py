"""A group of warps that run together, one instruction at a time: their registers, and the memory that they see.

Owns who its lanes are, and operations that are started now and end when they are waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tests.kernels.ptx.dependents import Dependence
from tests.kernels.ptx.fences import Fences
from tests.kernels.ptx.memory import GlobalMemory, Memory, SharedMemory
from tests.kernels.ptx.races import Races
from tests.kernels.ptx.registers import Registers
from tests.kernels.ptx.values import Array, Mask

Lanes = NDArray[np.bool_]


@dataclass(slots=True)
class _Pending:
    mask: Lanes
    group: Array  # number of the group of operations that it belongs to, by lane
    finish: Callable[[Lanes], None]


class Queue:
    """Operations that run beside the warps: they end as late as allowed, when their group is waited for."""

    def __init__(self, num_lanes: int) -> None:
        self.num_committed = np.zeros(num_lanes, np.int64)
        self._pending: list[_Pending] = []

    def reset(self) -> None:
        """Forget all operations."""
        self.num_committed.fill(0)
        self._pending.clear()

    def start(self, mask: Mask, finish: Callable[[Lanes], None]) -> None:
        """Start an operation for some lanes, in the group that they have open."""
        lanes = np.ones(len(self.num_committed), bool) if mask is None else mask.copy()
        self._pending.append(_Pending(lanes, self.num_committed.copy(), finish))

    def commit(self, mask: Mask) -> None:
        """Close the lanes' open group."""
        self.num_committed += 1 if mask is None else mask

    def wait(self, mask: Mask, num_open: int | None) -> None:
        """Finish all but the last `num_open` closed groups; None: all operations, closed or not."""
        for operation in self._pending:
            ready = operation.mask if mask is None else operation.mask & mask
            if num_open is not None:
                ready = ready & (operation.group < self.num_committed - num_open)
            if ready.any():
                operation.mask = operation.mask & ~ready
                operation.finish(ready)
        self._pending = [operation for operation in self._pending if operation.mask.any()]


@dataclass(slots=True)
class Group:
    """Warps of some CTAs. `ctas` and `threads` are the CTA of each lane, among those that run, and its thread there."""

    registers: Registers
    shared: SharedMemory
    ctas: NDArray[np.int64]
    threads: NDArray[np.int64]
    races: Races | None
    parameters: dict[str, NDArray[np.uint64]]  # bits, [1]
    memory: GlobalMemory = field(default_factory=lambda: GlobalMemory([]))
    fences: Fences | None = None
    dependence: Dependence | None = None  # with programmatic dependent launch
    copies: Queue = field(init=False)
    products: Queue = field(init=False)

    def __post_init__(self) -> None:
        self.copies, self.products = Queue(len(self.ctas)), Queue(len(self.ctas))

    def space(self, shared: bool) -> Memory:
        return self.shared if shared else self.memory

    def addresses(self, base: Array, offset: int, mask: Mask) -> NDArray[np.int64]:
        """Return the addresses of the lanes that run."""
        everywhere = np.broadcast_to(base, len(self.ctas)) if base.size == 1 else base
        chosen = everywhere if mask is None else everywhere[mask]
        return chosen.astype(np.int64) + offset

    def running(self, mask: Mask) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the CTAs and the threads of the lanes that run."""
        return (self.ctas, self.threads) if mask is None else (self.ctas[mask], self.threads[mask])
