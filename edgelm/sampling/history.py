"""What the penalties need to know of a sequence: which tokens it holds, and how often the answer has each.

Owns the counts of one sequence. Knows nothing of logits, and nothing of whether a draft token will be kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_FIRST_CAPACITY = 256


class History:
    """The distinct tokens of prompt and answer, each with its count in the answer.

    Verification samples several rows of one sequence in order. Row k follows the first k draft tokens, so each is
    pushed before the next row is sampled, and all are popped when the rows are done: no counts are ever copied.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._slots: dict[int, int] = {}  # token -> index of both arrays, in order of first use
        self._ids = np.empty(_FIRST_CAPACITY, dtype=np.int64)
        self._counts = np.empty(_FIRST_CAPACITY, dtype=np.int64)
        self._pushed: list[tuple[int, bool]] = []  # (token, whether it was new)
        for token in prompt:
            self._slot(token)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The distinct tokens of prompt and answer, as a view that the next change may outdate."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often the answer holds each of `ids`; 0 for a token that only the prompt holds."""
        return self._counts[: len(self._slots)]

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the answer for good."""
        assert not self._pushed, "tokens are pushed"
        for token in tokens:
            slot = self._slot(token)  # first: it may replace the arrays
            self._counts[slot] += 1

    def push(self, token: int) -> None:
        """Add a token to the answer until it is popped."""
        new = token not in self._slots
        slot = self._slot(token)
        self._counts[slot] += 1
        self._pushed.append((token, new))

    def pop(self, count: int = 1) -> None:
        """Take back the last `count` pushed tokens."""
        assert 0 <= count <= len(self._pushed), (count, len(self._pushed))
        for _ in range(count):
            token, new = self._pushed.pop()
            if new:  # later ones are gone already, so it has the last slot
                del self._slots[token]
            else:
                self._counts[self._slots[token]] -= 1

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is None:
            assert token >= 0, token
            slot = self._slots[token] = len(self._slots)
            if slot == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.empty_like(self._counts)))
            self._ids[slot] = token
            self._counts[slot] = 0
        return slot
