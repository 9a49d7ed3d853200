"""The sums against numpy's over everything at once; written and read back; of bounded size."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgelm.evaluation.scores import Scores
from edgelm.evaluation.tally import Moments, Tally

PARTS = st.lists(arrays(np.float64, st.integers(0, 20), elements=st.floats(-50, 50)), max_size=8)


def window(rng: np.random.Generator, size: int) -> Scores:
    divergence = np.exp(rng.normal(-6, 2, size))
    divergence[rng.random(size) < 0.05] = 0
    return Scores(rng.exponential(2, size), rng.exponential(2, size), divergence, rng.random(size) < 0.9)


@given(PARTS)
def test_moments_of_parts_are_those_of_the_whole(parts: list[np.ndarray]) -> None:
    moments = Moments()
    for part in parts:
        moments.add(part)
    whole = np.concatenate([*parts, np.empty(0)])
    assert moments.count == whole.size
    if whole.size:
        assert moments.mean == pytest.approx(whole.mean(), rel=1e-9, abs=1e-9)
    if whole.size > 1:
        assert moments.error == pytest.approx(whole.std(ddof=1) / math.sqrt(whole.size), rel=1e-6, abs=1e-9)


def test_a_small_spread_of_large_values_is_not_lost() -> None:
    values = 1e9 + np.tile([0.0, 1.0], 500)
    moments = Moments()
    for part in np.split(values, 10):
        moments.add(part)
    assert moments.error == pytest.approx(values.std(ddof=1) / math.sqrt(1000), rel=1e-9)


def test_the_figures_of_a_comparison() -> None:
    rng = np.random.default_rng(3)
    parts = [window(rng, size) for size in (100, 1, 255, 255, 40)]
    tally = Tally()
    for part in parts:
        tally.add(part)
    surprise, reference, divergence, same_top = (np.concatenate(each) for each in zip(*parts, strict=True))
    assert tally.windows == 5
    assert tally.difference.mean == pytest.approx((surprise - reference).mean())
    assert tally.difference.error == pytest.approx((surprise - reference).std(ddof=1) / math.sqrt(len(surprise)))
    assert tally.divergence.mean == pytest.approx(divergence.mean())
    assert tally.max_divergence == divergence.max()
    assert tally.same_top == same_top.sum()
    for share in (0.1, 0.5, 0.9, 0.99, 1.0):
        assert tally.divergence_quantile(share) == pytest.approx(np.quantile(divergence, share), rel=1e-3)


def test_a_divergence_of_zero_is_a_quantile_of_about_zero() -> None:
    tally = Tally()
    tally.add(Scores(np.ones(4), np.ones(4), np.zeros(4), np.ones(4, np.bool_)))
    assert tally.divergence_quantile(0.99) < 1e-14


def test_going_on_from_what_was_written_gives_the_same_to_the_last_bit() -> None:
    rng = np.random.default_rng(4)
    parts = [window(rng, 255) for _ in range(12)]
    through, resumed = Tally(), Tally()
    for part in parts:
        through.add(part)
        resumed.add(part)
        resumed = Tally.from_json(json.loads(json.dumps(resumed.to_json())))
    assert resumed == through


@pytest.mark.parametrize(
    "change", [{"windows": -1}, {"wings": 2}, {"bins": {"x": 1}}, {"surprise": {"count": -3}}, {"surprise": {"k": 1}}]
)
def test_what_was_not_written_by_it_is_refused(change: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        Tally.from_json(Tally().to_json() | change)


def test_its_size_does_not_grow_with_the_text() -> None:
    rng = np.random.default_rng(5)
    tally, sizes = Tally(), []
    for _ in range(2):
        for _ in range(40):
            tally.add(window(rng, 20_000))
        sizes.append(len(json.dumps(tally.to_json())))
    assert sizes[1] < 1.1 * sizes[0] < 400_000
