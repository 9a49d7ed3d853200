"""StepClock: its estimates from the times of steps; StepCosts: the surface, and its correction by real steps."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgelm.engine.clock import FRESH, MAX_STEP_S, MIN_PREFILL, PLAIN_EVERY, TRIAL_AFTER, Measured, StepClock, StepCosts
from edgelm.engine.core import Chunk, SamplingParams, Sequence, Step


def step(prefill: int, rows: int, sequences: int | None = None) -> Step:
    """Return a step of `rows` rows: one for each sequence, the others for drafts of the first."""
    seq = Sequence(0, [1], 1, SamplingParams())
    drafted = rows - (rows if sequences is None else sequences)
    decode = [Chunk(seq, 0, [1] * (1 + drafted), 1 + drafted, 0)] if rows else []
    decode += [Chunk(seq, 0, [1], 1, 0) for _ in range(rows - drafted - 1)]
    return Step((*decode, Chunk(seq, 0, [1] * prefill, 0, 0)) if prefill else tuple(decode))


def test_before_any_measurement_prefill_is_small() -> None:
    assert StepClock().prefill_tokens(1) == MIN_PREFILL


def test_the_budget_is_what_fits_beside_the_decoding_rows() -> None:
    clock = StepClock()
    clock.observe(step(0, 4), 0.05)
    clock.observe(step(100, 4), 0.15)  # 1 ms a token
    assert clock.prefill_tokens(4) == pytest.approx(1000 * (MAX_STEP_S - 0.05), abs=1)


def test_unread_prefill_is_counted() -> None:
    clock = StepClock()
    clock.observe(step(100, 0), 0.4, unread_prefill=300)
    assert clock.prefill_tokens(0) == pytest.approx(1000 * MAX_STEP_S, abs=1)


def test_a_slow_machine_takes_the_minimum() -> None:
    clock = StepClock()
    clock.observe(step(100, 0), 100.0)
    assert clock.prefill_tokens(1) == MIN_PREFILL


def test_a_few_tokens_of_prefill_are_not_measured() -> None:
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


def test_time_between_steps_delays_every_sequence() -> None:
    clock = StepClock(StepCosts(STAIRCASE))
    assert clock.token_s() == pytest.approx(0.066)
    clock.observe(step(0, 2), 0.081)
    assert clock.token_s() == pytest.approx(0.081 / 2)
    clock.observe(step(100, 0), 1.0)
    assert clock.token_s() == pytest.approx(0.066), "no sequence waits for a prompt alone"


def test_rows_never_measured_cost_as_much_as_prefill() -> None:
    clock = StepClock()
    clock.observe(step(0, 1), 0.1)
    clock.observe(step(100, 0), 1.0)
    assert clock.marginal_cost(1, 0, 1, 2) == pytest.approx([0.1, 0.1])


def test_before_any_measurement_a_row_costs_a_step() -> None:
    assert StepClock().marginal_cost(1, 0, 1, 2) == [1.0, 1.0]


def test_a_step_with_drafts_is_compared_with_recent_plain_steps() -> None:
    clock = StepClock(StepCosts(STAIRCASE))
    for seconds in (0.12, 0.9, 0.13):  # the surface says 0.066, and one step hung
        clock.observe(step(0, 1), seconds)
    clock.observe(step(0, 4, sequences=1), 0.2)
    assert clock.last == (1, 4, 0.2, pytest.approx(0.13))


def test_old_plain_steps_are_not_compared() -> None:
    clock = StepClock(StepCosts(STAIRCASE))
    clock.observe(step(0, 4, sequences=1), 0.09)
    assert clock.last
    assert clock.last.plain_s == 0
    clock.observe(step(0, 1), 0.066)
    for _ in range(FRESH + 1):
        clock.observe(step(0, 4, sequences=1), 0.09)
    assert clock.last.plain_s == 0


def test_a_plain_step_is_due_now_and_then_and_less_often_with_time() -> None:
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


# -- the cost surface --------------------------------------------------------------------------------------------------


SURFACE = [
    Measured(1, 0, 0.010),
    Measured(1, 1000, 0.014),
    Measured(4, 0, 0.016),
    Measured(4, 1000, 0.026),
    Measured(8, 0, 0.030),
]


def test_measured_points_are_kept() -> None:
    costs = StepCosts(SURFACE)
    for point in SURFACE:
        assert costs.time(point.rows, point.depth) == pytest.approx(point.seconds)


def test_between_points_is_a_line() -> None:
    costs = StepCosts(SURFACE)
    assert costs.time(1, 500) == pytest.approx(0.012)
    assert costs.time(2, 0) == pytest.approx(0.012)
    assert costs.time(2, 1000) == pytest.approx(0.018)


def test_more_rows_than_measured_cost_in_proportion() -> None:
    assert StepCosts(SURFACE).time(15, 0) == pytest.approx(0.050)


def test_a_row_count_without_a_deep_point_takes_the_slope_of_its_neighbour() -> None:
    assert StepCosts(SURFACE).time(8, 1000) - 0.030 >= 0.010


def test_without_measurements_the_time_is_zero() -> None:
    costs = StepCosts()
    assert costs.time(3, 10) == 0
    assert not costs.prices_rows


def test_real_steps_suffice_to_learn() -> None:
    costs = StepCosts()
    for _ in range(20):
        costs.observe(1, 0, 0.01)
        costs.observe(4, 0, 0.02)
    assert costs.prices_rows
    assert costs.time(4, 0) / costs.time(1, 0) == pytest.approx(2)


def test_a_busier_machine_changes_no_ratio() -> None:
    costs = StepCosts(SURFACE)
    for _ in range(10):
        costs.observe(1, 0, 0.020)
    assert costs.time(1, 0) == pytest.approx(0.020, rel=0.05)
    assert costs.time(4, 0) / costs.time(1, 0) == pytest.approx(1.6, rel=0.2)


def test_real_steps_correct_a_wrong_measurement() -> None:
    costs = StepCosts([Measured(1, 0, 0.010), Measured(2, 0, 0.011), Measured(4, 0, 0.012)])
    for _ in range(200):
        costs.observe(1, 0, 0.010)
        costs.observe(4, 0, 0.030)
    assert costs.time(4, 0) / costs.time(1, 0) == pytest.approx(3, rel=0.15)


def test_one_delayed_step_changes_little() -> None:
    costs = StepCosts(SURFACE)
    costs.observe(4, 0, 10.0)
    assert costs.time(4, 0) / costs.time(1, 0) == pytest.approx(1.6, rel=0.1)


ROWS = (1, 2, 3, 4, 5, 6, 8, 16)


def seconds_of(rows: int, row_cost: float) -> float:
    return 0.01 * (1 + row_cost * (rows - 1))


def price_of_a_draft(clock: StepClock) -> float:
    """Return the price of each of the first four rows."""
    return sum(clock.marginal_cost(1, 0, 1, 8)[:4]) / 4


@pytest.mark.parametrize("row_cost", [0.12, 0.35, 0.6])
@pytest.mark.parametrize("stall", [3.0, 6.0, 50.0])
def test_steps_that_stall_now_and_then_do_not_raise_the_price_of_rows(row_cost: float, stall: float) -> None:
    """Each stall of a plain step made rows 6 % dearer; after five to forty of them none was ever drafted again."""
    clock = StepClock(StepCosts(Measured(rows, 0, seconds_of(rows, row_cost)) for rows in ROWS))
    for number in range(1, 2_001):
        clock.observe(step(0, 1), 0.01 * (stall if number % 20 == 0 else 1.0))
        if number % 100 == 50:
            clock.observe(step(0, 5, 1), seconds_of(5, row_cost))
    for _ in range(20):
        clock.observe(step(0, 1), 0.01)
    assert price_of_a_draft(clock) == pytest.approx(row_cost, rel=0.1)


@pytest.mark.parametrize("stalls", [0.01, 0.05])
def test_stalls_between_steps_of_several_row_counts_do_not_raise_the_price_of_the_others(stalls: float) -> None:
    """While the scale came back from a stall, ratios gave part of it back: 1 % of stalls made others 650 times dear."""
    rng = random.Random(1)
    clock = StepClock(StepCosts(Measured(rows, 0, seconds_of(rows, 0.35)) for rows in ROWS))
    for _ in range(20_000):
        rows = rng.choice((1, 5))
        stalled = 6.0 if rng.random() < stalls else 1.0
        clock.observe(step(0, rows, 1), stalled * seconds_of(rows, 0.35) * rng.uniform(0.95, 1.05))
    costs = clock.marginal_cost(1, 0, 1, 8)
    assert costs[0] == pytest.approx(0.35, rel=0.7), "two rows are never run"
    assert sum(costs[:4]) == pytest.approx(4 * 0.35, rel=0.3)


def test_a_machine_that_is_never_calm_keeps_finite_times() -> None:
    rng = random.Random(1)
    costs = StepCosts(SURFACE)
    for _ in range(100_000):
        rows = rng.choice((1, 4))
        costs.observe(rows, 0, (0.01 if rows == 1 else 0.016) * (6.0 if rng.random() < 0.3 else 1.0))
    assert all(0.001 < costs.time(rows, 0) < 10 for rows in (1, 2, 4, 8))


def test_a_machine_that_always_stalls_keeps_a_price() -> None:
    """The scale and the ratio of one row count drifted apart without end: OverflowError after 69,000 steps."""
    costs = StepCosts(SURFACE)
    for number in range(100_000):
        costs.observe(1, 0, 0.08 if number % 5 == 0 else 0.01)
    assert 0.01 < costs.time(1, 0) < 0.1
    assert costs.time(4, 0) / costs.time(1, 0) == pytest.approx(1.6)


@pytest.mark.parametrize("wrong", [2.0, 3.0, 20.0])
def test_prices_that_allow_no_draft_are_doubted_until_a_step_with_a_draft_tells(wrong: float) -> None:
    """A first start under load kept them for the life of a process, and on the disk."""
    measured = [Measured(rows, 0, seconds_of(rows, 0.35) * (wrong if rows > 1 else 1)) for rows in ROWS]
    clock = StepClock(StepCosts(measured))
    trials = []
    for number in range(12 * TRIAL_AFTER):
        if price_of_a_draft(clock) < 0.9:
            trials.append(number)
            clock.observe(step(0, 5, 1), seconds_of(5, 0.35))
        else:
            clock.observe(step(0, 1), 0.01)
    assert trials[0] == TRIAL_AFTER
    assert number - trials[-1] < 2, "they are cheap without a trial"
    assert len(trials) > 4 * TRIAL_AFTER


def test_trials_of_rows_that_are_dear_get_rare() -> None:
    clock = StepClock(StepCosts(Measured(rows, 0, seconds_of(rows, 1.0)) for rows in ROWS))
    trials = []
    for number in range(40 * TRIAL_AFTER):
        if price_of_a_draft(clock) < 0.9:
            trials.append(number)
            assert clock.marginal_cost(1, 0, 1, 8)[4] == pytest.approx(1.0, rel=0.01), "a trial is short"
            assert clock.marginal_cost(2, 0, 2, 1)[0] < 0.4
            assert clock.marginal_cost(6, 0, 1, 1)[0] > 0.15, "one request of a step tries"
            clock.observe(step(0, 5, 1), seconds_of(5, 1.0))
        else:
            clock.observe(step(0, 1), 0.01)
    gaps = [b - a for a, b in itertools.pairwise(trials)]
    assert gaps == [1 + TRIAL_AFTER * 2**n for n in range(1, 1 + len(gaps))]
    assert len(gaps) == 4


def test_tokens_that_a_grammar_forces_bring_no_trials() -> None:
    clock = StepClock(StepCosts(Measured(rows, 0, seconds_of(rows, 1.0)) for rows in ROWS))
    trials = 0
    for number in range(60 * 300):
        forced = number % 300 < 4  # an answer of JSON begins with them
        trial = not forced and price_of_a_draft(clock) < 0.9
        trials += trial
        rows = 5 if forced or trial else 1
        clock.observe(step(0, rows, 1), seconds_of(rows, 1.0))
    assert trials <= 6


def test_a_trial_beside_a_prompt_ends_it() -> None:
    clock = StepClock(StepCosts(Measured(rows, 0, seconds_of(rows, 1.0)) for rows in ROWS))
    for _ in range(TRIAL_AFTER):
        clock.observe(step(0, 1), 0.01)
    assert price_of_a_draft(clock) < 0.9
    clock.observe(step(100, 5, 1), 0.2)
    assert price_of_a_draft(clock) > 0.9


points = st.builds(Measured, st.integers(1, 64), st.integers(0, 10_000), st.floats(1e-5, 1.0))
steps = st.tuples(st.integers(1, 80), st.integers(0, 30_000), st.floats(1e-6, 100.0))


@given(st.lists(points, max_size=12), st.lists(steps, max_size=40))
def test_times_are_positive_numbers_for_any_measurements(
    measured: list[Measured], observed: list[tuple[int, int, float]]
) -> None:
    costs = StepCosts(measured)
    for rows, depth, seconds in observed:
        costs.observe(rows, depth, seconds)
        assert 0 < costs.time(rows, depth) < float("inf")
    for rows in (1, 2, 7, 64, 100):
        time = costs.time(rows, 500)
        assert 0 < time < float("inf") if measured or observed else time == 0
