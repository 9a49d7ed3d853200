"""StepCosts: the time of a decode step by its rows and by the cached positions that it reads.

Owns the surface: what a benchmark measured, and what real steps taught since. Knows nothing of drafts or of files.

    time = scale · ratio[rows] · (base[rows] + slope[rows] · depth)

`base` and `slope` come from measurements and are interpolated between them: over rows the time is a staircase (on a
CPU four rows may cost less than three), over depth a line. `scale` follows the machine as it is now, `ratio` what a
row count costs beside the others.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

_SCALE_WEIGHT = 0.3  # of the newest step
_RATIO_WEIGHT = 0.05
_SHORTEST_S = 1e-6  # that a clock tells from nothing
_OUTLIER = 4.0  # a step that took so many times longer or shorter says something about the machine, not about rows


class Measured(NamedTuple):
    """One point of the surface."""

    rows: int
    depth: int  # cached positions, of all sequences together
    seconds: float


class StepCosts:
    """Times of decode steps. Without a measurement or a real step of some kind nothing is known."""

    def __init__(self, points: Iterable[Measured] = ()) -> None:
        self._base: dict[int, float] = {}
        self._slope: dict[int, float] = {}  # seconds a position
        self._ratio: dict[int, float] = {}
        self._scale = 1.0
        by_rows: dict[int, list[Measured]] = {}
        for point in points:
            by_rows.setdefault(point.rows, []).append(point)
        for rows, measured in by_rows.items():
            low, high = min(measured, key=lambda each: each.depth), max(measured, key=lambda each: each.depth)
            slope = (high.seconds - low.seconds) / (high.depth - low.depth) if high.depth > low.depth else None
            if slope is not None:
                self._slope[rows] = max(slope, 0.0)
            self._base[rows] = max(low.seconds - low.depth * (slope or 0.0), low.seconds / 2, _SHORTEST_S)
        self._rows = sorted(self._base)

    @property
    def prices_rows(self) -> bool:
        """Whether it is known what a row more costs."""
        return len(self._rows) > 1

    def observe(self, rows: int, depth: int, seconds: float) -> None:
        """Learn from a step without prefill."""
        seconds = max(seconds, _SHORTEST_S)
        if rows not in self._base and not self._is_between(rows):
            bisect.insort(self._rows, rows)
            self._base[rows] = max(seconds / self._scale - self._slope_of(rows) * depth, seconds / self._scale / 2)
            return
        error = seconds / self.time(rows, depth)
        if 1 / _OUTLIER < error < _OUTLIER:
            self._ratio[rows] = self._ratio.get(rows, 1.0) * error**_RATIO_WEIGHT
        self._scale *= min(max(error, 1 / _OUTLIER), _OUTLIER) ** _SCALE_WEIGHT

    def time(self, rows: int, depth: int) -> float:
        """Return the seconds of a step; 0 where nothing is known."""
        if not self._base:
            return 0.0
        ratio = self._ratio.get(rows, 1.0)
        return self._scale * ratio * (self._base_of(rows) + self._slope_of(rows) * depth)

    def _is_between(self, rows: int) -> bool:
        return bool(self._rows) and self._rows[0] <= rows <= self._rows[-1] and len(self._rows) > 2

    def _base_of(self, rows: int) -> float:
        return _interpolated(self._rows, self._base, rows)

    def _slope_of(self, rows: int) -> float:
        return _interpolated(sorted(self._slope), self._slope, rows) if self._slope else 0.0


def _interpolated(known: list[int], values: dict[int, float], rows: int) -> float:
    """Return the value at `rows`: on the line between its neighbours, in proportion behind the last."""
    if rows in values:
        return values[rows]
    at = bisect.bisect(known, rows)
    if at == 0:
        return values[known[0]]
    low = known[at - 1]
    if at == len(known):
        first = known[0]
        each = (values[low] - values[first]) / (low - first) if low > first else 0.0
        return values[low] + max(each, 0.0) * (rows - low)
    high = known[at]
    return values[low] + (values[high] - values[low]) * (rows - low) / (high - low)
