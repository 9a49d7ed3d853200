"""The memory of one multiprocessor: queues of bytes in front of the L1 cache, the L2 cache and DRAM.

Owns when a request is answered. Each queue serves in order at its rate; the latency of where the data lies is added.
The rates of L2 and DRAM are this multiprocessor's share of the GPU's.
"""

from __future__ import annotations

from tests.kernels.performance.gpus import L1_RATE, PORT_RATE, Gpu
from tests.kernels.performance.path import Request
from tests.kernels.performance.traffic import SECTOR

BACKLOG = 64  # cycles of work that may wait in front of the L1 cache before a warp's next access stalls: assumed


class Memory:
    """The state of the queues, in cycles."""

    def __init__(self, gpu: Gpu, l2_rate: float, dram_rate: float) -> None:
        self.gpu = gpu
        self.l2_rate = min(l2_rate, PORT_RATE)
        self.dram_rate = min(dram_rate, PORT_RATE)
        self.l1_free = self.l2_free = self.dram_free = 0.0
        self.l1_busy = self.l2_bytes = self.dram_bytes = 0.0
        self._credit: dict[int, float] = {}  # by instruction: accesses that are due to be slow

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

    def load(self, now: float, index: int, request: Request | None, *, later: bool) -> float:
        """Return when the data of a load are in the registers. `later`: CTAs before have brought what all read."""
        if request is None or request.sectors <= 0:
            return self._l1(now, 1.0) + self.gpu.l1_latency
        served = self._l1(now, max(1.0, request.sectors * SECTOR / L1_RATE))
        misses = request.misses * (1.0 - request.common) if later else request.misses
        done = served + self.gpu.l1_latency
        if misses <= 0:
            return done
        size = misses * SECTOR
        self.l2_free = max(self.l2_free, served) + size / self.l2_rate
        self.l2_bytes += size
        waits = min(1.0, (misses + request.pending) / request.sectors)
        if not self._due(index, waits):
            return done
        done = max(done, self.l2_free + self.gpu.l2_latency)
        if request.dram > 0 and self._due(~index, request.dram):
            size /= waits
            self.dram_free = max(self.dram_free, served) + size / self.dram_rate
            self.dram_bytes += size
            done = max(done, self.dram_free + self.gpu.dram_latency)
        return done

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
