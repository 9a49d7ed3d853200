"""A budget ends a thought in time, and nowhere else."""

from __future__ import annotations

import random
import secrets

import numpy as np
import pytest

from edgelm.engine.core import Masks
from edgelm.engine.sampling.budget import BudgetMatcher

NUM_VOCAB = 70
START, END = 60, 61  # control tokens, without text
LONG_END = [50, 51, END]
PIECES = {token: bytes([97 + token % 26]) for token in range(60)} | {20: b"\xe2", 21: b"\x82", 22: b"\xac", 23: b"\xff"}


def piece(token: int) -> bytes:
    return PIECES.get(token, b"")


class OnlyEven:
    """A grammar of even tokens that ends after three."""

    error: str | None = None
    unrestricted = False

    def __init__(self) -> None:
        self.taken: list[int] = []

    @property
    def done(self) -> bool:
        return len(self.taken) == 3

    def allowed(self, draft: list[int]) -> int:
        return next((i for i, token in enumerate(draft) if token % 2), len(draft))

    def forced(self, most: int) -> list[int]:
        return [4][:most]

    def fill(self, draft: list[int], rows: Masks) -> None:
        rows[:] = 0x55555555

    def accept(self, token: int) -> None:
        self.taken.append(token)


class EvenAndEnd(OnlyEven):
    def allowed(self, draft: list[int]) -> int:
        return next((i for i, token in enumerate(draft) if token % 2 and token != END), len(draft))


def rows_of(matcher: BudgetMatcher, draft: list[int]) -> list[set[int]]:
    rows = np.full((len(draft) + 1, -(-NUM_VOCAB // 32)), 7, np.int32)
    matcher.fill(draft, rows)
    bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row[:NUM_VOCAB]).tolist()) for row in bits]


ALL, EVEN = set(range(NUM_VOCAB)), set(range(0, NUM_VOCAB, 2))


def budget(inner: OnlyEven | None = None, tokens: int = 3, **options: object) -> BudgetMatcher:
    arguments = {"is_open": True, "end_ids": [END], "piece": piece, "spans_thought": False}
    return BudgetMatcher(inner, tokens, **(arguments | options))  # type: ignore[arg-type]


def test_a_spent_budget_forces_the_end_marker() -> None:
    inner = OnlyEven()
    matcher = budget(inner, end_ids=LONG_END)
    for token in (1, 2, 3):
        assert matcher.forced(9) == []
        assert rows_of(matcher, []) == [ALL]
        matcher.accept(token)
    assert matcher.forced(9) == LONG_END
    assert matcher.forced(2) == LONG_END[:2]
    assert rows_of(matcher, [*LONG_END, 8]) == [{50}, {51}, {END}, EVEN, EVEN]
    assert matcher.allowed([*LONG_END, 8, 9, 8]) == 4
    assert matcher.allowed([50, 8]) == 1
    for token in LONG_END:
        assert matcher.thinking
        matcher.accept(token)
    assert not matcher.thinking
    assert inner.taken == []
    for token in (2, 4, 6):
        assert matcher.forced(9) == [4]
        assert not matcher.done
        matcher.accept(token)
    assert matcher.done
    assert inner.taken == [2, 4, 6]


def test_a_thought_that_ends_by_itself_is_not_ended_again() -> None:
    matcher = budget(OnlyEven())
    assert rows_of(matcher, [1, END, 4]) == [ALL, ALL, EVEN, EVEN]
    assert matcher.allowed([1, END, 4, 3]) == 3
    for token in (1, END):
        matcher.accept(token)
    assert not matcher.thinking
    assert rows_of(matcher, []) == [EVEN]


def test_the_end_marker_counts_by_its_text() -> None:
    """A model may spell it in other tokens, and join its end with what follows."""
    texts = {1: b"</thi", 2: b"nk>\n\n", 3: b"</", 4: b"think>"}
    matcher = budget(tokens=10, end_ids=[3, 4], piece=lambda token: texts.get(token, b"x"))
    for token in (7, 1):
        matcher.accept(token)
        assert matcher.thinking
    matcher.accept(2)
    assert not matcher.thinking


def test_a_character_is_finished_before_the_end() -> None:
    matcher = budget(end_ids=LONG_END)
    for token in (1, 2, 20):
        matcher.accept(token)
    assert matcher.forced(9) == []
    assert rows_of(matcher, [21, 22]) == [ALL, ALL, {50}]
    matcher.accept(23)  # it never is: these bytes are no text
    assert matcher.forced(1) == [50]


def test_an_inner_grammar_may_span_the_thought() -> None:
    inner = EvenAndEnd()
    matcher = budget(inner, tokens=2, spans_thought=True)
    assert rows_of(matcher, [2, 4, END]) == [EVEN, EVEN, {END}, EVEN]
    for token in (2, 4):
        matcher.accept(token)
    assert inner.taken == [2, 4]
    assert matcher.forced(3) == [END]


def test_a_thought_that_a_call_has_ended_is_not_ended_again() -> None:
    matcher = budget(OnlyEven(), tokens=2, spans_thought=True)  # the grammar has no place for END
    assert rows_of(matcher, [2, 4, 6]) == [EVEN] * 4
    assert matcher.allowed([2, 4, 6]) == 3
    for token in (2, 4):
        matcher.accept(token)
    assert matcher.forced(3) == [4], "what the grammar forces"
    assert rows_of(matcher, []) == [EVEN]


def test_a_thought_may_open_later_and_again() -> None:
    matcher = budget(tokens=2, is_open=False, start_ids=[START])
    for token in (1, 2, 3, 4, START, 5, END, 7, START):
        assert matcher.forced(3) == []
        matcher.accept(token)
    assert matcher.forced(3) == [END], "the budget is for all thoughts: two tokens were spent"


@pytest.mark.parametrize("is_open", [True, False])
def test_a_step_may_run_ahead_while_nothing_depends_on_the_next_token(is_open: bool) -> None:
    """By trying: the rows now and after any next token allow all tokens."""
    rng = random.Random(seed := secrets.randbits(32))
    for _ in range(50):
        tokens = rng.randrange(6)
        matcher = budget(tokens=tokens, is_open=is_open, start_ids=rng.choice([[], [START]]))
        for _ in range(12):
            free = all(rows_of(matcher, [token]) == [ALL, ALL] for token in range(NUM_VOCAB))
            assert not matcher.unrestricted or free, f"seed {seed}"
            forced = matcher.forced(1)
            matcher.accept(forced[0] if forced else rng.choice([1, 2, 20, START, END]))
    assert budget(tokens=5).unrestricted
    assert budget(tokens=5, is_open=False).unrestricted
    assert not budget(OnlyEven(), tokens=5).unrestricted
