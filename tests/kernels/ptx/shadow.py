"""The last accesses of each byte of a stretch of memory.

Owns how an access is compared with those before it: by the clocks of warps within a CTA; nothing orders two CTAs.
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
    """The last access of each byte by each warp, of one kind."""

    def __init__(self, num_units: int, num_warps: int) -> None:
        self.clock: NDArray[np.int32] = np.zeros((num_warps, num_units), np.int32)
        self.who: NDArray[np.int32] = np.zeros((num_warps, num_units), np.int32)
        self.cta: NDArray[np.int32] = np.full(num_units, NOBODY, np.int32)

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

    def conflict(self, accesses: Accesses, known: Array, harmless: Array | None = None) -> Conflict | None:
        """Return an access of a warp that those now do not know about; `known` is [threads, warps].

        `harmless`: the bytes of accesses now whose conflicts count only with an access that still goes on.
        """
        ctas = self.cta[accesses.units]
        if (ctas == NOBODY).all():
            return None
        clocks = self.clock[:, accesses.units]  # [warps, threads, bytes]
        unseen = (clocks > known.T[:, :, None]) | (ctas != accesses.cta_numbers[:, None]) & (clocks > 0)
        if harmless is not None:
            unseen &= ~harmless | (clocks == NEVER_SEEN)
        if not unseen.any():
            return None
        warp, access, byte = (int(at) for at in np.argwhere(unseen)[0])
        unit = int(accesses.units[access, byte])
        open_ = bool(clocks[warp, access, byte] == NEVER_SEEN)
        return Conflict(access, unit, int(self.who[warp, unit]), int(ctas[access, byte]), open_)


class Shadow:
    """The last access of each byte, by kind."""

    def __init__(self, num_units: int, num_warps: int) -> None:
        self.writes = Marks(num_units, num_warps)
        self.reads = Marks(num_units, num_warps)
        self._atomics: Marks | None = None

    def clear(self) -> None:
        self.writes.clear()
        self.reads.clear()
        self._atomics = None

    def record_atomic(self, accesses: Accesses) -> None:
        if self._atomics is None:
            num_warps, num_units = self.reads.clock.shape
            self._atomics = Marks(num_units, num_warps)
        self._atomics.record(accesses)

    def conflict_with_atomics(self, accesses: Accesses, known: Array) -> Conflict | None:
        return None if self._atomics is None else self._atomics.conflict(accesses, known)


def conflict_within(accesses: Accesses, values: Array | None) -> Conflict | None:
    """Return two writes of one byte, with different values, by different warps that run an instruction together."""
    units = accesses.units.ravel()
    order = np.argsort(units, kind="stable")
    equal = np.flatnonzero(units[order][1:] == units[order][:-1])
    if not len(equal):
        return None
    one, other = order[equal], order[equal + 1]
    first, second = one // accesses.units.shape[1], other // accesses.units.shape[1]
    apart = (accesses.warps[first] != accesses.warps[second]) | (
        accesses.cta_numbers[first] != accesses.cta_numbers[second]
    )
    if values is not None:
        apart &= values.ravel()[one] != values.ravel()[other]
    if not apart.any():
        return None
    at = int(np.flatnonzero(apart)[0])
    earlier = int(first[at])
    return Conflict(
        int(second[at]), int(units[one[at]]), int(accesses.who[earlier]), int(accesses.cta_numbers[earlier]), False
    )
