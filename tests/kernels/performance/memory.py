"""The memory of one multiprocessor: queues of bytes in front of the L1 cache, the L2 cache and DRAM.

Owns when a request is answered. Each queue serves in order at its rate; the latency of where the data lies is added.
The rates of L2 and DRAM are this multiprocessor's share of the GPU's. The CTAs of a multiprocessor share its L1 cache:
what all of them read is read from L2 by the first, and again where more than the cache holds came in between (LRU).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from tests.kernels.performance.gpus import L1_RATE, PORT_RATE, Gpu
from tests.kernels.performance.path import Request
from tests.kernels.performance.traffic import SECTOR

BACKLOG = 64  # cycles of work that may wait in front of the L1 cache before a warp's next access stalls: assumed


class Line(NamedTuple):
    """Data in the L1 cache that every CTA reads."""

    arrival: float  # cycle; of what is on its way, in the future
    filled: float  # bytes that had come into the cache when the data were touched last


class Memory:
    """The state of the queues and of the L1 cache, in cycles."""

    def __init__(self, gpu: Gpu, l2_rate: float, dram_rate: float, l1_bytes: float) -> None:
        self.gpu = gpu
        self.l1_bytes = l1_bytes
        self.l2_rate = min(l2_rate, PORT_RATE)
        self.dram_rate = min(dram_rate, PORT_RATE)
        self.l1_free = self.l2_free = self.dram_free = 0.0
        self.l1_busy = self.l2_bytes = self.dram_bytes = 0.0
        self._credit: dict[int, float] = {}  # by instruction: accesses that are due to be slow
        self._lines: dict[Hashable, Line] = {}
        self._filled = 0.0

    def accept(self, now: float) -> float:
        """Return when an access can be issued."""
        return max(now, self.l1_free - BACKLOG)

    def _l1(self, now: float, cycles: float) -> float:
        begin = max(now, self.l1_free)
        self.l1_free = begin + cycles
        self.l1_busy += cycles
        return self.l1_free

    def shared(self, now: float, wavefronts: float) -> float:
        """Return when shared memory has served an access."""
        return self._l1(now, max(1.0, wavefronts))

    def load(self, now: float, index: int, request: Request | None, place: Hashable, *, bypass: bool = False) -> float:
        """Return when the data of a load are in the registers.

        `place` is the same for the accesses by which CTAs read what they have in common. With `bypass`, the data do not
        go into the L1 cache.
        """
        if request is None or request.sectors <= 0:
            return self._l1(now, 1.0) + self.gpu.l1_latency
        served = self._l1(now, max(1.0, request.sectors * SECTOR / L1_RATE))
        done = served + self.gpu.l1_latency
        misses, pending = request.misses, request.pending
        if misses <= 0:
            return done
        line = self._line(place) if request.common > 0 and not bypass else None
        if line is not None:
            misses *= 1.0 - request.common
            pending *= 1.0 - request.common
            done = max(done, line.arrival)
        size = misses * SECTOR
        self.l2_free = max(self.l2_free, served) + size / self.l2_rate
        self.l2_bytes += size
        waits = min(1.0, (misses + pending) / request.sectors)
        if waits > 0 and self._due(index, waits):
            done = max(done, self.l2_free + self.gpu.l2_latency)
            if request.dram > 0 and self._due(~index, request.dram):
                size /= waits
                self.dram_free = max(self.dram_free, served) + size / self.dram_rate
                self.dram_bytes += size
                done = max(done, self.dram_free + self.gpu.dram_latency)
        if not bypass:
            self._filled += misses * SECTOR
            if request.common > 0:
                self._lines[place] = Line(done if line is None else line.arrival, self._filled)
        return done

    def _line(self, place: Hashable) -> Line | None:
        """Return what lies at a place in the L1 cache, or is on its way there."""
        line = self._lines.get(place)
        return line if line is not None and self._filled - line.filled <= self.l1_bytes else None

    def _due(self, key: int, part: float) -> bool:
        """Return whether this time is one of the part of all times; the first one is."""
        credit = self._credit.get(key, 1.0 - part) + part
        self._credit[key] = credit - 1.0 if credit >= 1.0 - 1e-9 else credit
        return credit >= 1.0 - 1e-9

    def store(self, now: float, request: Request | None, to_dram: bool) -> float:
        """Return when a store has left the multiprocessor."""
        if request is None or request.sectors <= 0:
            return self._l1(now, 1.0)
        size = request.sectors * SECTOR
        served = self._l1(now, max(1.0, size / L1_RATE))
        self.l2_free = max(self.l2_free, served) + size / self.l2_rate
        self.l2_bytes += size
        if to_dram:
            self.dram_free = max(self.dram_free, served) + size / self.dram_rate
            self.dram_bytes += size
            return max(self.l2_free, self.dram_free - self.gpu.dram_latency)
        return self.l2_free
