"""Acceptance: the probability that a proposed token is accepted, learnt from the outcomes of each kind of evidence.

Owns the counts, their prior and their file. Knows nothing of text, contexts and costs.

A kind of evidence is: from this conversation or from past answers, the length of the context, the state of its counts,
and whether the shorter context agrees. Each kind has decayed counts of right and wrong, a Beta distribution whose prior
is a logistic function of a few features. The log-odds of the likelier token are corrected by an offset for the relation
of the two sources (only one has evidence, they agree, they differ). `Reach` corrects the product along a draft.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from edgelm.base.atomic import atomic_write
from edgelm.engine.speculation.ngram_counts import NUM_KINDS, NUM_STATES, ORDERS, SEVERAL, Evidence, kind_of

MAX_DRAFT = 24  # a longer draft brings little where a row costs anything, and each of its tokens takes our time

PRIOR_STRENGTH = 30.0  # observations that the prior counts as
MAX_SEEN = 400.0  # observations; above it, the older ones fade
FADE = 0.97
OFFSET_RATE = 0.02
_BUCKETS = 13  # of log-odds, each one wide, from -6 on
_LIMIT = 6.0  # log-odds: no probability is above 0.9975
_MAX_VALUE = 1e9  # in a file; our counts are smaller

REACH_STRENGTH = 20.0
MAX_EXPECTED = 60.0
_FIRST_DEPTHS = (0, 1, 2, 3, 4, 6, 9, 13, 18)  # of the buckets
DEPTHS = tuple(sum(depth >= first for first in _FIRST_DEPTHS[1:]) for depth in range(MAX_DRAFT))  # depth -> bucket
_PRIOR_REACH = (1.0, 0.97, 0.93, 0.88, 0.85, 0.8, 0.75, 0.7, 0.65)  # by bucket

# Token, probability, slot of its offset, and its evidence in this conversation and in past answers.
Guess = tuple[int, float, int, Evidence | None, Evidence | None]

log = logging.getLogger(__name__)


def _prior(is_past: bool, level: int, state: int, agrees: bool) -> float:
    """Return the prior log-odds of a kind: a logistic regression over recorded answers of three models."""
    length = math.log2(ORDERS[level])
    odds = -0.95 + 0.38 * length + (1.13 if agrees else 0.0)
    if is_past:
        odds += -0.7 + 0.11 * length
    if state < SEVERAL:
        return odds + 0.73 * math.log2((1, 2, 3.5, 6, 12)[state])
    return odds - 2.07 + 2.95 * (0.15, 0.28, 0.43, 0.58, 0.73, 0.86, 0.95)[(state - SEVERAL) // 2]


class Acceptance:
    """The acceptance rates of one model."""

    def __init__(self) -> None:
        odds: list[float] = []
        for is_past in (False, True):
            kinds = {
                kind_of(level, state, agrees): _prior(is_past, level, state, agrees)
                for level, state, agrees in itertools.product(range(len(ORDERS)), range(NUM_STATES), (False, True))
            }
            odds += [kinds[kind] for kind in range(NUM_KINDS)]
        self._seen = [PRIOR_STRENGTH] * len(odds)
        self._right = [PRIOR_STRENGTH / (1 + math.exp(-value)) for value in odds]
        self._odds: list[float | None] = [None] * len(odds)  # cache; None: compute it from the counts
        self._offsets = [0.0] * (3 * _BUCKETS)
        self.reach = Reach()

    def judge(self, current: Evidence | None, past: Evidence | None) -> tuple[int, float, int, int]:
        """Choose the likelier of two next tokens: by this conversation and by past answers. One may be None.

        Returns the token, the log-odds of its acceptance, the slot of the offset in them, and the evidence's level.
        """
        relation = 0
        if current is not None:
            token, level, kind = current
            odds = self._odds[kind] or self._log_odds(kind)
            if past is not None:
                past_token, past_level, kind = past
                kind += NUM_KINDS
                past_odds = self._odds[kind] or self._log_odds(kind)
                if token == past_token:
                    relation = _BUCKETS
                    odds, level = max(odds, past_odds), max(level, past_level)
                else:
                    relation = 2 * _BUCKETS
                    if past_odds > odds:
                        token, odds, level = past_token, past_odds, past_level
        else:
            assert past is not None
            token, level, kind = past
            kind += NUM_KINDS
            odds = self._odds[kind] or self._log_odds(kind)
        slot = relation + int(odds + _LIMIT)
        return token, odds + self._offsets[slot], slot, level

    def learn(self, guesses: Seq[Guess], tokens: Seq[int]) -> list[float]:
        """Learn from the tokens that came in place of the guesses.

        Returns the error of each guess up to the first wrong one; the guesses after it were for another text.
        """
        count, offsets = self._count, self._offsets
        errors = []
        for (token, chance, slot, current, past), actual in zip(guesses, tokens, strict=False):
            error = (token == actual) - chance
            errors.append(error)
            offsets[slot] += OFFSET_RATE * error
            if current is not None:
                count(current[2], current[0] == actual)
            if past is not None:
                count(NUM_KINDS + past[2], past[0] == actual)
            if token != actual:
                break
        return errors

    def _count(self, kind: int, right: bool) -> None:
        self._seen[kind] += 1
        if right:
            self._right[kind] += 1
        if self._seen[kind] > MAX_SEEN:
            self._seen[kind] *= FADE
            self._right[kind] *= FADE
        self._odds[kind] = None

    def _log_odds(self, kind: int) -> float:
        seen, right = self._seen[kind], self._right[kind]
        odds = min(max(math.log((right + 0.01) / (seen - right + 0.01)), -_LIMIT), _LIMIT)
        self._odds[kind] = odds
        return odds

    def save(self, path: Path) -> None:
        """Write the counts to a file. A disk that cannot be written is logged."""
        state = {"orders": ORDERS, "seen": self._seen, "right": self._right, "offsets": self._offsets}
        try:
            atomic_write(path, json.dumps(state | self.reach.state()).encode())
        except OSError as error:
            log.warning("%s cannot be written: %s", path, error.strerror)

    @classmethod
    def load(cls, path: Path) -> Acceptance:
        """Return the counts of a file, or the prior if there is no file or its content is not valid."""
        fresh = cls()
        try:
            state = json.loads(path.read_bytes())
        except FileNotFoundError:
            return fresh
        except (OSError, ValueError, RecursionError) as error:
            log.warning("%s cannot be read, speculation learns again from the start: %s", path, error)
            return fresh
        return fresh if fresh._restore(state) else cls()

    def _restore(self, state: Any) -> bool:
        if not isinstance(state, dict) or state.get("orders") != list(ORDERS):
            return False
        seen, right = _floats(state.get("seen"), self._seen), _floats(state.get("right"), self._right)
        offsets = _floats(state.get("offsets"), self._offsets)
        if seen is None or right is None or offsets is None:
            return False
        if not all(0 <= hits <= total for hits, total in zip(right, seen, strict=True)) or not all(seen):
            return False
        if max(map(abs, offsets)) > _LIMIT:
            return False
        self._seen, self._right, self._offsets = seen, right, offsets
        self._odds = [None] * len(seen)
        return self.reach.restore(state)


class Reach:
    """The share of drafts accepted up to a depth, relative to the product of their tokens' probabilities.

    The deeper a draft, the more its contexts consist of its own tokens: after a wrong token, the text that it copies
    still looks like a long match. Counted apart for each level of the evidence for the draft's first token.
    """

    def __init__(self) -> None:
        self._right = [[REACH_STRENGTH * share for share in _PRIOR_REACH] for _ in ORDERS]
        self._expected = [[REACH_STRENGTH] * len(_PRIOR_REACH) for _ in ORDERS]
        self._shares = [list(_PRIOR_REACH) for _ in ORDERS]

    def state(self) -> dict[str, list[list[float]]]:
        """Return the state that `restore` takes."""
        return {"reached": self._right, "expected": self._expected}

    def restore(self, state: dict[str, Any]) -> bool:
        """Take over a state; False: it is not valid, and nothing is changed."""
        right, expected = _rows(state.get("reached"), self._right), _rows(state.get("expected"), self._expected)
        if right is None or expected is None or not all(total > 0 for row in expected for total in row):
            return False
        self._right, self._expected = right, expected
        self._shares = [[a / b for a, b in zip(*rows, strict=True)] for rows in zip(right, expected, strict=True)]
        return True

    def shares(self, level: int) -> list[float]:
        """Return the factors for the product of probabilities, by the depth's bucket (`DEPTHS`)."""
        return self._shares[level]

    def learn(self, level: int, expected: Seq[float], accepted: int) -> None:
        """Learn how many tokens of a draft were accepted; `expected` are the probabilities of reaching each of them."""
        if not expected:
            return
        right, total, shares = self._right[level], self._expected[level], self._shares[level]
        for bucket, depth in enumerate(_FIRST_DEPTHS[: DEPTHS[len(expected) - 1] + 1]):
            total[bucket] += expected[depth]
            right[bucket] += depth < accepted
            if total[bucket] > MAX_EXPECTED:
                total[bucket] *= FADE
                right[bucket] *= FADE
            shares[bucket] = right[bucket] / total[bucket]


def _floats(values: object, like: list[float]) -> list[float] | None:
    """Return a list of as many finite numbers; None for anything else."""
    if not isinstance(values, list) or len(values) != len(like):
        return None
    return (
        values if all(isinstance(value, float | int) and -_MAX_VALUE < value < _MAX_VALUE for value in values) else None
    )


def _rows(values: object, like: list[list[float]]) -> list[list[float]] | None:
    if not isinstance(values, list) or len(values) != len(like):
        return None
    rows = [_floats(row, like_row) for row, like_row in zip(values, like, strict=True)]
    valid = [row for row in rows if row is not None]
    return valid if len(valid) == len(like) else None
