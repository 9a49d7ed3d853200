"""One multiprocessor, cycle by cycle where something happens: warps, schedulers, units and scoreboard barriers.

Owns the simulation. A warp's next instruction issues when the stall of the last one is over, the barriers that it waits
for are released, its scheduler has a free slot and its unit is free. Knows nothing of grids.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.kernels.performance.code import Code, Instruction
from tests.kernels.performance.control import NUM_BARRIERS
from tests.kernels.performance.gpus import CTA_TURN, SCHEDULERS, Gpu
from tests.kernels.performance.memory import Memory
from tests.kernels.performance.path import Path, Request
from tests.kernels.performance.units import Unit, timing

BARRIER_LATENCY = 20  # cycles from the last warp's arrival to the first one's next instruction: assumed
PRODUCT_LATENCY = 30  # cycles of a wgmma beyond those of its tensor core: assumed
QUEUED = 12  # cycles until a memory access has read its operands: assumed
ACCESSES = {Unit.GLOBAL, Unit.SHARED, Unit.COPY, Unit.STORE}


@dataclass(slots=True)
class Warp:
    """A warp that runs."""

    number: int
    cta: int
    steps: list[int]
    requests: dict[int, Request]
    of_cta: int  # its number in the CTA
    at: int = 0
    released: list[float] = field(default_factory=lambda: [0.0] * NUM_BARRIERS)
    copies: float = 0.0  # when the last copy of the open group arrives
    groups: list[float] = field(default_factory=list)  # when each closed group of copies has arrived
    products: list[float] = field(default_factory=list)  # when each closed group of wgmma is done


@dataclass(slots=True)
class Result:
    """The result of simulating a multiprocessor."""

    cycles: float
    issued: int  # instructions of warps
    busy: dict[Unit, float]  # cycles of a scheduler's unit, of the busiest scheduler
    l1_busy: float
    l2_bytes: float
    dram_bytes: float
    issue_busy: float  # slots used, of the busiest scheduler
    ends: list[float]  # when each CTA ended, in order


class Multiprocessor:
    """Run CTAs, some at a time."""

    def __init__(self, gpu: Gpu, code: Code, paths: Sequence[Path], memory: Memory, stores_to_dram: bool) -> None:
        self.gpu = gpu
        self.paths = paths
        self.memory = memory
        self.stores_to_dram = stores_to_dram
        self._code = [(timing(instruction, gpu), instruction.control, instruction) for instruction in code.instructions]
        self._bypasses = [".BYPASS" in instruction.opcode for instruction in code.instructions]
        self._free = [[0.0] * (max(Unit) + 1) for _ in range(SCHEDULERS)]  # by unit: when it is free
        self._busy = [[0.0] * (max(Unit) + 1) for _ in range(SCHEDULERS)]  # by unit: cycles
        self._slots = [0] * SCHEDULERS
        self._arrived: dict[int, list[Warp]] = {}
        self._alive: dict[int, int] = {}
        self._queues: list[list[tuple[float, int, Warp]]] = [[] for _ in range(SCHEDULERS)]
        self._issue_free = [0.0] * SCHEDULERS
        self._next_warp = 0

    def run(self, ctas: Iterator[int], resident: int, num_warps: int) -> Result:
        """Run CTAs, given by their kinds, `resident` at a time; return when the last one ends."""
        number, end = 0, 0.0
        ends: list[float] = []
        for kind in ctas:
            self._start(number, kind, 0.0, num_warps)
            number += 1
            if number == resident:
                break
        queues, issue_free = self._queues, self._issue_free
        while True:
            best, scheduler = 1e30, -1
            for index in range(SCHEDULERS):
                if queues[index]:
                    at = queues[index][0][0]
                    if issue_free[index] > at:
                        at = issue_free[index]
                    if at < best:
                        best, scheduler = at, index
            if scheduler < 0:
                break
            warp = heapq.heappop(queues[scheduler])[2]
            ended = self._issue(warp, scheduler, best)
            if ended is None:
                continue
            end = max(end, ended)
            self._alive[warp.cta] -= 1
            self._meet(warp.cta, ended)
            if not self._alive[warp.cta]:
                ends.append(ended)
                kind = next(ctas, -1)
                if kind >= 0:
                    self._start(number, kind, ended + CTA_TURN, num_warps)
                    number += 1
        waiting = [cta for cta, warps in self._arrived.items() if warps]
        assert not waiting, f"CTAs {waiting} wait at a barrier"
        memory = self.memory
        busy = {unit: max(of[unit] for of in self._busy) for unit in Unit}
        return Result(
            end, sum(self._slots), busy, memory.l1_busy, memory.l2_bytes, memory.dram_bytes, max(self._slots), ends
        )

    def _start(self, cta: int, kind: int, now: float, num_warps: int) -> None:
        self._alive[cta] = num_warps
        self._arrived[cta] = []
        for number in range(num_warps):
            warp = Warp(self._next_warp, cta, self.paths[kind].steps, self.paths[kind].requests, number)
            self._next_warp += 1
            self._queue(warp, now)

    def _queue(self, warp: Warp, ready: float) -> None:
        heapq.heappush(self._queues[warp.number % SCHEDULERS], (ready, warp.number, warp))

    def _issue(self, warp: Warp, scheduler: int, now: float) -> float | None:
        """Issue a warp's next instruction, or put the warp back until its unit is free. Returns the end of the warp."""
        index = warp.steps[warp.at]
        (unit, cycles, latency), control, instruction = self._code[index]
        if unit in ACCESSES:
            free = self.memory.accept(now)
        else:
            free = self._free[scheduler][unit] if cycles else now
        if free > now:
            self._queue(warp, free)
            return None
        self._issue_free[scheduler] = now + 1
        self._slots[scheduler] += 1
        done, read = now + latency, now + QUEUED
        if unit in ACCESSES:
            done, read = self._access(warp, unit, index, now, latency)
        elif cycles:
            self._free[scheduler][unit] = now + cycles
            self._busy[scheduler][unit] += cycles
        if unit is Unit.TENSOR and "gsb" in instruction.operands:
            warp.products.append(now + cycles + PRODUCT_LATENCY)
        elif unit is Unit.COPY_GROUP:
            warp.groups.append(warp.copies)
            done = warp.copies
        released = warp.released
        if control.write_barrier is not None and released[control.write_barrier] < done:
            released[control.write_barrier] = done
        if control.read_barrier is not None and released[control.read_barrier] < read:
            released[control.read_barrier] = read
        warp.at += 1
        return self._go_on(warp, unit, instruction, now + max(control.stall, 1))

    def _access(self, warp: Warp, unit: Unit, index: int, now: float, latency: float) -> tuple[float, float]:
        """Send an access to memory; return when its result is there, and when its operands were read."""
        memory, request = self.memory, warp.requests.get(index)
        if unit is Unit.SHARED:
            read = memory.shared(now, request.wavefronts if request else 1.0)
            return read + latency, read
        if unit is Unit.STORE:
            read = max(now + QUEUED, memory.store(now, request, self.stores_to_dram))
            return read + self.gpu.l2_latency, read
        # Warps of equal number that are at the same step of a path read what is common to their CTAs.
        place = (id(warp.steps), warp.at, warp.of_cta)
        done = memory.load(now, index, request, place, bypass=self._bypasses[index])
        if unit is Unit.COPY:
            warp.copies = max(warp.copies, done)
        return done, now + QUEUED

    def _go_on(self, warp: Warp, unit: Unit, instruction: Instruction, ready: float) -> float | None:
        """Queue a warp for its next instruction, when what that one waits for is there; return the end of the warp."""
        if unit is Unit.WAIT_GROUP:
            closed = warp.products if "gsb" in instruction.operands else warp.groups
            ready = max([ready, *closed[: len(closed) - _groups_left(instruction.operands)]])
        if warp.at >= len(warp.steps):
            return ready
        for barrier in self._code[warp.steps[warp.at]][1].wait:
            ready = max(ready, warp.released[barrier])
        if unit is Unit.BARRIER and ".ARV" not in instruction.opcode:
            self._arrived[warp.cta].append(warp)
            self._meet(warp.cta, ready)
        else:
            self._queue(warp, ready)
        return None

    def _meet(self, cta: int, now: float) -> None:
        """Let the warps of a CTA go on when all that are alive have come to the barrier."""
        arrived = self._arrived[cta]
        if arrived and len(arrived) >= self._alive[cta]:
            for warp in arrived:
                self._queue(warp, now + BARRIER_LATENCY)
            self._arrived[cta] = []


def _groups_left(operands: str) -> int:
    """Return the groups of copies that DEPBAR.LE leaves open: `SB0, 0x1`."""
    return int(operands.split(",")[1].strip().split()[0], 0)
