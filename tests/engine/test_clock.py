"""StepClock: what it concludes from the times of steps."""

from __future__ import annotations

import itertools

import pytest

from edgelm.core import Chunk, SamplingParams, Sequence, Step
from edgelm.engine.clock import FRESH, MAX_STEP_S, MIN_PREFILL, PLAIN_EVERY, StepClock
from edgelm.engine.costs import Measured, StepCosts


def step(prefill: int, rows: int, sequences: int | None = None) -> Step:
    """Return a step of so many rows, each of a sequence of its own or the last ones drafts of the first."""
    seq = Sequence(0, [1], 1, SamplingParams())
    drafted = rows - (rows if sequences is None else sequences)
    decode = [Chunk(seq, 0, [1] * (1 + drafted), 1 + drafted, 0)] if rows else []
    decode += [Chunk(seq, 0, [1], 1, 0) for _ in range(rows - drafted - 1)]
    return Step((*decode, Chunk(seq, 0, [1] * prefill, 0, 0)) if prefill else tuple(decode))


def test_before_anything_is_known_prefill_is_small() -> None:
    assert StepClock().prefill_tokens(1) == MIN_PREFILL


def test_the_budget_is_what_fits_beside_the_decoding_rows() -> None:
    clock = StepClock()
    clock.observe(step(0, 4), 0.05)
    clock.observe(step(100, 4), 0.15)  # 1 ms a token
    assert clock.prefill_tokens(4) == pytest.approx(1000 * (MAX_STEP_S - 0.05), abs=1)


def test_prefill_of_steps_before_is_counted() -> None:
    clock = StepClock()
    clock.observe(step(100, 0), 0.4, unseen=300)
    assert clock.prefill_tokens(0) == pytest.approx(1000 * MAX_STEP_S, abs=1)


def test_a_slow_machine_takes_the_least() -> None:
    clock = StepClock()
    clock.observe(step(100, 0), 100.0)
    assert clock.prefill_tokens(1) == MIN_PREFILL


def test_a_few_tokens_of_prefill_tell_nothing() -> None:
    clock = StepClock()
    clock.observe(step(3, 0), 0.0001)
    assert clock.prefill_tokens(1) == MIN_PREFILL


def test_the_estimate_follows_the_machine() -> None:
    clock = StepClock()
    clock.observe(step(100, 0), 0.1)
    for _ in range(50):
        clock.observe(step(100, 0), 0.2)
    assert clock.prefill_tokens(0) == pytest.approx(MAX_STEP_S / 0.002, abs=1)


STAIRCASE = [Measured(rows, 0, seconds) for rows, seconds in ((1, 0.066), (2, 0.081), (3, 0.114), (4, 0.087))]


def test_marginal_costs_are_steps_of_the_measured_staircase() -> None:
    costs = StepClock(StepCosts(STAIRCASE)).marginal_cost(1, 0, 1, 3)
    assert costs == pytest.approx([(0.081 - 0.066) / 0.066, (0.114 - 0.081) / 0.066, (0.087 - 0.114) / 0.066])


def test_a_row_costs_every_sequence_of_the_step() -> None:
    clock = StepClock(StepCosts(STAIRCASE))
    assert clock.marginal_cost(2, 0, 2, 1) == pytest.approx([2 * (0.114 - 0.081) / 0.081])


def test_rows_that_were_never_seen_cost_what_prefill_does() -> None:
    clock = StepClock()
    clock.observe(step(0, 1), 0.1)
    clock.observe(step(100, 0), 1.0)
    assert clock.marginal_cost(1, 0, 1, 2) == pytest.approx([0.1, 0.1])


def test_where_nothing_is_known_a_row_costs_a_step() -> None:
    assert StepClock().marginal_cost(1, 0, 1, 2) == [1.0, 1.0]


def test_a_step_with_drafts_is_compared_with_those_without_before_it() -> None:
    clock = StepClock(StepCosts(STAIRCASE))
    for seconds in (0.12, 0.9, 0.13):  # the surface says 0.066, and one of them hung
        clock.observe(step(0, 1), seconds)
    clock.observe(step(0, 4, sequences=1), 0.2)
    assert clock.last == (1, 4, 0.2, pytest.approx(0.13))


def test_what_was_long_ago_is_not_compared() -> None:
    clock = StepClock(StepCosts(STAIRCASE))
    clock.observe(step(0, 4, sequences=1), 0.09)
    assert clock.last
    assert clock.last.plain_s == 0
    clock.observe(step(0, 1), 0.066)
    for _ in range(FRESH + 1):
        clock.observe(step(0, 4, sequences=1), 0.09)
    assert clock.last.plain_s == 0


def test_a_step_without_drafts_is_due_now_and_then_and_more_rarely_with_time() -> None:
    clock = StepClock(StepCosts(STAIRCASE))
    plain = []
    for number in range(1_000):
        due = clock.plain_due
        clock.observe(step(0, 1) if due else step(0, 4, sequences=1), 0.1)
        plain += [number] if due else []
    gaps = [after - before for before, after in itertools.pairwise(plain)]
    assert plain[0] == 1
    assert gaps == sorted(gaps)
    assert gaps[-1] == PLAIN_EVERY + 1


def test_a_step_with_prefill_is_not_compared() -> None:
    clock = StepClock(StepCosts(STAIRCASE))
    clock.observe(step(0, 1), 0.066)
    clock.observe(step(40, 1), 0.2)
    assert clock.last is None
