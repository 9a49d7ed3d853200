"""StepClock: what steps cost on this machine, learnt from the steps themselves.

Owns the estimates by which the scheduler bounds a step in time and prices the rows of drafts. A plain step is a decode
step without drafts. Knows nothing of what a step computes.
"""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from edgelm.engine.core import Step

MAX_STEP_S = 0.2  # limit of a step that decodes: of 100 steps with prefill, the slowest then takes 0.3 s
MIN_PREFILL = 8  # tokens; shorter chunks are mostly overhead, and 32 tokens of a 1B model take 0.4 s on two cores
PLAIN_EVERY = 64  # the most steps with drafts in a row; a plain step then updates the comparison
FIRST_PLAIN = 4  # the same at the start; each plain step adds this number to it
FRESH = 32  # steps: an older plain step is not compared with steps that have drafts
GAP_EVERY = 64  # steps after which measured gaps expire: no gap is seen while every step is launched ahead
_GAPS = 5  # their median counts: a gap in which a kernel was compiled says nothing about the others
_MIN_MEASURED = MIN_PREFILL  # tokens of prefill; a step with fewer does not tell what a token costs
_SLOWER_WEIGHT = 0.7  # of a measurement above the estimate: a wrong one stalls answers at once
_FASTER_WEIGHT = 0.1  # of a measurement below the estimate: a wrong one only makes a prompt a little slower
_DEPTH_BLOCK = 256  # cached positions; within a block of them, one cost curve is used
_CURVE_STEPS = 32  # steps after which the cost curves are computed again

_SCALE_WEIGHT = 0.3  # of the newest step
_RATIO_WEIGHT = 0.1
_NEWS_WEIGHT = 0.5  # of a step with a number of rows that was long not seen
_SHORTEST_S = 1e-6  # shorter times are below the resolution of the clock
_OUTLIER = 4.0  # a step this many times longer or shorter than expected tells of the machine, not of rows
_CALM_STEPS = 16  # behind an outlier, until the scale is back: what those steps miss is not their rows'
_MAX_RATIO = 16.0  # so that a machine that is never calm moves ratios and scale only so far

TRIAL_AFTER = 256  # steps without drafts: what rows cost may have been learnt while the machine was busy
MAX_TRIAL_AFTER = 2**12  # each trial that takes as long as was expected doubles the time to the next one
TRIAL_NEWS = 0.8  # of the expected time: a trial that took less was news
TRIAL_LEN = 4  # rows
TRIAL_COST = 0.25  # steps, of each of them


class Measured(NamedTuple):
    """One measured point of the cost surface."""

    rows: int
    depth: int  # cached positions of all sequences together
    seconds: float


class StepCosts:
    """The time of a decode step by its rows and by the cached positions that it reads.

        time = scale · ratio[rows] · (base[rows] + slope[rows] · depth)

    `base` and `slope` come from measurements, with interpolation between them: over rows the time is a staircase (on a
    CPU four rows may cost less than three), over depth a line. `scale` follows the present speed of the machine,
    `ratio` the cost of a row count relative to the others: it learns where row counts change, because steps of one
    count tell of the machine alone. Without a measurement or a real step, nothing is known.
    """

    def __init__(self, points: Iterable[Measured] = ()) -> None:
        self._base: dict[int, float] = {}  # seconds, by rows
        self._slope: dict[int, float] = {}  # seconds for each cached position, by rows
        self._ratio: dict[int, float] = {}
        self._scale = 1.0
        self._observed = 0  # steps
        self._seen: dict[int, int] = {}  # number of the last step, by rows
        self._last_rows = 0
        self._calm = _CALM_STEPS  # steps since the last outlier
        by_rows: dict[int, list[Measured]] = {}
        for point in points:
            by_rows.setdefault(point.rows, []).append(point)
        for rows, same_rows in by_rows.items():
            low, high = min(same_rows, key=lambda point: point.depth), max(same_rows, key=lambda point: point.depth)
            slope = (high.seconds - low.seconds) / (high.depth - low.depth) if high.depth > low.depth else None
            if slope is not None:
                self._slope[rows] = max(slope, 0.0)
            self._base[rows] = max(low.seconds - low.depth * (slope or 0.0), low.seconds / 2, _SHORTEST_S)
        self._rows = sorted(self._base)

    @property
    def prices_rows(self) -> bool:
        """Whether the cost of an additional row is known."""
        return len(self._rows) > 1

    def observe(self, rows: int, depth: int, seconds: float) -> None:
        """Learn from a step without prefill."""
        seconds = max(seconds, _SHORTEST_S)
        self._observed += 1
        is_news = self._observed - self._seen.get(rows, 0) > TRIAL_AFTER
        is_change, self._last_rows = rows != self._last_rows, rows
        self._seen[rows] = self._observed
        if rows not in self._base and not self._is_between(rows):
            bisect.insort(self._rows, rows)
            self._base[rows] = max(seconds / self._scale - self._slope_of(rows) * depth, seconds / self._scale / 2)
            return
        error = min(max(seconds / self.time(rows, depth), 1 / _OUTLIER), _OUTLIER)
        self._calm = self._calm + 1 if 1 / _OUTLIER < error < _OUTLIER else 0
        if is_change and (is_news or self._calm > _CALM_STEPS):
            ratio = self._ratio.get(rows, 1.0) * error ** (_NEWS_WEIGHT if is_news else _RATIO_WEIGHT)
            self._ratio[rows] = min(max(ratio, 1 / _MAX_RATIO), _MAX_RATIO)
        self._scale *= error**_SCALE_WEIGHT

    def time(self, rows: int, depth: int) -> float:
        """Return the seconds of a step; 0: not known."""
        if not self._base:
            return 0.0
        ratio = self._ratio.get(rows, 1.0)
        return self._scale * ratio * (self._base_of(rows) + self._slope_of(rows) * depth)

    def _is_between(self, rows: int) -> bool:
        return bool(self._rows) and self._rows[0] <= rows <= self._rows[-1] and len(self._rows) > 2

    def _base_of(self, rows: int) -> float:
        return _interpolated(self._rows, self._base, rows)

    def _slope_of(self, rows: int) -> float:
        slope = self._slope.get(rows)
        if slope is None:
            return _interpolated(sorted(self._slope), self._slope, rows) if self._slope else 0.0
        return slope


def _interpolated(points: list[int], values: dict[int, float], rows: int) -> float:
    """Return the value at `rows`: on the line between its neighbours, in proportion beyond the last point."""
    if rows in values:
        return values[rows]
    at = bisect.bisect(points, rows)
    if at == 0:
        return values[points[0]]
    low = points[at - 1]
    if at == len(points):
        first = points[0]
        slope = (values[low] - values[first]) / (low - first) if low > first else 0.0
        return values[low] + max(slope, 0.0) * (rows - low)
    high = points[at]
    return values[low] + (values[high] - values[low]) * (rows - low) / (high - low)


class DecodeStep(NamedTuple):
    """A step without prefill, as measured."""

    sequences: int
    rows: int
    seconds: float
    plain_s: float  # recent time of a plain step of this many sequences; 0: there was none


@dataclass(slots=True)
class _PlainSteps:
    """The last plain steps of one number of sequences."""

    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=3))  # seconds, depth
    count: int = 0  # of all plain steps so far
    last: int = 0  # number of the last plain step
    drafted: int = 0  # steps with drafts since then


class StepClock:
    """The times of decode steps by rows and depth, and the time of one prefill token."""

    def __init__(self, costs: StepCosts | None = None) -> None:
        self._costs = costs or StepCosts()
        self._prefill_s: float | None = None  # for one token, at the present depth
        self._curves: dict[tuple[int, int, int], list[float]] = {}  # recent ones: pricing 64 rows takes 100 us
        self.num_steps = 0
        self._depth = 0
        self._plain: dict[int, _PlainSteps] = {}  # by the number of sequences
        self._gaps: deque[float] = deque(maxlen=_GAPS)
        self._gap_at = 0  # number of the step before the last gap
        self._undrafted = 0  # decode steps since the last one with drafts
        self._trial_after = TRIAL_AFTER
        self.last: DecodeStep | None = None  # None: the last step had prefill
        self.sequences = 1  # for which the last step sampled
        self.plain_due = False  # whether the next step should have no drafts

    def observe(self, step: Step, seconds: float, unread_prefill: int = 0) -> None:
        """Learn from a step; `seconds` include `unread_prefill` prefill tokens of earlier steps."""
        rows, prefill = step.num_rows, step.num_tokens - step.num_rows + unread_prefill
        self.last, self.plain_due = None, False
        self.num_steps += 1
        if self.num_steps % _CURVE_STEPS == 0 or self.num_steps < _CURVE_STEPS:
            self._curves.clear()
        if step.num_tokens == 0:
            return
        undrafted = self._undrafted
        self._undrafted = undrafted + 1 if rows == len(step.chunks) else 0
        depth = self._depth = sum(chunk.start for chunk in step.chunks)
        self.sequences = max(sum(chunk.rows > 0 for chunk in step.chunks), 1)
        if prefill <= 0:
            if undrafted >= self._trial_after and not self._undrafted:
                confirms = seconds > TRIAL_NEWS * self._costs.time(rows, depth)
                self._trial_after = min(2 * self._trial_after, MAX_TRIAL_AFTER) if confirms else TRIAL_AFTER
            self._compare(len(step.chunks), rows, depth, seconds)
            self._costs.observe(rows, depth, seconds)
        elif prefill >= _MIN_MEASURED:
            token_s = max(seconds - (self._costs.time(rows, depth) if rows else 0.0), 0.0) / prefill
            self._prefill_s = token_s if self._prefill_s is None else _averaged(self._prefill_s, token_s)

    def _compare(self, sequences: int, rows: int, depth: int, seconds: float) -> None:
        """Compare a decode step with recent plain steps, by measured times alone: the cost surface may be wrong."""
        plain = self._plain.setdefault(sequences, _PlainSteps())
        fresh = plain.count and self.num_steps - plain.last <= FRESH
        now = self._costs.time(sequences, depth)
        times = [took * now / self._costs.time(sequences, then) for took, then in plain.recent] if fresh else [0.0]
        self.last = DecodeStep(sequences, rows, seconds, statistics.median(times))
        if rows == sequences:
            plain.recent.append((seconds, depth))
            plain.count, plain.last, plain.drafted = plain.count + 1, self.num_steps, 0
        else:
            plain.drafted += 1
        self.plain_due = plain.drafted >= min(FIRST_PLAIN * plain.count, PLAIN_EVERY)

    def observe_gap(self, seconds: float) -> None:
        """Learn how long the device was idle between two steps."""
        self._gaps.append(seconds)
        self._gap_at = self.num_steps

    def gap(self, rows: int, depth: int) -> float:
        """Return how long the device waits for the host, in steps of `rows` rows; 0: not known."""
        step_s = self._costs.time(rows, depth)
        if not step_s or not self._gaps or self.num_steps - self._gap_at > GAP_EVERY:
            return 0.0
        return statistics.median(self._gaps) / step_s

    def token_s(self) -> float:
        """Return the present seconds of a plain step divided by its sequences; 0: not known.

        Time between two steps delays every sequence: a draft that takes so long loses one token.
        """
        return self._costs.time(self.sequences, self._depth) / self.sequences

    def prefill_tokens(self, rows: int, depth: int = 0) -> int:
        """Return how many prefill tokens fit in a step that also decodes `rows` rows."""
        if not self._prefill_s:
            return MIN_PREFILL
        return max(int((MAX_STEP_S - self._costs.time(rows, depth)) / self._prefill_s), MIN_PREFILL)

    def marginal_cost(self, rows: int, depth: int, sequences: int, room: int) -> list[float]:
        """Return the cost of each of `room` rows added to `rows`, in steps of `rows` rows.

        A longer step delays every sequence in it, so the cost is for all sequences: a draft of one sequence has to
        win back what the others lose. Before the first measurement, a row costs as much as a prefill token, or a step.
        Where no step had drafts for long, the first rows are offered for less: only such a step tells their cost.
        """
        key = rows, depth // _DEPTH_BLOCK, sequences
        curve = self._curves.get(key, [])
        if len(curve) < room:
            curve = self._curves[key] = self._curve(rows, depth, sequences, room)
        if self._undrafted >= self._trial_after and rows == sequences:
            return [min(cost, TRIAL_COST) for cost in curve[:TRIAL_LEN]][:room] + curve[TRIAL_LEN:room]
        return curve if len(curve) == room else curve[:room]

    def _curve(self, rows: int, depth: int, sequences: int, room: int) -> list[float]:
        base = self._costs.time(rows, depth)
        if not base:
            return [1.0] * room
        if not self._costs.prices_rows:
            return [(self._prefill_s or base) * sequences / base] * room
        costs, last = [], base
        for more in range(1, room + 1):
            time = self._costs.time(rows + more, depth)
            costs.append((time - last) * sequences / base)
            last = time
        return costs


def _averaged(old: float, new: float) -> float:
    return old + (_SLOWER_WEIGHT if new > old else _FASTER_WEIGHT) * (new - old)
