"""The machine: it runs the CTAs of a launch, a number of them side by side, warp by warp or all warps together.

Owns where lanes are in the program, branches that part them, and barriers. The order of warps is least program counter
(all warps run together: fast), random, or one warp far ahead of the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from tests.kernels.ptx.dependents import NO_WEIGHTS, Dependence, Weights
from tests.kernels.ptx.errors import DeadlockError, EmulatorError
from tests.kernels.ptx.group import Group, Lanes
from tests.kernels.ptx.instructions import BRANCH, EXIT, Operation, bind
from tests.kernels.ptx.memory import GlobalMemory, SharedMemory
from tests.kernels.ptx.parse import Program
from tests.kernels.ptx.races import Races
from tests.kernels.ptx.registers import Registers
from tests.kernels.ptx.values import Mask

Order = Literal["least", "random", "ahead"]
LIMIT = 1_000_000  # instructions that a group of warps may run: more is taken for a loop without an end
LANES_TOGETHER = 2048
END = 1 << 60


class Fragments:
    """Where the lanes of a group are: masks by place in the program. Lanes that come to one place run together."""

    def __init__(self, group: Group, operations: Sequence[Operation]) -> None:
        self.group = group
        self.operations = operations
        self.at: dict[int, Lanes] = {}

    def add(self, place: int, lanes: Lanes) -> None:
        self.at[place] = self.at[place] | lanes if place in self.at else lanes

    def advance(self, machine: Machine, limit: int) -> int:
        """Run the lanes that are least far until they part, stop, or meet others; return the number of instructions."""
        place = min(self.at)
        lanes = self.at.pop(place)
        others = min(self.at, default=END)
        active: Mask = None if lanes.all() else lanes
        operations = self.operations
        count = 0
        while place < others and count < limit:
            operation = operations[place]
            count += 1
            running = active
            if operation.guard is not None:
                taken = ~operation.guard if operation.negated else operation.guard
                taken = taken & lanes
                if not taken.any():
                    place += 1
                    continue
                running = None if taken.all() else taken
            if operation.step is not None:
                operation.step(running)
                place += 1
                continue
            chosen = np.ones(len(lanes), bool) if running is None else running
            rest = lanes & ~chosen
            if rest.any():
                self.add(place + 1, rest)
            if operation.control is BRANCH:
                self.add(operation.target, chosen)
            elif operation.control is EXIT:
                machine.exit(self, chosen)
            else:
                machine.come_to_barrier(self, operation, chosen, place + 1)
            return count
        self.add(place, lanes)
        return count


class Machine:
    """A program with its registers and shared memory, for a number of CTAs that run side by side."""

    def __init__(
        self,
        program: Program,
        num_warps: int,
        num_ctas: int,
        shared_bytes: int,
        order: Order,
        races: bool,
        dependent: bool = False,  # with programmatic dependent launch
    ) -> None:
        self.program = program
        self.dependent = dependent
        self.num_warps = num_warps
        self.num_ctas = num_ctas
        self.order = order
        self.shared = SharedMemory(num_ctas, shared_bytes)
        self.races = self.watch() if races else None
        self.parameters = {name: np.zeros(1, np.uint64) for name, _ in program.parameters}
        together = [range(num_warps)] if order == "least" else [range(warp, warp + 1) for warp in range(num_warps)]
        self.fragments = [self._fragments(warps) for warps in together]
        self.owner = {warp: number for number, warps in enumerate(together) for warp in warps}
        self._waiting: dict[int, NDArray[np.int64]] = {}  # barrier: place where each warp goes on, or -1: [cta, warp]
        self._num_arrived: dict[int, NDArray[np.int64]] = {}  # threads, [cta]
        self._num_expected: dict[int, int] = {}  # 0: all that have not ended
        self._running = np.zeros((num_ctas, num_warps, 32), bool)

    def watch(self) -> Races:
        """Return what sees all accesses of memory and all barriers."""
        return Races(self.program, self.num_ctas, self.num_warps, self.shared)

    def _fragments(self, warps: range) -> Fragments:
        lane = np.arange(self.num_ctas * len(warps) * 32)
        ctas, threads = lane // (len(warps) * 32), lane % (len(warps) * 32) + 32 * warps[0]
        special = {f"%{name}.{axis}": np.zeros(len(lane), np.uint32) for name in SPECIAL for axis in "xyz"}
        special["%tid.x"] = threads.astype(np.uint32)
        special["%ntid.x"] += np.uint32(32 * self.num_warps)
        special["%ntid.y"] += np.uint32(1)
        special["%ntid.z"] += np.uint32(1)
        special["%laneid"] = (threads % 32).astype(np.uint32)
        registers = Registers(self.program, len(lane), special)
        group = Group(registers, self.shared, ctas, threads, self.races, self.parameters)
        group.dependence = Dependence(len(lane)) if self.dependent else None
        return Fragments(group, bind(self.program, group))

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        values: Sequence[int],
        grid: Sequence[int],
        seed: int,
        ctas: Sequence[int] | None = None,
        weights: Weights = NO_WEIGHTS,
    ) -> int:
        """Run a launch, or with `ctas` only those; `values` are the bits of the parameters.

        Returns the number of instructions.
        """
        for array, value in zip(self.parameters.values(), itertools.chain(values, itertools.repeat(0)), strict=False):
            array[0] = value % (1 << 64)
        memory = GlobalMemory(tensors)
        for fragments in self.fragments:
            fragments.group.memory = memory
            if fragments.group.dependence is not None:
                fragments.group.dependence.weights = weights
        if self.races is not None:
            self.races.new_launch()
        x, y, z = (*grid, 1, 1)[:3]
        places = [(at % x, at // x % y, at // (x * y)) for at in (range(x * y * z) if ctas is None else ctas)]
        rng = np.random.default_rng(seed)
        count = 0
        with np.errstate(all="ignore"):
            for first in range(0, len(places), self.num_ctas):
                self._prepare(places[first : first + self.num_ctas], (x, y, z), first)
                count += self._run_together(rng, seed)
        return count

    def _prepare(self, places: Sequence[tuple[int, int, int]], grid: tuple[int, int, int], first: int) -> None:
        self.shared.fill_with_rubbish()
        self._waiting.clear()
        self._num_arrived.clear()
        self._running[:] = (np.arange(self.num_ctas) < len(places))[:, None, None]
        padded = np.array([*places, *[places[0]] * (self.num_ctas - len(places))], np.uint32)
        if self.races is not None:
            self.races.new_ctas(range(first, first + len(places)))
        for fragments in self.fragments:
            group = fragments.group
            group.registers.fill_with_rubbish()
            group.copies.reset()
            group.products.reset()
            if group.fences is not None:
                group.fences.reset()
            if group.dependence is not None:
                group.dependence.reset(group.ctas < len(places))
            for number, axis in enumerate("xyz"):
                group.registers.special[f"%ctaid.{axis}"][:] = padded[group.ctas, number]
                group.registers.special[f"%nctaid.{axis}"][:] = grid[number]
            fragments.at = {0: group.ctas < len(places)}

    def _run_together(self, rng: np.random.Generator, seed: int) -> int:
        count = 0
        limit_of_all = LIMIT * len(self.fragments)
        ahead = self.fragments[seed % len(self.fragments)]
        while True:
            ready = [fragments for fragments in self.fragments if fragments.at]
            if not ready:
                break
            limit = END
            if self.order == "random":
                fragments, limit = ready[rng.integers(len(ready))], int(rng.integers(1, 64))
            else:
                fragments = ahead if ahead.at else ready[0]
            count += fragments.advance(self, min(limit, limit_of_all))
            if count >= limit_of_all:
                raise DeadlockError(f"{self.program.name} runs {count} instructions and has not ended")
        if any((places >= 0).any() for places in self._waiting.values()):
            raise DeadlockError(f"{self.program.name}: {self._describe_waiting()}")
        return count

    def _describe_waiting(self) -> str:
        parts = []
        for barrier, places in self._waiting.items():
            for cta, warp in np.argwhere(places >= 0)[:4]:
                instruction = self.program.instructions[places[cta, warp] - 1]
                parts.append(f"warp {warp} of CTA {cta} waits for ever at barrier {barrier}, {instruction}")
        return "; ".join(parts)

    def exit(self, fragments: Fragments, lanes: Lanes) -> None:
        """End lanes; the others of their CTA do not wait for them any more."""
        group = fragments.group
        if group.dependence is not None:
            group.dependence.end(lanes)
        self._running[group.ctas[lanes], group.threads[lanes] // 32, group.threads[lanes] % 32] = False
        for barrier in list(self._waiting):
            self._release(barrier)

    def come_to_barrier(self, fragments: Fragments, operation: Operation, lanes: Lanes, place: int) -> None:
        """Let warps wait until the barrier's number of threads has come, or (bar.arrive) only count them."""
        group = fragments.group
        by_warp = lanes.reshape(-1, 32)
        ctas, warps = group.ctas[::32][by_warp.any(1)], group.threads[::32][by_warp.any(1)] // 32
        if (self._running[ctas, warps] != by_warp[by_warp.any(1)]).any():
            raise EmulatorError(f"a warp whose lanes are apart comes to {operation.instruction}")
        barrier, waits = operation.target, operation.waits
        if barrier not in self._waiting:
            self._waiting[barrier] = np.full((self.num_ctas, self.num_warps), -1, np.int64)
            self._num_arrived[barrier] = np.zeros(self.num_ctas, np.int64)
        if self._num_expected.setdefault(barrier, operation.num_threads) != operation.num_threads:
            if self._num_arrived[barrier].any():
                raise EmulatorError(f"barrier {barrier} has another number of threads in {operation.instruction}")
            self._num_expected[barrier] = operation.num_threads
        np.add.at(self._num_arrived[barrier], ctas, 32)
        if self.races is not None:
            self.races.arrive(barrier, ctas, warps)
        if waits:
            self._waiting[barrier][ctas, warps] = place
        else:
            fragments.add(place, lanes)
        self._release(barrier)

    def _release(self, barrier: int) -> None:
        """Let the warps of each CTA go on for which enough have come."""
        arrived, expected = self._num_arrived[barrier], self._num_expected[barrier]
        needed = np.full(self.num_ctas, expected) if expected else 32 * self._running.any(2).sum(1)
        ready = (arrived >= needed) & (arrived > 0)
        if not ready.any():
            return
        places = self._waiting[barrier]
        ctas, warps = np.nonzero((places >= 0) & ready[:, None])
        if self.races is not None:
            self.races.leave(barrier, ctas, warps)
        arrived[ready] = 0
        for number, fragments in enumerate(self.fragments):
            mine = np.array([self.owner[warp] == number for warp in warps.tolist()], bool)
            for place in np.unique(places[ctas[mine], warps[mine]]):
                chosen = mine & (places[ctas, warps] == place)
                by_warp = np.zeros((self.num_ctas, self.num_warps), bool)
                by_warp[ctas[chosen], warps[chosen]] = True
                lanes = (by_warp[:, :, None] & self._running)[
                    fragments.group.ctas, fragments.group.threads // 32, fragments.group.threads % 32
                ]
                fragments.add(int(place), lanes)
        places[ctas, warps] = -1


SPECIAL = ("tid", "ntid", "ctaid", "nctaid")
