"""`keep_alive` as Ollama's clients write it."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgelm.base.durations import keep_alive_text, parse_keep_alive


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0),
        ("0", 0),
        (90, 90),
        (1.5, 1.5),
        ("90", 90),
        ("5m", 300),
        ("1h30m", 5400),
        ("500ms", 0.5),
        ("24h", 86400),
        (" 10s ", 10),
        (-1, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
        (1e300, 1e9),  # or else a client's date overflows
        pytest.param(10**400, 1e9, id="400 digits"),
        pytest.param(-(10**400), math.inf, id="400 digits less than 0"),
        ("9999999999d", 1e9),
    ],
)
def test_what_it_means(value: object, seconds: float) -> None:
    assert parse_keep_alive(value) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value", ["", "m", "5 m", "5x", "five", "-", True, None, [], {}, math.nan, "nan", math.inf, "inf", "1" * 50]
)
def test_anything_else_names_the_values_that_fit(value: object) -> None:
    with pytest.raises(ValueError, match="5m"):
        parse_keep_alive(value)


@given(st.one_of(st.just(math.inf), st.integers(0, 10**6).map(float)))
def test_the_text_of_a_value_is_read_as_it(seconds: float) -> None:
    assert parse_keep_alive(keep_alive_text(seconds)) == seconds


@given(st.text(max_size=12))
def test_no_text_is_worse_than_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_keep_alive(text) >= 0
