"""Races: two accesses of the same bytes, one of them a write, that nothing orders.

Happens-before is kept by vector clocks, one for each warp (FastTrack, Flanagan and Freund 2009): a barrier joins the
clocks of the warps of a CTA. For what wgmma reads, a second clock counts only what a proxy fence has passed on. Nothing
orders CTAs but the end of a launch; atomic operations do not race with each other. Writes of equal bytes do not either:
where Triton keeps a value in several warps, all of them store it.

Instructions of one warp are ordered as the warp runs them, whichever lanes they are of: Triton keeps the lanes of a
warp together, and puts bar.warp.sync where its lanes exchange data through memory, which is not checked here. A copy
(cp.async) writes from its start until it is waited for; wgmma reads shared memory as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tests.kernels.ptx.errors import RaceError
from tests.kernels.ptx.memory import Memory, SharedMemory
from tests.kernels.ptx.parse import Instruction, Program
from tests.kernels.ptx.registers import SHARED_BASE
from tests.kernels.ptx.shadow import NEVER_SEEN, Accesses, Conflict, Shadow, conflict_within
from tests.kernels.ptx.values import Array

if TYPE_CHECKING:
    from tests.kernels.ptx.group import Group

Integers = NDArray[np.int64]


class Kind(Enum):
    READ = auto()
    WRITE = auto()
    ATOMIC = auto()
    COPY = auto()  # a write that goes on until it is waited for
    PRODUCT = auto()  # a read by wgmma, that goes on as well


class Races:
    """The clocks of the CTAs that run, and the accesses of a whole launch. Clocks are [cta, warp, warp known about]."""

    def __init__(self, program: Program, num_ctas: int, num_warps: int, shared: SharedMemory) -> None:
        self.program = program
        self.num_warps = num_warps
        self.shared = shared
        self.unit = {True: 1, False: 1}
        self.clocks = np.zeros((num_ctas, num_warps, num_warps), np.int32)
        self.passed_on = self.clocks.copy()  # to the async proxy
        self.cta_numbers = np.zeros(num_ctas, np.int32)
        self._of_shared = Shadow(len(shared.part.data), num_warps)
        self._of_tensors: dict[int, Shadow] = {}
        self._read_only: dict[int, list[Accesses]] = {}  # reads of tensors that no CTA has written yet
        self._arrived: dict[int, tuple[Array, Array]] = {}  # joined clocks of the warps that came to a barrier
        self._products: list[tuple[Array, int, int]] = []  # units that are being read: units, CTA, warp

    def new_launch(self) -> None:
        """Forget the accesses of tensors: one launch ends before the next begins."""
        self._of_tensors.clear()
        self._read_only.clear()

    def new_ctas(self, numbers: Sequence[int]) -> None:
        """Begin with other CTAs, by their numbers in the grid."""
        self.cta_numbers[: len(numbers)] = numbers
        self.clocks.fill(0)
        self.clocks[:, np.arange(self.num_warps), np.arange(self.num_warps)] = 1
        self.passed_on.fill(0)
        self._of_shared.clear()
        self._arrived.clear()
        self._products.clear()

    def access(
        self,
        kind: Kind,
        memory: Memory,
        addresses: Array,
        ctas: Integers,
        threads: Integers,
        num_bytes: int,
        instruction: Instruction,
        values: Array | None = None,
    ) -> None:
        """Check accesses against all before them, and remember them; the address of each thread, and what it writes."""
        shared = isinstance(memory, SharedMemory)
        for number, part, chosen, where in memory.split(addresses, ctas, num_bytes, instruction):
            units = where[:, None] + np.arange(num_bytes)
            accesses = self._accesses(units, ctas[chosen], threads[chosen], instruction)
            if shared:
                shadow = self._of_shared
            elif number in self._of_tensors:
                shadow = self._of_tensors[number]
            elif kind is Kind.READ:
                self._read_only.setdefault(number, []).append(accesses)
                continue
            else:
                shadow = self._of_tensors[number] = Shadow(len(part.data), self.num_warps)
                for read in self._read_only.pop(number, []):
                    shadow.reads.record(read)
            written = None if values is None else np.ascontiguousarray(values[chosen]).view(np.uint8)
            harmless = None if written is None else part.data[units] == written
            conflict = self._conflict(kind, shadow, accesses, written, harmless)
            if conflict is not None:
                self._raise(conflict, accesses, instruction, shared)
            self._record(kind, shadow, accesses)

    def finish_write(
        self, memory: SharedMemory, addresses: Array, ctas: Integers, threads: Integers, num_bytes: int
    ) -> None:
        """End a copy's writes: from here on they are ordered like other writes of these threads."""
        units = (addresses - SHARED_BASE + ctas * memory.stride)[:, None] + np.arange(num_bytes)
        warps = threads // 32
        self._of_shared.writes.clock[warps[:, None], units] = self.clocks[ctas, warps, warps][:, None]

    def _accesses(self, units: Array, ctas: Integers, threads: Integers, instruction: Instruction) -> Accesses:
        warps = threads // 32
        own = self.clocks[ctas, warps, warps]
        who = (instruction.index << 10 | threads).astype(np.int32)
        return Accesses(units, self.cta_numbers[ctas], ctas, warps, own, who)

    def _conflict(
        self, kind: Kind, shadow: Shadow, accesses: Accesses, written: Array | None, harmless: Array | None
    ) -> Conflict | None:
        known = (self.passed_on if kind is Kind.PRODUCT else self.clocks)[accesses.ctas, accesses.warps]
        conflict = shadow.writes.conflict(accesses, known, harmless)
        if conflict is None and kind is not Kind.ATOMIC:
            conflict = shadow.conflict_with_atomics(accesses, known)
        if conflict is None and kind not in (Kind.READ, Kind.PRODUCT):
            conflict = shadow.reads.conflict(accesses, known)
        if conflict is None and kind in (Kind.WRITE, Kind.COPY):
            conflict = conflict_within(accesses, written)
        return conflict

    def _record(self, kind: Kind, shadow: Shadow, accesses: Accesses) -> None:
        if kind in (Kind.COPY, Kind.PRODUCT):
            accesses = accesses._replace(clocks=np.full_like(accesses.clocks, NEVER_SEEN))
        if kind is Kind.ATOMIC:
            shadow.record_atomic(accesses)
        elif kind in (Kind.READ, Kind.PRODUCT):
            shadow.reads.record(accesses)
        else:
            shadow.writes.record(accesses)

    def _raise(self, conflict: Conflict, accesses: Accesses, instruction: Instruction, shared: bool) -> None:
        before = self.program.instructions[conflict.who >> 10]
        first, second = conflict.who & 1023, int(accesses.who[conflict.access]) & 1023
        cta = int(accesses.cta_numbers[conflict.access])
        other = f"CTA {conflict.cta_number}" if conflict.cta_number >= 0 else "another CTA"
        where = f"byte {conflict.unit} of a tensor"
        if shared:
            where = f"byte {conflict.unit % self.shared.stride} of shared memory"
        goes_on = ", which is not waited for" if conflict.open else ""
        raise RaceError(
            f"nothing orders two accesses of {where}:\n  thread {first} of {other}: {before}{goes_on}\n"
            f"  thread {second} of CTA {cta}: {instruction}"
        )

    # Synchronisation. `ctas` and `warps` name the warps that take part.

    def arrive(self, barrier: int, ctas: Integers, warps: Integers) -> None:
        """Pass on what warps know to those that leave the barrier."""
        if barrier not in self._arrived:
            shape = (len(self.clocks), self.num_warps)
            self._arrived[barrier] = (np.zeros(shape, np.int32), np.zeros(shape, np.int32))
        joined, passed_on = self._arrived[barrier]
        np.maximum.at(joined, ctas, self.clocks[ctas, warps])
        np.maximum.at(passed_on, ctas, self.passed_on[ctas, warps])
        self.clocks[ctas, warps, warps] += 1

    def leave(self, barrier: int, ctas: Integers, warps: Integers) -> None:
        """Take over what all warps knew that came to the barrier."""
        joined, passed_on = self._arrived[barrier]
        self.clocks[ctas, warps] = np.maximum(self.clocks[ctas, warps], joined[ctas])
        self.passed_on[ctas, warps] = np.maximum(self.passed_on[ctas, warps], passed_on[ctas])
        joined[ctas] = 0
        passed_on[ctas] = 0

    def proxy_fence(self, ctas: Integers, warps: Integers) -> None:
        """Let wgmma see what the warps know now."""
        self.passed_on[ctas, warps] = np.maximum(self.passed_on[ctas, warps], self.clocks[ctas, warps])
        self.clocks[ctas, warps, warps] += 1

    def start_product(self, group: Group, lane: int, tiles: Sequence[Array], instruction: Instruction) -> Array:
        """Begin reads of shared memory by wgmma, in a warp that has a lane; return what `finish_product` takes."""
        chunks = np.unique(np.concatenate([tile.ravel() for tile in tiles]) & ~15)
        ctas, threads = (np.full(len(chunks), array[lane]) for array in (group.ctas, group.threads))
        self.access(Kind.PRODUCT, self.shared, chunks, ctas, threads, 16, instruction)
        units = (chunks - SHARED_BASE + ctas * self.shared.stride)[:, None] + np.arange(16)
        self._products.append((units, int(group.ctas[lane]), int(group.threads[lane]) // 32))
        return units

    def finish_product(self, units: Array) -> None:
        """End the reads of a product; those of others that still run go on."""
        at = next(i for i, product in enumerate(self._products) if product[0] is units)
        _, cta, warp = self._products.pop(at)
        reads = self._of_shared.reads
        reads.clock[warp, units] = self.clocks[cta, warp, warp]
        for others, other_cta, other_warp in self._products:
            if (other_cta, other_warp) == (cta, warp):
                reads.clock[warp, others] = NEVER_SEEN
