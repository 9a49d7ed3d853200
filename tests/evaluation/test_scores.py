"""Scores against sums in plain Python; the tally against numpy over all scores at once."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgelm.base.errors import EngineError
from edgelm.evaluation import scores
from edgelm.evaluation.scores import Moments, Scores, Tally, distinguishable, score

LOGIT = st.floats(-300, 300, width=32)
ROWS = st.integers(2, 9).flatmap(lambda vocab: arrays(np.float32, (3, vocab), elements=LOGIT))


def probabilities(row: np.ndarray) -> list[float]:
    """Return ln p of each token, by sums that lose nothing."""
    most = max(map(float, row))
    total = math.log(math.fsum(math.exp(float(logit) - most) for logit in row))
    return [float(logit) - most - total for logit in row]


@given(ROWS, st.data())
def test_they_are_the_formulas(logits: np.ndarray, data: st.DataObject) -> None:
    reference = data.draw(arrays(np.float32, logits.shape, elements=LOGIT))
    targets = np.array(data.draw(st.lists(st.integers(0, logits.shape[1] - 1), min_size=3, max_size=3)))
    scored = score(logits, targets, reference)
    for row in range(3):
        q, p = probabilities(logits[row]), probabilities(reference[row])
        assert scored.surprise[row] == pytest.approx(-q[targets[row]], rel=1e-12, abs=1e-12)
        assert scored.reference_surprise[row] == pytest.approx(-p[targets[row]], rel=1e-12, abs=1e-12)
        divergence = math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
        assert scored.divergence[row] == pytest.approx(divergence, rel=1e-9, abs=1e-12)
        assert scored.divergence[row] >= 0
        assert scored.same_top[row] == (logits[row].argmax() == reference[row].argmax())


def test_a_divergence_is_distinguishable_above_twice_the_larger_floor() -> None:
    assert not distinguishable(0.0, 0.0, 0.0)  # equal to the bit, in an engine without noise
    assert distinguishable(1e-9, 0.0)
    assert not distinguishable(0.0118, 0.003, 0.006)
    assert distinguishable(0.0122, 0.003, 0.006)


def test_the_divergence_is_of_the_reference_from_the_model() -> None:
    p, q = [0.9, 0.1], [0.5, 0.5]
    scored = score(np.log([q]).astype(np.float32), np.array([0]), np.log([p]).astype(np.float32))
    assert scored.divergence[0] == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-6)
    assert scored.surprise[0] == pytest.approx(math.log(2))


@given(ROWS, st.floats(-1e4, 1e4, width=16))
def test_a_constant_on_all_logits_changes_nothing(logits: np.ndarray, constant: float) -> None:
    exact = (logits * 4).round() / 4  # so that adding is exact
    moved = (exact + np.float32(round(constant))).astype(np.float32)
    scored = score(moved, np.zeros(3, np.int64), exact)
    assert scored.divergence == pytest.approx(np.zeros(3), abs=1e-12)
    assert scored.surprise == pytest.approx(scored.reference_surprise, abs=1e-9)
    assert scored.same_top.all()


def test_a_small_divergence_keeps_its_digits() -> None:
    rng = np.random.default_rng(1)
    base = rng.standard_normal((1, 50_000)).astype(np.float32) * 3
    other = base + rng.standard_normal(base.shape).astype(np.float32) * np.float32(1e-4)
    p, q = probabilities(base[0]), probabilities(other[0])
    exact = math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
    assert 1e-10 < exact < 1e-8
    assert score(other, np.array([0]), base).divergence[0] == pytest.approx(exact, rel=1e-5)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    logits, reference = rng.standard_normal((2, 37, 11)).astype(np.float32)
    targets = rng.integers(0, 11, 37)
    whole = score(logits, targets, reference)
    for numbers in (1, 33, 120):
        monkeypatch.setattr(scores, "BLOCK_NUMBERS", numbers)
        for one, other in zip(score(logits, targets, reference), whole, strict=True):
            assert np.array_equal(one, other)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_values_that_are_not_numbers_are_an_error(value: float, side: int) -> None:
    rows = np.zeros((2, 4, 5), np.float32)
    rows[side, 2, 3] = value
    with pytest.raises(EngineError, match="not numbers"):
        score(rows[0], np.zeros(4, np.int64), rows[1])


# -- the tally ---------------------------------------------------------------------------------------------------------

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
    surprise, reference, divergence, same_top = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
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
