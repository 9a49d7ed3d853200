"""The statistics of answers, compared with a plain loop over them."""

from __future__ import annotations

import json
from datetime import date, datetime, time, timedelta
from statistics import median
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from edgelm.chats.history import Chat, Message
from edgelm.chats.statistics import MIN_NEW, NUM_DAYS, summarize
from edgelm.chats.store import Store

TODAY = date(2026, 3, 14)

counts = st.none() | st.integers(0, 5000)
answers = st.lists(
    st.tuples(
        st.sampled_from(["starter", "qwen3:4b", ""]),
        st.integers(0, 40),  # days ago
        st.fixed_dictionaries(
            {
                "prompt_tokens": counts,
                "cached_tokens": counts,
                "completion_tokens": counts,
                "drafted": counts,
                "accepted": counts,
                "first_token_ms": st.none() | st.floats(1, 1e5),
                "tokens_per_second": st.none() | st.floats(0.1, 500),
            }
        ),
    ),
    max_size=30,
)


def at_noon(days_ago: int) -> float:
    return datetime.combine(TODAY - timedelta(days=days_ago), time(12)).timestamp()


def row(model: str, days_ago: int, values: dict[str, Any]) -> tuple[str, float, str]:
    """Return an answer as it is saved: without what the endpoint did not tell."""
    return model, at_noon(days_ago), json.dumps({name: value for name, value in values.items() if value is not None})


@given(answers)
def test_the_sums_are_those_of_a_plain_loop(given_answers: list[tuple[str, int, dict[str, Any]]]) -> None:
    statistics = summarize([row(*answer) for answer in given_answers], TODAY)
    counted = [
        (model, days, {name: value or 0 for name, value in values.items()})
        for model, days, values in given_answers
        if values["completion_tokens"]
    ]

    def cached(values: dict[str, Any]) -> int:
        return int(min(values["cached_tokens"], values["prompt_tokens"]))

    assert statistics.total.answers == len(counted)
    assert statistics.total.written == sum(values["completion_tokens"] for _, _, values in counted)
    assert statistics.total.read + statistics.total.cached == sum(values["prompt_tokens"] for _, _, values in counted)
    assert statistics.total.cached == sum(cached(values) for _, _, values in counted)
    assert {figures.model for figures in statistics.models} == {model for model, _, _ in counted}
    for figures in statistics.models:
        own = [values for model, _, values in counted if model == figures.model]
        assert figures.sums.written == sum(values["completion_tokens"] for values in own)
        speeds = [values["tokens_per_second"] for values in own if values["tokens_per_second"]]
        assert figures.tokens_per_second == (median(speeds) if speeds else None)
        measured = [
            1000 * (values["prompt_tokens"] - cached(values)) / values["first_token_ms"]
            for values in own
            if values["prompt_tokens"] - cached(values) >= MIN_NEW and values["first_token_ms"]
        ]
        saved = sum(map(cached, own)) / median(measured) if measured else None
        assert figures.saved_s == saved
    assert [day.day for day in statistics.days] == [TODAY - timedelta(days=i) for i in range(NUM_DAYS - 1, -1, -1)]
    for day in statistics.days:
        own = [values for _, days, values in counted if TODAY - timedelta(days=days) == day.day]
        assert day.sums.answers == len(own)
        assert sum(day.written.values()) == day.sums.written == sum(values["completion_tokens"] for values in own)


def test_the_share_of_drafts_is_at_most_all_tokens() -> None:
    values = {"completion_tokens": 10, "accepted": 12, "drafted": 40}
    assert summarize([row("starter", 0, values)], TODAY).total.drafted_share == 1.0


def test_figures_that_are_no_figures_are_unknown() -> None:
    good = '{"completion_tokens": 3, "prompt_tokens": 100, "first_token_ms": 10.0}'
    odd = [
        '{"completion_tokens": Infinity, "prompt_tokens": NaN}',
        '{"completion_tokens": 4, "prompt_tokens": NaN, "cached_tokens": 1e999, "drafted": -5, "accepted": "x"}',
        '{"completion_tokens": 1, "prompt_tokens": 99, "first_token_ms": 5e-324, "tokens_per_second": Infinity}',
        '{"completion_tokens": true, "prompt_tokens": []}',
        "[]",
        "none",
    ]
    statistics = summarize([("starter", at_noon(0), text) for text in [good, *odd]], TODAY)
    assert (statistics.total.answers, statistics.total.written, statistics.total.read) == (3, 8, 199)
    (figures,) = statistics.models
    assert (figures.prompt_speed, figures.tokens_per_second) == (10_000, None)


def test_answers_of_deleted_chats_and_those_without_figures_are_left_out() -> None:
    store = Store(None)
    for deleted, stats in ((None, '{"completion_tokens": 3}'), (5.0, '{"completion_tokens": 5}'), (None, "")):
        chat = Chat(deleted=deleted)
        store.put_chat(chat)
        store.put_message(Message(chat=chat.id, parent=None, role="assistant", model="starter", stats=stats))
    assert summarize(store.figures(), TODAY).total.written == 3
    store.close()
