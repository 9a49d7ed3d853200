"""StepClock: what steps cost on this machine, learnt from the steps themselves.

Owns the estimates by which the scheduler bounds a step in time. Knows nothing of what a step computes.
"""

from __future__ import annotations

from edgelm.core import Step

MAX_STEP_S = 0.25  # what a decoding sequence waits for the prefill of another
MIN_PREFILL = 32  # tokens: below that, a step is mostly overhead
_WEIGHT = 0.3  # of the newest measurement
_MIN_MEASURED = 16  # tokens of prefill from which a step tells their cost


class StepClock:
    """Moving averages of the time of decode steps by their rows, and of one prefill token."""

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}  # by rows
        self._prefill_s: float | None = None  # one token's, at the depth of late

    def observe(self, step: Step, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
        rows, prefill = step.num_rows, step.num_tokens - step.num_rows
        if step.num_tokens == 0:
            return
        if prefill <= 0:
            self._decode_s[rows] = _mix(self._decode_s.get(rows), seconds)
        elif prefill >= _MIN_MEASURED:
            cost = max(seconds - (self._decode_time(rows) if rows else 0.0), 0.0) / prefill
            self._prefill_s = _mix(self._prefill_s, cost)

    def prefill_tokens(self, rows: int) -> int:
        """Return how many tokens of prefill fit in a step that decodes `rows` rows besides."""
        if not self._prefill_s:
            return MIN_PREFILL
        return max(int((MAX_STEP_S - self._decode_time(rows)) / self._prefill_s), MIN_PREFILL)

    def marginal_cost(self, rows: int, room: int) -> list[float]:
        """Return the cost of each of `room` rows more than `rows`, in steps of `rows` rows.

        A row count that was never seen costs what as many tokens of prefill do.
        """
        base = self._decode_time(rows)
        each = self._prefill_s or base
        costs, last = [], base
        for more in range(1, room + 1):
            time = self._decode_s.get(rows + more, last + each)
            costs.append((time - last) / base if base else 1.0)
            last = time
        return costs

    def _decode_time(self, rows: int) -> float:
        """Return the time of a decode step, or of the nearest row count that was seen."""
        if not self._decode_s:
            return 0.0
        return self._decode_s[min(self._decode_s, key=lambda seen: (abs(seen - rows), seen))]


def _mix(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
