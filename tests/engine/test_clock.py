"""StepClock: what it concludes from the times of steps."""

from __future__ import annotations

import pytest

from edgelm.core import Chunk, SamplingParams, Sequence, Step
from edgelm.engine.clock import MAX_STEP_S, MIN_PREFILL, StepClock


def step(prefill: int, rows: int) -> Step:
    seq = Sequence(0, [1], 1, SamplingParams())
    decode = tuple(Chunk(seq, 0, [1], 1, 0) for _ in range(rows))
    return Step((*decode, Chunk(seq, 0, [1] * prefill, 0, 0)) if prefill else decode)


def test_before_anything_is_known_prefill_is_small() -> None:
    assert StepClock().prefill_tokens(1) == MIN_PREFILL


def test_the_budget_is_what_fits_beside_the_decoding_rows() -> None:
    clock = StepClock()
    clock.observe(step(0, 4), 0.05)
    clock.observe(step(100, 4), 0.15)  # 1 ms a token
    assert clock.prefill_tokens(4) == pytest.approx(1000 * (MAX_STEP_S - 0.05), abs=1)


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


def test_marginal_costs_are_steps_of_the_measured_staircase() -> None:
    clock = StepClock()
    for rows, seconds in ((1, 0.066), (2, 0.081), (3, 0.114), (4, 0.087)):
        clock.observe(step(0, rows), seconds)
    costs = clock.marginal_cost(1, 3)
    assert costs == pytest.approx([(0.081 - 0.066) / 0.066, (0.114 - 0.081) / 0.066, (0.087 - 0.114) / 0.066])


def test_rows_that_were_never_seen_cost_what_prefill_does() -> None:
    clock = StepClock()
    clock.observe(step(0, 1), 0.1)
    clock.observe(step(100, 0), 1.0)
    assert clock.marginal_cost(1, 2) == pytest.approx([0.1, 0.1])


def test_an_unused_clock_takes_each_row_for_a_whole_step() -> None:
    assert StepClock().marginal_cost(1, 2) == [1.0, 1.0]
