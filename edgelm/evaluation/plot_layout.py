"""The layout of a plot of few labelled points: scales, ticks, and labels that do not cover each other.

Owns the arithmetic, in units of the caller: pixels of a picture, or cells of a terminal. Draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

LOG_FROM = 3.0  # a larger ratio of greatest to least is drawn on a logarithmic scale
ROUNDS = 3  # in which labels are placed again, now knowing all others
DIRECTIONS = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (1, 1), (-1, -1), (-1, 1))  # the best first
STEPS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8))  # in a decade, from few ticks to many


class Box(NamedTuple):
    """A rectangle; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """Return the area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(width, 0.0) * max(height, 0.0)

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.bottom - self.top)


@dataclass(frozen=True, slots=True)
class Scale:
    """From a value to its place: `low` is at 0 and `high` at 1."""

    low: float
    high: float
    is_log: bool

    @classmethod
    def over(cls, values: Sequence[float], *, is_log: bool | None = None, margin: float = 0.06) -> Scale:
        """Return a scale for values, with a margin. None: logarithmic where they are far from each other."""
        low, high = min(values), max(values)
        if is_log is None:
            is_log = low > 0 and high / low > LOG_FROM
        if is_log:
            span = max(math.log(high / low), math.log(1.5))
            middle = (math.log(low) + math.log(high)) / 2
            half = span * (0.5 + margin)
            return cls(math.exp(middle - half), math.exp(middle + half), True)
        half = max(high - low, abs(high) * 0.1, 1e-9) * (0.5 + margin)
        return cls((low + high) / 2 - half, (low + high) / 2 + half, False)

    def place(self, value: float) -> float:
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[float]:
        """Return round values within the scale, at most so many and at least two where that is possible."""
        choices = list(self._log_ticks() if self.is_log else self._linear_ticks())
        fitting = [ticks for ticks in choices if 2 <= len(ticks) <= most]
        return max(fitting, key=len, default=min((ticks for ticks in choices if ticks), key=len, default=[]))

    def _log_ticks(self) -> Iterator[list[float]]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for stride in (3, 2, 1):
            yield self._within([10.0**power for power in range(first, last + 1) if power % stride == 0])
        for steps in STEPS:
            yield self._within([step * 10.0**power for power in range(first, last + 1) for step in steps])
        if self.high < LOG_FROM * self.low:
            yield from self._linear_ticks()

    def _linear_ticks(self) -> Iterator[list[float]]:
        power = math.floor(math.log10(self.high - self.low))
        for step in (5.0, 2.0, 1.0, 0.5, 0.2, 0.1):
            width = step * 10.0**power
            first = math.ceil(self.low / width)
            yield self._within([number * width for number in range(first, first + 60)])

    def _within(self, values: list[float]) -> list[float]:
        return [value for value in values if self.low <= value <= self.high]


@dataclass(frozen=True, slots=True)
class Spacing:
    """How labels stand beside marks, as (across, down)."""

    half: tuple[float, float]  # of a mark: from its middle to its edge
    gap: tuple[float, float]  # between a mark and its label
    step: float  # between two distances that are tried
    num_distances: int


def place_labels(
    points: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], area: Box, spacing: Spacing
) -> list[Box]:
    """Return a box for the label of each point: near it, within the area, over no other label or mark if possible."""
    marks = marks_of(points, spacing)
    boxes: list[Box | None] = [None] * len(points)
    crowded = sorted(range(len(points)), key=lambda i: _nearest(points, i))
    for _ in range(ROUNDS):
        for i in crowded:
            others = [box for j, box in enumerate(boxes) if j != i and box is not None]
            candidates = _candidates(points[i], sizes[i], spacing)
            costs = [(_cost(box, others, marks, area) + extra, box) for extra, box in candidates]
            boxes[i] = min(costs)[1]
    return [box for box in boxes if box is not None]


def marks_of(points: Sequence[tuple[float, float]], spacing: Spacing) -> list[Box]:
    """Return the boxes of the marks."""
    across, down = spacing.half
    return [Box(x - across, y - down, x + across, y + down) for x, y in points]


def _nearest(points: Sequence[tuple[float, float]], i: int) -> float:
    return min((math.dist(points[i], other) for j, other in enumerate(points) if j != i), default=0.0)


def _candidates(point: tuple[float, float], size: tuple[float, float], spacing: Spacing) -> Iterator[tuple[float, Box]]:
    """Yield boxes around a point with their costs, which grow with the distance."""
    (x, y), (width, height) = point, size
    for ring in range(spacing.num_distances):
        across_by, down_by = (
            half + gap + ring * spacing.step for half, gap in zip(spacing.half, spacing.gap, strict=True)
        )
        for rank, (across, down) in enumerate(DIRECTIONS):
            left = x + across_by if across > 0 else x - across_by - width if across < 0 else x - width / 2
            top = y + down_by if down > 0 else y - down_by - height if down < 0 else y - height / 2
            yield ring * 0.3 + rank * 0.02, Box(left, top, left + width, top + height)


def _cost(box: Box, others: Sequence[Box], marks: Sequence[Box], area: Box) -> float:
    hidden = sum(box.overlap(other) for other in others) + sum(box.overlap(mark) for mark in marks)
    outside = box.area - box.overlap(area)
    return (10 * hidden + 40 * outside) / box.area
