"""The message of Anthropic's API and the events of its stream, for scripted answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import anthropic.types
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter
from starlette.responses import JSONResponse

from edgelm.base.errors import EngineError
from edgelm.jobs.request import AnswerDelta
from edgelm.server.api.dialect import Reply
from edgelm.server.api.dialects import parse_request, reply_to
from edgelm.server.api.errors import as_api_error
from edgelm.text.parse import Content, Reasoning
from tests.server.api.scripted import CONTEXT, call, delta, end, events

EVENT: TypeAdapter[Any] = TypeAdapter(Annotated[RawMessageStreamEvent, None])


def reply(**fields: Any) -> Reply:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]} | fields
    return reply_to("/v1/messages", parse_request("/v1/messages", body), CONTEXT)


def stream(deltas: Sequence[AnswerDelta], **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream; one block is open at a time, and indices count from 0."""
    made = reply(stream=True, **fields)
    found = events(b"".join([made.opening(), *map(made.delta, deltas), made.closing()]))
    index, is_open = -1, False
    for event in found:
        if event["type"] == "content_block_start":
            assert not is_open
            index, is_open = index + 1, True
        if event["type"].startswith("content_block"):
            assert is_open
            assert event["index"] == index
            is_open = event["type"] != "content_block_stop"
        if event["type"] != "ping":
            EVENT.validate_python(event)
    assert not is_open
    assert [event["type"] for event in (found[0], *found[-2:])] == ["message_start", "message_delta", "message_stop"]
    return found


def whole(deltas: Sequence[AnswerDelta], **fields: Any) -> dict[str, Any]:
    message = reply(**fields).whole(deltas)
    Message.model_validate(message)
    return message


ANSWER = [
    delta(Reasoning("think ")),
    delta(Reasoning("hard"), Content("Let me ")),
    delta(Content("look."), *call(0, "weather", '{"a":', "1}")),
    delta(*call(1, "clock")),
    end("tool_calls"),
]


def accumulated(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a stream, put together by the official client."""
    from anthropic.lib.streaming._messages import accumulate_event

    snapshot: Any = None
    json_bufs: dict[int, Any] = {}
    for event in found:
        if event["type"] != "ping":
            snapshot = accumulate_event(
                event=EVENT.validate_python(event), current_snapshot=snapshot, json_bufs=json_bufs
            )
    assert isinstance(snapshot, anthropic.types.Message)
    return snapshot.model_dump()


def test_blocks_are_in_order() -> None:
    found = stream(ANSWER)
    kinds = [event["content_block"]["type"] for event in found if event["type"] == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    deltas = [(event["index"], event["delta"]["type"]) for event in found if event["type"] == "content_block_delta"]
    assert deltas == [
        (0, "thinking_delta"), (0, "thinking_delta"), (0, "signature_delta"), (1, "text_delta"), (1, "text_delta"),
        (2, "input_json_delta"), (2, "input_json_delta"),
    ]  # fmt: skip
    begun = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert begun[2] == {"type": "tool_use", "id": "call_0", "name": "weather", "input": {}}


def test_the_message_of_a_stream_is_the_whole_one() -> None:
    message, streamed = whole(ANSWER), accumulated(stream(ANSWER))
    blocks = [
        {name: block[name] for name in ours}
        for block, ours in zip(streamed["content"], message["content"], strict=True)
    ]
    assert blocks == message["content"]
    assert message["content"][0]["thinking"] == "think hard"
    assert message["content"][0]["signature"]  # clients drop thinking that has none
    assert message["content"][2]["input"] == {"a": 1}
    assert message["content"][3]["input"] == {}
    assert message["stop_reason"] == streamed["stop_reason"] == "tool_use"
    for name, count in message["usage"].items():
        assert streamed["usage"][name] == count


def test_usage_counts_uncached_tokens_apart() -> None:
    expected = {"input_tokens": 10, "cache_read_input_tokens": 20, "cache_creation_input_tokens": 0, "output_tokens": 9}
    assert whole(ANSWER)["usage"] == expected
    found = stream(ANSWER)
    assert found[-2]["usage"] == expected
    assert found[0]["message"]["usage"]["input_tokens"] == 30
    assert found[0]["message"]["content"] == []


@pytest.mark.parametrize(
    ("last", "reason", "stop"),
    [
        (end("stop"), "end_turn", None),
        (end("length"), "max_tokens", None),
        (end("context"), "model_context_window_exceeded", None),
        (end("tool_calls"), "tool_use", None),
        (end("stop", stop="END"), "stop_sequence", "END"),
        (end("stop", stop="<|user|>"), "end_turn", None),  # of the model's template
    ],
)
def test_stop_reasons(last: AnswerDelta, reason: str, stop: str | None) -> None:
    answer = [delta(Content("a")), last]
    message = whole(answer, stop_sequences=["END"])
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
    assert stream(answer, stop_sequences=["END"])[-2]["delta"] == {"stop_reason": reason, "stop_sequence": stop}


def test_an_empty_answer() -> None:
    assert whole([end()])["content"] == []
    assert [event["type"] for event in stream([end()])] == ["message_start", "ping", "message_delta", "message_stop"]


@pytest.mark.parametrize("arguments", ['{"a": 1e999}', '{"a": "\\ud83d"}', '{"a": ' + "[" * 1500 + "]" * 1500 + "}"])
def test_any_arguments_make_a_response(arguments: str) -> None:
    message = whole([delta(*call(0, "weather", arguments)), end("tool_calls")])
    assert JSONResponse(message).status_code == 200


def test_a_call_that_was_cut_off_has_no_input() -> None:
    answer = [delta(*call(0, "weather", '{"a":', complete=False)), end("length")]
    message = whole(answer)
    assert message["content"] == [{"type": "tool_use", "id": "call_0", "name": "weather", "input": {}}]
    assert message["stop_reason"] == "max_tokens"
    assert accumulated(stream(answer))["stop_reason"] == "max_tokens"


def test_every_write_has_whole_events() -> None:
    made = reply(stream=True)
    for written in [made.opening(), *map(made.delta, ANSWER), made.ping(), made.closing()]:
        events(written)


def test_a_failure_is_an_event_in_anthropics_form() -> None:
    made = reply(stream=True)
    made.opening()
    (event,) = events(made.error(as_api_error(EngineError("the engine died", "send it again"))))
    assert event["type"] == "error"
    assert event["error"]["type"] == "overloaded_error"
    assert "the engine died" in event["error"]["message"]


def test_notes_are_shown() -> None:
    tools = [{"type": "web_search_20260209", "name": "web_search"}]
    message = whole([end(notes=("not enforced: pattern",))], tools=tools)
    expected = {"notes": ["not enforced: pattern", "ignored tools: web_search"]}
    assert message["edgelm"] == expected
    assert stream([end(notes=("not enforced: pattern",))], tools=tools)[-2]["edgelm"] == expected
    assert "edgelm" not in whole([end()])
