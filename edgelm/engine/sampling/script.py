"""ScriptMatcher: a known continuation, so that the model only scores it.

The tokens are forced like those of a grammar: verification runs many of them in one step, and each sampled token has
the log-probability that the model itself gives it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from edgelm.engine.core import Masks


class ScriptMatcher:
    """A `Matcher` (core.py) that allows one sequence of tokens."""

    error: str | None = None
    unrestricted = False

    def __init__(self, tokens: Seq[int]) -> None:
        self._tokens = tokens
        self._num_accepted = 0

    @property
    def done(self) -> bool:
        return self._num_accepted == len(self._tokens)

    def allowed(self, draft: list[int]) -> int:
        expected = self._tokens[self._num_accepted :]
        pairs = zip(draft, expected, strict=False)
        return next((row for row, (token, right) in enumerate(pairs) if token != right), min(len(draft), len(expected)))

    def forced(self, most: int) -> list[int]:
        return list(self._tokens[self._num_accepted : self._num_accepted + most])

    def fill(self, draft: list[int], rows: Masks) -> None:
        rows[:] = 0
        for row, token in zip(rows, self._tokens[self._num_accepted :], strict=False):
            row.view(np.uint32)[token // 32] = 1 << token % 32

    def accept(self, token: int) -> None:
        assert token == self._tokens[self._num_accepted]
        self._num_accepted += 1
