"""Acceptance: how likely a proposed token is accepted, learnt from what became of each kind of evidence.

Owns the counts, the prior that they start from, and their file. Knows nothing of text, contexts and costs.

Each kind of evidence (of the conversation or of past answers, length of the context, state of its counts, backed by
the shorter context or not) has a decayed count of right and wrong: a Beta distribution, whose prior is a logistic
function of a few features. The log-odds of the likelier token are corrected by an offset for how the two sources
relate (only one speaks, they agree, they differ). `Reach` corrects the product along a draft.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from edgelm.engine.ngrams import NUM_KINDS, NUM_STATES, ORDERS, SEVERAL, Evidence, kind_of

MAX_DRAFT = 24  # longer ones bring little where a row costs anything, and each token of a draft takes our time

PRIOR_STRENGTH = 30.0  # of how many observations
MOST_SEEN = 400.0  # observations; then the older ones fade
FADE = 0.97
OFFSET_RATE = 0.02
_BUCKETS = 13  # of log-odds, one wide, from -6 on
_LIMIT = 6.0  # log-odds: nothing is surer than 0.9975

_HUGE = 1e9  # larger counts than any of ours

REACH_STRENGTH = 20.0
MOST_EXPECTED = 60.0
_FIRST = (0, 1, 2, 3, 4, 6, 9, 13, 18)  # depth of each bucket
DEPTHS = tuple(sum(depth >= first for first in _FIRST[1:]) for depth in range(MAX_DRAFT))
_REACH = (1.0, 0.97, 0.93, 0.88, 0.85, 0.8, 0.75, 0.7, 0.65)  # by depth, while nothing is known

Guess = tuple[int, float, int, Evidence | None, Evidence | None]  # token, chance, offset, and what spoke for it

log = logging.getLogger(__name__)


def _prior(remembered: bool, level: int, state: int, backed: bool) -> float:
    """Return the log-odds of a kind: a logistic regression over recorded answers of three models."""
    length = math.log2(ORDERS[level])
    odds = -0.95 + 0.38 * length + (1.13 if backed else 0.0)
    if remembered:
        odds += -0.7 + 0.11 * length
    if state < SEVERAL:
        return odds + 0.73 * math.log2((1, 2, 3.5, 6, 12)[state])
    return odds - 2.07 + 2.95 * (0.15, 0.28, 0.43, 0.58, 0.73, 0.86, 0.95)[(state - SEVERAL) // 2]


class Acceptance:
    """What was learnt with one model."""

    def __init__(self) -> None:
        odds: list[float] = []
        for remembered in (False, True):
            kinds = {
                kind_of(level, state, backed): _prior(remembered, level, state, backed)
                for level, state, backed in itertools.product(range(len(ORDERS)), range(NUM_STATES), (False, True))
            }
            odds += [kinds[kind] for kind in range(NUM_KINDS)]
        self._seen = [PRIOR_STRENGTH] * len(odds)
        self._right = [PRIOR_STRENGTH / (1 + math.exp(-each)) for each in odds]
        self._odds: list[float | None] = [None] * len(odds)  # None: to be computed from the counts
        self._offsets = [0.0] * (3 * _BUCKETS)
        self.reach = Reach()

    def judge(self, spoken: Evidence | None, remembered: Evidence | None) -> tuple[int, float, int, int]:
        """Choose the likelier of two next tokens, of which there is one at least.

        Returns the token, the log-odds of its acceptance, the offset that is in them, and the level of its evidence.
        """
        relation = 0
        if spoken is not None:
            token, level, kind = spoken
            odds = self._odds[kind] or self._log_odds(kind)
            if remembered is not None:
                other_token, other_level, kind = remembered
                kind += NUM_KINDS
                other = self._odds[kind] or self._log_odds(kind)
                if token == other_token:
                    relation = _BUCKETS
                    odds, level = max(odds, other), max(level, other_level)
                else:
                    relation = 2 * _BUCKETS
                    if other > odds:
                        token, odds, level = other_token, other, other_level
        else:
            assert remembered is not None
            token, level, kind = remembered
            kind += NUM_KINDS
            odds = self._odds[kind] or self._log_odds(kind)
        slot = relation + int(odds + _LIMIT)
        return token, odds + self._offsets[slot], slot, level

    def learn(self, guesses: Seq[Guess], tokens: Seq[int]) -> list[float]:
        """Take note of the tokens that came where others, or the same, were guessed.

        Returns the error of each guess, up to the first that was wrong: those behind were for another text.
        """
        count, offsets = self._count, self._offsets
        errors = []
        for (token, chance, slot, spoken, remembered), actual in zip(guesses, tokens, strict=False):
            error = (token == actual) - chance
            errors.append(error)
            offsets[slot] += OFFSET_RATE * error
            if spoken is not None:
                count(spoken[2], spoken[0] == actual)
            if remembered is not None:
                count(NUM_KINDS + remembered[2], remembered[0] == actual)
            if token != actual:
                break
        return errors

    def _count(self, kind: int, right: bool) -> None:
        self._seen[kind] += 1
        if right:
            self._right[kind] += 1
        if self._seen[kind] > MOST_SEEN:
            self._seen[kind] *= FADE
            self._right[kind] *= FADE
        self._odds[kind] = None

    def _log_odds(self, kind: int) -> float:
        seen, right = self._seen[kind], self._right[kind]
        odds = min(max(math.log((right + 0.01) / (seen - right + 0.01)), -_LIMIT), _LIMIT)
        self._odds[kind] = odds
        return odds

    def save(self, path: Path) -> None:
        """Write what was learnt, in one piece. A disk that cannot be written is logged."""
        state = {"orders": ORDERS, "seen": self._seen, "right": self._right, "offsets": self._offsets}
        text = json.dumps(state | self.reach.state())
        new = path.with_suffix(f".{os.getpid()}.new")  # another process may save, too
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(text)
            new.replace(path)
        except OSError as error:
            log.warning("%s cannot be written: %s", path, error.strerror)
            with contextlib.suppress(OSError):
                new.unlink()

    @classmethod
    def load(cls, path: Path) -> Acceptance:
        """Return what was saved, or the prior where there is nothing, or nothing that makes sense."""
        fresh = cls()
        try:
            state = json.loads(path.read_bytes())
        except FileNotFoundError:
            return fresh
        except (OSError, ValueError, RecursionError) as error:
            log.warning("%s cannot be read, speculation learns anew: %s", path, error)
            return fresh
        return fresh if fresh._restore(state) else cls()

    def _restore(self, state: Any) -> bool:
        if not isinstance(state, dict) or state.get("orders") != list(ORDERS):
            return False
        seen, right = _floats(state.get("seen"), self._seen), _floats(state.get("right"), self._right)
        offsets = _floats(state.get("offsets"), self._offsets)
        if seen is None or right is None or offsets is None:
            return False
        if not all(0 <= sure <= all_ for sure, all_ in zip(right, seen, strict=True)) or not all(seen):
            return False
        if max(map(abs, offsets)) > _LIMIT:
            return False
        self._seen, self._right, self._offsets = seen, right, offsets
        self._odds = [None] * len(seen)
        return self.reach.restore(state)


class Reach:
    """How much rarer a draft is accepted up to a depth than the product of its probabilities says.

    The longer a draft, the more it owes to its own tokens: where it has left the path, what it copies still looks like
    a long match. Counted for each level of the evidence that it began with.
    """

    def __init__(self) -> None:
        self._right = [[REACH_STRENGTH * share for share in _REACH] for _ in ORDERS]
        self._expected = [[REACH_STRENGTH] * len(_REACH) for _ in ORDERS]
        self._shares = [list(_REACH) for _ in ORDERS]

    def state(self) -> dict[str, list[list[float]]]:
        """Return what `restore` takes."""
        return {"reached": self._right, "expected": self._expected}

    def restore(self, state: dict[str, Any]) -> bool:
        """Take up a state; False: it makes no sense, and nothing is changed."""
        right, expected = _rows(state.get("reached"), self._right), _rows(state.get("expected"), self._expected)
        if right is None or expected is None or not all(total > 0 for row in expected for total in row):
            return False
        self._right, self._expected = right, expected
        self._shares = [[a / b for a, b in zip(*rows, strict=True)] for rows in zip(right, expected, strict=True)]
        return True

    def shares(self, level: int) -> list[float]:
        """Return by what to multiply, by the depth's bucket (`DEPTHS`)."""
        return self._shares[level]

    def learn(self, level: int, expected: Seq[float], accepted: int) -> None:
        """Take note of how many tokens of a draft were accepted, and how likely each was to be reached."""
        if not expected:
            return
        right, total, shares = self._right[level], self._expected[level], self._shares[level]
        for bucket, depth in enumerate(_FIRST[: DEPTHS[len(expected) - 1] + 1]):
            total[bucket] += expected[depth]
            right[bucket] += depth < accepted
            if total[bucket] > MOST_EXPECTED:
                total[bucket] *= FADE
                right[bucket] *= FADE
            shares[bucket] = right[bucket] / total[bucket]


def _floats(values: object, like: list[float]) -> list[float] | None:
    """Return a list of as many finite numbers, or None."""
    if not isinstance(values, list) or len(values) != len(like):
        return None
    return values if all(isinstance(value, float | int) and -_HUGE < value < _HUGE for value in values) else None


def _rows(values: object, like: list[list[float]]) -> list[list[float]] | None:
    if not isinstance(values, list) or len(values) != len(like):
        return None
    rows = [_floats(row, model) for row, model in zip(values, like, strict=True)]
    found = [row for row in rows if row is not None]
    return found if len(found) == len(like) else None
