"""Surprise and divergence against sums in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgelm.errors import EngineError
from edgelm.evaluation import scores
from edgelm.evaluation.scores import score

LOGIT = st.floats(-300, 300, width=32)
ROWS = st.integers(2, 9).flatmap(lambda vocab: arrays(np.float32, (3, vocab), elements=LOGIT))


def probabilities(row: np.ndarray) -> list[float]:
    """Return ln p of each token, by sums that lose nothing."""
    most = max(map(float, row))
    total = math.log(math.fsum(math.exp(float(each) - most) for each in row))
    return [float(each) - most - total for each in row]


@given(ROWS, st.data())
def test_they_are_the_formulas(logits: np.ndarray, data: st.DataObject) -> None:
    reference = data.draw(arrays(np.float32, logits.shape, elements=LOGIT))
    targets = np.array(data.draw(st.lists(st.integers(0, logits.shape[1] - 1), min_size=3, max_size=3)))
    found = score(logits, targets, reference)
    for row in range(3):
        q, p = probabilities(logits[row]), probabilities(reference[row])
        assert found.surprise[row] == pytest.approx(-q[targets[row]], rel=1e-12, abs=1e-12)
        assert found.reference_surprise[row] == pytest.approx(-p[targets[row]], rel=1e-12, abs=1e-12)
        divergence = math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
        assert found.divergence[row] == pytest.approx(divergence, rel=1e-9, abs=1e-12)
        assert found.divergence[row] >= 0
        assert found.same_top[row] == (logits[row].argmax() == reference[row].argmax())


def test_the_divergence_is_of_the_reference_from_the_model() -> None:
    p, q = [0.9, 0.1], [0.5, 0.5]
    found = score(np.log([q]).astype(np.float32), np.array([0]), np.log([p]).astype(np.float32))
    assert found.divergence[0] == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-6)
    assert found.surprise[0] == pytest.approx(math.log(2))


@given(ROWS, st.floats(-1e4, 1e4, width=16))
def test_a_constant_on_all_logits_changes_nothing(logits: np.ndarray, constant: float) -> None:
    exact = (logits * 4).round() / 4  # so that adding is exact
    moved = (exact + np.float32(round(constant))).astype(np.float32)
    found = score(moved, np.zeros(3, np.int64), exact)
    assert found.divergence == pytest.approx(np.zeros(3), abs=1e-12)
    assert found.surprise == pytest.approx(found.reference_surprise, abs=1e-9)
    assert found.same_top.all()


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
