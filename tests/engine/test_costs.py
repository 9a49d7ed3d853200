"""StepCosts: the surface between measured points, and how real steps correct it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgelm.engine.costs import Measured, StepCosts

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


def test_between_points_lies_a_line() -> None:
    costs = StepCosts(SURFACE)
    assert costs.time(1, 500) == pytest.approx(0.012)
    assert costs.time(2, 0) == pytest.approx(0.012)
    assert costs.time(2, 1000) == pytest.approx(0.018)


def test_more_rows_than_measured_cost_in_proportion() -> None:
    assert StepCosts(SURFACE).time(15, 0) == pytest.approx(0.050)


def test_a_row_count_without_a_deep_point_takes_the_slope_of_its_neighbour() -> None:
    assert StepCosts(SURFACE).time(8, 1000) - 0.030 >= 0.010


def test_nothing_known_is_no_time() -> None:
    costs = StepCosts()
    assert costs.time(3, 10) == 0
    assert not costs.prices_rows


def test_real_steps_are_enough_to_learn() -> None:
    costs = StepCosts()
    for _ in range(20):
        costs.observe(1, 0, 0.01)
        costs.observe(4, 0, 0.02)
    assert costs.prices_rows
    assert costs.time(4, 0) / costs.time(1, 0) == pytest.approx(2)


def test_a_busier_machine_changes_no_relation() -> None:
    costs = StepCosts(SURFACE)
    for _ in range(10):
        costs.observe(1, 0, 0.020)
    assert costs.time(1, 0) == pytest.approx(0.020, rel=0.05)
    assert costs.time(4, 0) / costs.time(1, 0) == pytest.approx(1.6, rel=0.2)


def test_a_wrong_measurement_is_corrected_by_what_steps_take() -> None:
    costs = StepCosts([Measured(1, 0, 0.010), Measured(2, 0, 0.011), Measured(4, 0, 0.012)])
    for _ in range(200):
        costs.observe(1, 0, 0.010)
        costs.observe(4, 0, 0.030)
    assert costs.time(4, 0) / costs.time(1, 0) == pytest.approx(3, rel=0.15)


def test_one_step_that_was_held_up_teaches_little() -> None:
    costs = StepCosts(SURFACE)
    costs.observe(4, 0, 10.0)
    assert costs.time(4, 0) / costs.time(1, 0) == pytest.approx(1.6, rel=0.1)


points = st.builds(Measured, st.integers(1, 64), st.integers(0, 10_000), st.floats(1e-5, 1.0))
steps = st.tuples(st.integers(1, 80), st.integers(0, 30_000), st.floats(1e-6, 100.0))


@given(st.lists(points, max_size=12), st.lists(steps, max_size=40))
def test_times_are_positive_numbers_whatever_was_measured(
    measured: list[Measured], observed: list[tuple[int, int, float]]
) -> None:
    costs = StepCosts(measured)
    for rows, depth, seconds in observed:
        costs.observe(rows, depth, seconds)
        assert 0 < costs.time(rows, depth) < float("inf")
    for rows in (1, 2, 7, 64, 100):
        time = costs.time(rows, 500)
        assert 0 < time < float("inf") if measured or observed else time == 0
