"""StepClock: what steps cost on this machine, learnt from the steps themselves.

Owns the estimates by which the scheduler bounds a step in time and prices the rows of drafts. Knows nothing of what
a step computes.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from edgelm.core import Step
from edgelm.engine.costs import StepCosts

MAX_STEP_S = 0.2  # that a decoding sequence waits for the prefill of another: the longest of 100 then takes 0.3
MIN_PREFILL = 8  # tokens: below that, a step is mostly overhead; 32 of a 1B model take 0.4 s on two cores
_SLOWER_WEIGHT = 0.7  # of a measurement that is higher than expected: an answer stalls at once, and
_FASTER_WEIGHT = 0.1  # of one that is lower: a prompt only takes a little longer
_DEPTH_BLOCK = 256  # positions over which a curve is taken as the same
_CURVE_STEPS = 32  # steps for which one holds
_GAPS = 5  # of late; their median counts: one in which a kernel was compiled says nothing of the others
GAP_EVERY = 64  # steps for which they hold: while all is launched ahead, none is seen
_MIN_MEASURED = MIN_PREFILL  # tokens of prefill from which a step tells their cost
PLAIN_EVERY = 64  # steps with drafts in a row, after which one without keeps the comparison true
FIRST_PLAIN = 4  # the same at first: after each of them the next one may wait for so many more
FRESH = 32  # steps for which others are compared with those without drafts before them


class DecodeStep(NamedTuple):
    """A step without prefill, as it was."""

    sequences: int
    rows: int
    seconds: float
    plain_s: float  # what steps without drafts took of late; 0: there was none


@dataclass(slots=True)
class _Plain:
    """The last steps without drafts, of one number of sequences."""

    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=3))  # seconds, depth
    seen: int = 0
    at: int = 0  # number of the last
    drafted: int = 0  # steps with drafts since


class StepClock:
    """The times of decode steps by rows and depth, and of one prefill token."""

    def __init__(self, costs: StepCosts | None = None) -> None:
        self._costs = costs or StepCosts()
        self._prefill_s: float | None = None  # one token's, at the depth of late
        self._curves: dict[tuple[int, int, int], list[float]] = {}  # of late: to price 64 rows takes 100 us
        self._observed = 0
        self._depth = 0
        self._plain: dict[int, _Plain] = {}  # by the number of sequences
        self._gaps: deque[float] = deque(maxlen=_GAPS)
        self._gap_at = 0  # number of the step before which the last one was
        self.last: DecodeStep | None = None  # None: the last step had prefill
        self.plain_due = False  # whether the next step should be one without drafts

    def observe(self, step: Step, seconds: float, unseen: int = 0) -> None:
        """Learn from a step that took `seconds`; in them are `unseen` tokens of prefill of steps before it."""
        rows, prefill = step.num_rows, step.num_tokens - step.num_rows + unseen
        self.last, self.plain_due = None, False
        self._observed += 1
        if self._observed % _CURVE_STEPS == 0 or self._observed < _CURVE_STEPS:
            self._curves.clear()
        if step.num_tokens == 0:
            return
        depth = self._depth = sum(chunk.start for chunk in step.chunks)
        if prefill <= 0:
            self._compare(len(step.chunks), rows, depth, seconds)
            self._costs.observe(rows, depth, seconds)
        elif prefill >= _MIN_MEASURED:
            cost = max(seconds - (self._costs.time(rows, depth) if rows else 0.0), 0.0) / prefill
            self._prefill_s = cost if self._prefill_s is None else _mix(self._prefill_s, cost)

    def _compare(self, sequences: int, rows: int, depth: int, seconds: float) -> None:
        """Set a decode step against those without drafts, by the clock alone: the surface may be wrong."""
        plain = self._plain.setdefault(sequences, _Plain())
        fresh = plain.seen and self._observed - plain.at <= FRESH
        now = self._costs.time(sequences, depth)
        times = [each * now / self._costs.time(sequences, then) for each, then in plain.recent] if fresh else [0.0]
        self.last = DecodeStep(sequences, rows, seconds, statistics.median(times))
        if rows == sequences:
            plain.recent.append((seconds, depth))
            plain.seen, plain.at, plain.drafted = plain.seen + 1, self._observed, 0
        else:
            plain.drafted += 1
        self.plain_due = plain.drafted >= min(FIRST_PLAIN * plain.seen, PLAIN_EVERY)

    def observe_gap(self, seconds: float) -> None:
        """Learn how long the device had nothing to do between two steps."""
        self._gaps.append(seconds)
        self._gap_at = self._observed

    def gap(self, rows: int, depth: int) -> float:
        """Return how long the device waits for the host before a step of `rows` rows, in such steps; 0: not known."""
        step_s = self._costs.time(rows, depth)
        if not step_s or not self._gaps or self._observed - self._gap_at > GAP_EVERY:
            return 0.0
        return statistics.median(self._gaps) / step_s

    def plain_s(self) -> float:
        """Return what a step of one row takes now, in seconds; 0: not known."""
        return self._costs.time(1, self._depth)

    def prefill_tokens(self, rows: int, depth: int = 0) -> int:
        """Return how many tokens of prefill fit in a step that decodes `rows` rows besides."""
        if not self._prefill_s:
            return MIN_PREFILL
        return max(int((MAX_STEP_S - self._costs.time(rows, depth)) / self._prefill_s), MIN_PREFILL)

    def marginal_cost(self, rows: int, depth: int, sequences: int, room: int) -> list[float]:
        """Return the cost of each of `room` rows more than `rows`, in steps of this many rows.

        A longer step holds up every sequence in it, so the cost is that of all: a draft of one sequence has to bring
        what the others lose besides. While nothing is known, a row costs what a token of prefill does, or a step.
        """
        key = rows, depth // _DEPTH_BLOCK, sequences
        curve = self._curves.get(key, [])
        if len(curve) < room:
            curve = self._curves[key] = self._curve(rows, depth, sequences, room)
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


def _mix(old: float, new: float) -> float:
    return old + (_SLOWER_WEIGHT if new > old else _FASTER_WEIGHT) * (new - old)
