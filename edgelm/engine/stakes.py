"""Stakes: what is lost where the step behind a token that is not known yet runs without a draft.

Owns the averages, by what was guessed of that token. Each outcome is seen, whether the step waited for it or not: once
the token is known, so is the draft that would have followed. Knows nothing of how guesses are made.
"""

from __future__ import annotations

import bisect

NO_GUESS = 0
EDGES = (0.02, 0.05, 0.1, 0.2, 0.35)  # of the chance that the first guess is right, where it is too low for a draft
DRAFTED = len(EDGES) + 2
FIRST = 0.5  # steps, while nothing was seen
LEAST_WEIGHT = 0.02  # of what was seen last
MOST = 1.0  # steps: the draft that was not made follows one token later


class Stakes:
    """The averages of one model's drafts."""

    def __init__(self) -> None:
        self._mean = [FIRST] * (DRAFTED + 1)
        self._weight = [1.0] * (DRAFTED + 1)

    def kind(self, chance: float | None, drafted: bool) -> int:
        """Return the kind of what is guessed: nothing, something with that chance, or enough for a draft."""
        if drafted:
            return DRAFTED
        return NO_GUESS if chance is None else 1 + bisect.bisect(EDGES, chance)

    def of(self, kind: int) -> float:
        """Return the mean loss, in steps."""
        return self._mean[kind]

    def learn(self, kind: int, gain: float) -> None:
        """Note what the draft behind such a guess was worth, in tokens; 0: there was none."""
        weight = self._weight[kind] = max(self._weight[kind] / (1 + self._weight[kind]), LEAST_WEIGHT)
        self._mean[kind] += weight * (min(gain, MOST) - self._mean[kind])
