"""Which bodies are taken, how their fields reach the sampler, and which are refused by name."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgelm.config import Settings
from edgelm.core import SamplingParams
from edgelm.errors import RequestError
from edgelm.server.api_error import ApiError
from edgelm.server.chat_request import ChatRequest, parse_chat
from edgelm.server.engine_app import sampling_params

MINIMAL = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
SERVER = Settings(temperature=0.5, top_k=7, top_p=0.6, min_p=0.1, seed=9, max_tokens=77)
STOP_IDS = frozenset({2})


def parse(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps(MINIMAL | fields).encode())


def params(**fields: Any) -> SamplingParams:
    return sampling_params(parse(**fields), SERVER, STOP_IDS)


def refused(**fields: Any) -> dict[str, Any]:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    error = caught.value.body["error"]
    assert error["type"] == "invalid_request_error"
    return error


def test_every_field_arrives() -> None:
    found = params(
        max_tokens=5,
        temperature=0.25,
        top_p=0.75,
        top_k=3,
        min_p=0.125,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"4": -100, "17": 2.5},
        logprobs=True,
        top_logprobs=4,
        seed=12345,
    )
    assert asdict(found) == {
        "max_tokens": 5,
        "temperature": 0.25,
        "top_k": 3,
        "top_p": 0.75,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": ((4, -100.0), (17, 2.5)),
        "seed": 12345,
        "choice": 0,
        "num_logprobs": 4,
        "stop_ids": STOP_IDS,
    }


def test_what_is_not_said_is_as_the_server_is_set() -> None:
    found = params()
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.5, 7, 0.6, 0.1)
    assert (found.seed, found.max_tokens, found.num_logprobs) == (9, 77, None)
    assert params(temperature=None, top_k=None, seed=None, logprobs=None) == found


def test_zero_is_said() -> None:
    found = params(temperature=0, top_k=0, min_p=0, seed=0)
    assert (found.temperature, found.top_k, found.min_p, found.seed) == (0, 0, 0, 0)


def test_max_completion_tokens_is_another_name() -> None:
    assert params(max_completion_tokens=6).max_tokens == 6
    assert refused(max_tokens=6, max_completion_tokens=6)["param"] == "max_tokens"


def test_without_any_seed_each_request_has_its_own() -> None:
    unset = Settings()
    assert sampling_params(parse(), unset, STOP_IDS).seed != sampling_params(parse(), unset, STOP_IDS).seed


def test_a_negative_seed_is_taken() -> None:
    assert params(seed=-1).seed == 2**64 - 1


def test_logprobs_alone_have_no_alternatives() -> None:
    assert params(logprobs=True).num_logprobs == 0
    assert params(logprobs=False).num_logprobs is None


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1},
        {"repetition_penalty": 0},
        {"max_tokens": 0},
        {"logprobs": True, "top_logprobs": 21},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"5": 101}},
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises((RequestError, ApiError)):
        params(**fields)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"typo": 1}, "unknown_parameter", "typo"),
        ({"typo": None}, "unknown_parameter", "typo"),
        ({"tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
        ({"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
        ({"store": True}, "unsupported_parameter", "store"),
        ({"store": 0}, "unsupported_parameter", "store"),
        ({"n": 2}, "unsupported_value", "n"),
        ({"temperature": "0.5"}, "invalid_type", "temperature"),
        ({"temperature": True}, "invalid_type", "temperature"),
        ({"max_tokens": 1.5}, "invalid_type", "max_tokens"),
        ({"stream": 1}, "invalid_type", "stream"),
        ({"seed": 2**64}, "invalid_type", "seed"),
        ({"messages": []}, "invalid_type", "messages"),
        ({"messages": "hello"}, "invalid_type", "messages"),
        ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages.0.content"),
        ({"messages": [{"role": "robot", "content": ""}]}, "invalid_type", "messages.0.role"),
        ({"messages": [{"role": "user", "content": "", "typo": 1}]}, "unknown_parameter", "messages.0.typo"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "unsupported_parameter",
            "messages.0.tool_calls",
        ),
        ({"model": ""}, "invalid_type", "model"),
        ({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ],
)
def test_refused_fields_are_named(fields: dict[str, Any], code: str, param: str) -> None:
    error = refused(**fields)
    assert (error["code"], error["param"]) == (code, param)
    assert param in error["message"]


def test_an_image_is_refused() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    assert refused(messages=[{"role": "user", "content": [image]}])["param"].startswith("messages.0.content")


def test_fields_that_ask_for_nothing_are_taken() -> None:
    parse(
        tools=[], tool_choice="auto", response_format={"type": "text"}, store=False, n=1, user="me", metadata={"a": "b"}
    )
    message = {"role": "assistant", "content": "hi", "tool_calls": None, "refusal": None, "annotations": []}
    assert parse(messages=[message]).messages[0].for_template() == {"role": "assistant", "content": "hi"}


def test_messages_reach_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = parse(
        messages=[{"role": "developer", "content": "rules"}, {"role": "user", "name": "me", "content": parts}]
    ).messages
    assert [each.for_template() for each in found] == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "ab", "name": "me"},
    ]


def test_stops_are_a_list() -> None:
    assert parse(stop="x").stops == ["x"]
    assert parse(stop=["x", "y"]).stops == ["x", "y"]
    assert parse().stops == []


def test_the_past_of_a_shortened_conversation() -> None:
    assert parse().past == parse(edgelm=None).past == parse(edgelm={}).past == []
    said = {"role": "assistant", "content": [{"type": "text", "text": "hello"}], "refusal": None}
    assert [each.for_template() for each in parse(edgelm={"past": [said]}).past] == [
        {"role": "assistant", "content": "hello"}
    ]
    assert refused(edgelm={"past": [{"role": "tool", "content": ""}]})["param"] == "edgelm.past.0.role"
    assert refused(edgelm={"past": [{"role": "user", "content": "", "audio": {}}]})["param"] == "edgelm.past.0.audio"
    assert refused(edgelm={"future": []})["param"] == "edgelm.future"
    assert refused(edgelm=[])["param"] == "edgelm"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"1", b"[" * 100_000, b'{"model": \xff}', b'{"a": 1' + b"0" * 5000])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(body)
    assert caught.value.status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*ChatRequest.model_fields, "tools", "response_format", "modalities", "odd"])


@given(st.dictionaries(NAMES, JSON, max_size=6), st.booleans())
def test_any_json_is_taken_or_refused(fields: dict[str, Any], minimal: bool) -> None:
    error = None
    try:
        found = parse_chat(json.dumps((MINIMAL if minimal else {}) | fields).encode())
        sampling_params(found, SERVER, STOP_IDS)
    except ApiError as refused:
        error = refused
    except RequestError:
        pass
    if error is not None:
        assert error.status == 400
        json.dumps(error.body, allow_nan=False)
