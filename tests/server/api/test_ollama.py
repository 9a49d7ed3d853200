"""Ollama's requests in our words, and its answers: fields, names, units, errors."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from edgelm.jobs.request import AnswerRequest
from edgelm.server.api.dialect import ApiRequest
from edgelm.server.api.dialects import error_body_of, parse_request, reply_to
from edgelm.server.api.errors import ApiError
from edgelm.server.api.ollama_reply import OllamaReply, loaded_reply
from edgelm.text.parse import Content, Reasoning
from tests.server.api.scripted import CONTEXT, call, delta, end

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def parsed(path: str = "/api/chat", **fields: Any) -> Any:
    prompt = {"messages": [USER]} if path == "/api/chat" else {"prompt": "hi"}
    return parse_request(path, {"model": "m"} | prompt | fields)


def answer_request(path: str = "/api/chat", **fields: Any) -> AnswerRequest:
    (request,) = parsed(path, **fields).answer_requests()
    return request


def error_of(path: str = "/api/chat", **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parsed(path, **fields)
    return caught.value


def lines(written: bytes) -> list[dict[str, Any]]:
    assert written.endswith(b"\n") or not written
    return [json.loads(line) for line in written.splitlines()]


def test_a_stream_is_the_default() -> None:
    assert parsed().streamed
    assert parsed(stream=None).streamed
    assert not parsed(stream=False).streamed


def test_options() -> None:
    options = {
        "num_predict": 5, "temperature": 0, "top_k": 4.0, "top_p": 0.5, "min_p": 0.1, "seed": 3, "stop": ["x"],
        "repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "num_ctx": 4096, "num_gpu": 1,
    }  # fmt: skip
    request = answer_request(options=options)
    assert request.stop == ("x",)
    assert dict(request.sampling) == {
        "max_tokens": 5, "temperature": 0, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "seed": 3,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
    }  # fmt: skip
    endless = answer_request(options={"num_predict": -1, "seed": -1})
    assert dict(endless.sampling) == {}, "no limit, and a seed of its own"
    assert answer_request(options=None) == answer_request()


@pytest.mark.parametrize("format_", [None, "", "json", {"type": "object"}])
def test_forms_of_the_answer(format_: Any) -> None:
    grammar = answer_request(format=format_).grammar
    kinds = {"json": "json_object"} if isinstance(format_, str) else {}
    expected = "json_schema" if isinstance(format_, dict) else kinds.get(format_)
    assert (grammar.kind if grammar else None) == expected


@pytest.mark.parametrize(
    ("think", "kwargs"),
    [
        (None, {}),
        (True, {"enable_thinking": True, "thinking": True}),
        (False, {"enable_thinking": False, "thinking": False}),
        ("low", {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}),
    ],
)
def test_thinking(think: Any, kwargs: dict[str, Any]) -> None:
    assert answer_request(think=think).template_kwargs == kwargs


def test_results_of_tools_find_their_calls() -> None:
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("one", "two")]
    messages = [
        USER,
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls},
        {"role": "tool", "tool_name": "two", "content": "2"},
        {"role": "tool", "content": "1"},  # as Home Assistant sends it
        {"role": "tool", "tool_call_id": "own", "content": "3"},
    ]
    request = answer_request(messages=messages, tools=[TOOL])
    _, said, *results = request.messages
    assert said["reasoning_content"] == "hm"
    assert [json.loads(c["function"]["arguments"]) for c in said["tool_calls"]] == [{"a": 1}] * 2, (
        "a text for templates"
    )
    ids = [c["id"] for c in said["tool_calls"]]
    assert [(result.get("name"), result["tool_call_id"]) for result in results] == [
        ("two", ids[1]),
        ("one", ids[0]),
        (None, "own"),
    ]


def test_a_result_with_an_id_has_the_name_of_its_own_call() -> None:
    calls = [{"id": f"id-{name}", "function": {"name": name}} for name in ("one", "two")]
    results = [{"role": "tool", "tool_call_id": f"id-{name}", "content": ""} for name in ("two", "one")]
    request = answer_request(messages=[USER, {"role": "assistant", "tool_calls": calls}, *results], tools=[TOOL])
    assert [result["name"] for result in request.messages[2:]] == ["two", "one"]


def test_many_calls_and_results_take_no_quadratic_time() -> None:
    names = [f"f{index}" for index in range(12_000)]
    calls = [{"function": {"name": name}} for name in names]
    results = [{"role": "tool", "tool_name": name} for name in reversed(names[-4000:])]
    nameless = [{"role": "tool", "content": ""}] * 90
    began = time.process_time()
    request = answer_request(messages=[USER, {"role": "assistant", "tool_calls": calls}, *results, *nameless])
    assert time.process_time() - began < 2, "it was 13 s; now 0.1 s"
    assert [result["name"] for result in request.messages[-2:]] == names[88:90]


def test_generate_in_its_four_forms() -> None:
    chat = answer_request("/api/generate", system="Be brief")
    assert [message["role"] for message in chat.messages] == ["system", "user"]
    raw = answer_request("/api/generate", raw=True, system="not used")
    assert (raw.prompt, raw.suffix, raw.messages) == ("hi", None, ())
    middle = answer_request("/api/generate", suffix="end")
    assert (middle.prompt, middle.suffix) == ("hi", "end")
    start = answer_request("/api/generate", prompt="", suffix="end")
    assert (start.prompt, start.suffix) == ("", "end")


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/api/chat", {"messages": []}), ("/api/chat", {"messages": None}), ("/api/generate", {"prompt": ""})],
)
def test_without_a_prompt_there_is_only_loading(path: str, fields: dict[str, Any]) -> None:
    request = parsed(path, keep_alive="5m", **fields)
    assert request.only_loads
    assert request.keep_alive == 300
    assert loaded_reply(request, "load")["done_reason"] == "load"
    assert not parsed(path).only_loads


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/api/generate", {"images": ["aGk="], "raw": True}, "images"),
        ("/api/generate", {"images": ["aGk="], "suffix": "x"}, "images"),
        ("/api/generate", {"context": [1, 2]}, "context"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, "template"),
        ("/api/chat", {"options": {"mirostat": 2}}, "mirostat"),
        ("/api/chat", {"options": {"temperature": "hot"}}, "options.temperature"),
        ("/api/chat", {"format": "xml"}, "format"),
        ("/api/chat", {"tools": [{"type": "function"}]}, "tools.0"),
        ("/api/chat", {"keep_alive": "soon"}, "keep_alive"),
        ("/api/chat", {"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    ],
)
def test_errors_name_the_field(path: str, fields: dict[str, Any], param: str) -> None:
    error = error_of(path, **fields)
    assert (error.status, error.body["error"]["param"]) == (400, param)
    assert error_body_of(path, error) == {"error": str(error)}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}),
        ("/api/generate", {"prompt": "x", "images": ["aGk="]}),
    ],
)
def test_pictures_come_before_the_text(path: str, fields: dict[str, Any]) -> None:
    (message,) = answer_request(path, **fields).messages
    picture = {"type": "image_url", "image_url": {"url": "data:;base64,aGk="}}
    assert message["content"] == [picture, {"type": "text", "text": "x"}]


@pytest.mark.parametrize("fields", [{"context": []}, {"template": ""}, {"images": []}, {"options": {"mirostat": 0}}])
def test_fields_that_request_nothing_are_fine(fields: dict[str, Any]) -> None:
    assert answer_request("/api/generate", **fields)


def reply(request: ApiRequest) -> OllamaReply:
    made = reply_to("/api/chat", request, CONTEXT)
    assert isinstance(made, OllamaReply)
    return made


DELTAS = [
    delta(Reasoning("so"), text="so"),
    delta(Content("he"), text="he"),
    delta(*call(0, "look", '{"a":', " 1}")),
    end("tool_calls", *call(1, "cut", '{"b"', complete=False)),
]


def test_lines_and_the_whole_say_the_same() -> None:
    stream = reply(parsed(tools=[TOOL]))
    got = lines(stream.opening() + b"".join(map(stream.delta, DELTAS)) + stream.closing())
    assert [line["done"] for line in got] == [False, False, False, True]
    assert [line["message"].get("thinking", "") for line in got] == ["so", "", "", ""]
    assert [line["message"]["content"] for line in got] == ["", "he", "", ""]
    (made,) = got[2]["message"]["tool_calls"]
    assert made["function"] == {"index": 0, "name": "look", "arguments": {"a": 1}}
    whole = reply(parsed(tools=[TOOL], stream=False)).whole(DELTAS)
    assert whole["message"] == {"role": "assistant", "content": "he", "thinking": "so", "tool_calls": [made]}
    times = {"created_at", "total_duration"}
    end_of_stream = {name: value for name, value in got[-1].items() if name not in {*times, "message"}}
    assert end_of_stream == {name: value for name, value in whole.items() if name not in {*times, "message"}}
    assert (whole["done_reason"], whole["prompt_eval_count"], whole["eval_count"]) == ("stop", 30, 9)


def test_durations_are_nanoseconds() -> None:
    from dataclasses import replace

    last = end("length")
    assert last.stats
    last = replace(last, stats=replace(last.stats, prompt_ms=2.5, decode_ms=1000))
    whole = reply(parsed("/api/generate")).whole([delta(Content("x")), last])
    assert (whole["prompt_eval_duration"], whole["eval_duration"]) == (2_500_000, 1_000_000_000)
    assert (whole["response"], whole["done_reason"]) == ("x", "length")


def test_log_probabilities_stand_beside_their_text() -> None:
    stream = reply(parsed(logprobs=True, top_logprobs=1))
    first, last = lines(stream.delta(delta(Content("hi"), text="hi")) + stream.delta(end()))
    assert [token["token"] for token in first["logprobs"]] == ["h", "i"]
    assert first["logprobs"][0].keys() == {"token", "logprob", "bytes", "top_logprobs"}
    assert "logprobs" not in last


def test_a_context_that_is_smaller_than_num_ctx_is_noted() -> None:
    smaller = reply(parsed(options={"num_ctx": 32_768})).whole([end()])
    assert smaller["edgelm"]["notes"] == [
        "num_ctx is 32,768, and the context holds 512 tokens: start edgelm with --ctx"
    ]
    assert "edgelm" not in reply(parsed(options={"num_ctx": 512})).whole([end()])


def test_a_failure_and_a_ping_are_lines() -> None:
    stream = reply(parsed())
    assert lines(stream.error(ApiError(503, "engine_died", "gone"))) == [{"error": "gone"}]
    (ping,) = lines(stream.ping())
    assert (ping["message"]["content"], ping["done"]) == ("", False)
