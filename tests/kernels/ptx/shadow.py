"""The last accesses of each byte of a stretch of memory.

Owns how an access is compared with those before it: by the clocks of warps within a CTA; of two CTAs nothing is ordered.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.kernels.ptx.values import Array

NEVER_SEEN = np.iinfo(np.int32).max  # the clock of an access that still goes on
NOBODY, SEVERAL = -1, -2


class Accesses(NamedTuple):
    """Accesses by threads at one time. `who` is the number of the instruction * 1024 + the thread."""

    units: Array  # [threads, bytes]
    cta_numbers: Array  # in the grid
    ctas: Array  # among those that run
    warps: Array
    clocks: Array  # of the warps themselves
    who: Array


class Conflict(NamedTuple):
    """Two accesses that nothing orders: number `access` of those now, and an earlier one."""

    access: int
    unit: int
    who: int
    cta_number: int
    open: bool


class Marks:
    """The last access of each byte by each warp, for reads or for atomic operations."""

    def __init__(self, num_units: int, num_warps: int) -> None:
        self.clock = np.zeros((num_warps, num_units), np.int32)
        self.who = np.zeros((num_warps, num_units), np.int32)
        self.cta = np.full(num_units, NOBODY, np.int32)

    def clear(self) -> None:
        self.clock.fill(0)
        self.cta.fill(NOBODY)

    def record(self, accesses: Accesses) -> None:
        units, ctas = accesses.units, accesses.cta_numbers[:, None]
        self.clock[accesses.warps[:, None], units] = accesses.clocks[:, None]
        self.who[accesses.warps[:, None], units] = accesses.who[:, None]
        before = self.cta[units]
        self.cta[units] = np.where((before == NOBODY) | (before == ctas), ctas, SEVERAL)
        after = self.cta[units]
        self.cta[units[(after != ctas) & (after != SEVERAL)]] = SEVERAL  # CTAs that run together

    def conflict(self, accesses: Accesses, known: Array) -> Conflict | None:
        """Return an access of a warp that those now do not know about; `known` is [threads, warps]."""
        ctas = self.cta[accesses.units]
        if (ctas == NOBODY).all():
            return None
        clocks = self.clock[:, accesses.units]  # [warps, threads, bytes]
        unseen = (clocks > known.T[:, :, None]) | (ctas != accesses.cta_numbers[:, None]) & (clocks > 0)
        unseen |= (ctas == SEVERAL) & (clocks > 0)
        if not unseen.any():
            return None
        warp, access, byte = (int(at) for at in np.argwhere(unseen)[0])
        unit = int(accesses.units[access, byte])
        open_ = bool(clocks[warp, access, byte] == NEVER_SEEN)
        return Conflict(access, unit, int(self.who[warp, unit]), int(ctas[access, byte]), open_)


class Shadow:
    """What was last done with each byte."""

    def __init__(self, num_units: int, num_warps: int) -> None:
        self.write_clock: NDArray[np.int32] = np.zeros(num_units, np.int32)
        self.write_who = np.zeros(num_units, np.int32)
        self.write_cta = np.full(num_units, NOBODY, np.int32)
        self.reads = Marks(num_units, num_warps)
        self._atomics: Marks | None = None

    def clear(self) -> None:
        self.write_clock.fill(0)
        self.write_cta.fill(NOBODY)
        self.reads.clear()
        self._atomics = None

    def record_read(self, accesses: Accesses) -> None:
        self.reads.record(accesses)

    def record_atomic(self, accesses: Accesses) -> None:
        if self._atomics is None:
            self._atomics = Marks(len(self.write_clock), len(self.reads.clock))
        self._atomics.record(accesses)

    def record_write(self, accesses: Accesses) -> None:
        self.write_clock[accesses.units] = accesses.clocks[:, None]
        self.write_who[accesses.units] = accesses.who[:, None]
        self.write_cta[accesses.units] = accesses.cta_numbers[:, None]

    def conflict_with_writes(self, accesses: Accesses, known: Array) -> Conflict | None:
        clocks = self.write_clock[accesses.units]
        if not clocks.any():
            return None
        warps = (self.write_who[accesses.units] & 1023) // 32
        unseen = clocks > np.take_along_axis(known, warps, 1)
        unseen |= (self.write_cta[accesses.units] != accesses.cta_numbers[:, None]) & (clocks > 0)
        if not unseen.any():
            return None
        access, byte = (int(at) for at in np.argwhere(unseen)[0])
        unit = int(accesses.units[access, byte])
        open_ = bool(clocks[access, byte] == NEVER_SEEN)
        return Conflict(access, unit, int(self.write_who[unit]), int(self.write_cta[unit]), open_)

    def conflict_with_reads(self, accesses: Accesses, known: Array) -> Conflict | None:
        return self.reads.conflict(accesses, known)

    def conflict_with_atomics(self, accesses: Accesses, known: Array) -> Conflict | None:
        return None if self._atomics is None else self._atomics.conflict(accesses, known)

    def conflict_within(self, accesses: Accesses) -> Conflict | None:
        """Return two writes of one byte, by different warps that run an instruction together."""
        units = accesses.units.ravel()
        order = np.argsort(units, kind="stable")
        equal = np.flatnonzero(units[order][1:] == units[order][:-1])
        if not len(equal):
            return None
        num_bytes = accesses.units.shape[1]
        first, second = order[equal] // num_bytes, order[equal + 1] // num_bytes
        apart = (accesses.warps[first] != accesses.warps[second]) | (accesses.cta_numbers[first] != accesses.cta_numbers[second])
        if not apart.any():
            return None
        one, other = int(first[apart][0]), int(second[apart][0])
        unit = int(units[order][equal[apart][0]])
        return Conflict(other, unit, int(accesses.who[one]), int(accesses.cta_numbers[one]), False)
