"""Token counts for the penalties: the tokens of a sequence, and how often its answer has each of them.

Owns the counts. Knows nothing of logits, or of whether a draft token will be accepted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from edgelm.engine.core import Sequence

_INITIAL_CAPACITY = 256


class History:
    """The distinct tokens of prompt and answer, each with its count in the answer.

    Verification samples several rows of one sequence in order. Row k follows the first k draft tokens, so each draft
    token is pushed before the next row is sampled, and all are popped at the end: no counts are ever copied.
    """

    def __init__(self, prompt: Seq[int]) -> None:
        self._slots: dict[int, int] = {}  # token -> index of both arrays, in order of first use
        self._ids = np.empty(_INITIAL_CAPACITY, dtype=np.int64)
        self._counts = np.empty(_INITIAL_CAPACITY, dtype=np.int64)
        self._pushed: list[tuple[int, bool]] = []  # (token, whether it was new)
        for token in prompt:
            self._slot(token)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The distinct tokens of prompt and answer, as a view that is valid until the next change."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """The count in the answer of each of `ids`; 0 for a token that only the prompt has."""
        return self._counts[: len(self._slots)]

    def extend(self, tokens: Seq[int]) -> None:
        """Append tokens to the answer for good."""
        assert not self._pushed, "tokens are pushed"
        for token in tokens:
            slot = self._slot(token)  # first, because it may replace the arrays
            self._counts[slot] += 1

    def push(self, token: int) -> None:
        """Append a token to the answer until it is popped."""
        new = token not in self._slots
        slot = self._slot(token)
        self._counts[slot] += 1
        self._pushed.append((token, new))

    def pop(self, count: int = 1) -> None:
        """Remove the last `count` pushed tokens."""
        assert 0 <= count <= len(self._pushed), (count, len(self._pushed))
        for _ in range(count):
            token, new = self._pushed.pop()
            if new:  # later tokens are popped already, so it has the last slot
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


class Histories:
    """The histories of running sequences with penalties, brought up to date on request."""

    def __init__(self) -> None:
        self._histories: WeakKeyDictionary[Sequence, tuple[History, int]] = WeakKeyDictionary()  # with its length

    def of(self, seq: Sequence) -> History | None:
        """Return the history of a sequence; None: it has no penalties."""
        if not seq.params.penalized:
            return None
        history, length = self._histories.get(seq) or (History(_prompt(seq)), seq.prompt_len)
        history.extend(seq.tokens[length:])
        self._histories[seq] = history, len(seq.tokens)
        return history


def _prompt(seq: Sequence) -> list[int]:
    """Return the prompt without pictures: no token that is sampled is one of theirs."""
    prompt = seq.tokens[: seq.prompt_len]
    return [token for token in prompt if token >= 0] if seq.pictures else prompt
