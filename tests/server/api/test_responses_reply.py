"""The response object and the events of its stream, for scripted answers."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Union, get_args

import pytest
from openai.types.responses import Response, ResponseInProgressEvent, ResponseStreamEvent
from pydantic import Field, TypeAdapter

from edgelm.base.errors import EngineError
from edgelm.jobs.request import AnswerDelta
from edgelm.server.api import responses_reply
from edgelm.server.api.dialects import parse_request, reply_to
from edgelm.server.api.errors import ApiError, as_api_error
from edgelm.server.api.logprobs import FEW_TOKENS
from edgelm.server.api.responses_reply import ResponsesReply, error_event
from edgelm.server.sse import json_pieces
from edgelm.text.parse import Content, Reasoning
from tests.server.api.scripted import CONTEXT, call, delta, end, events

# OpenResponses' schema of a response, 2026-04: all keys are required, some may be null.
REQUIRED = (
    "id object created_at completed_at status incomplete_details model previous_response_id instructions output error"
    " tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs"
    " temperature reasoning user usage max_output_tokens max_tool_calls store background service_tier metadata"
    " safety_identifier prompt_cache_key"
).split()
EVENT: TypeAdapter[Any] = TypeAdapter(
    Annotated[Union[*get_args(get_args(ResponseStreamEvent)[0])], Field(discriminator="type")]
)
TOOLS = [
    {"type": "function", "name": "weather", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "mail", "description": "m", "tools": [{"type": "function", "name": "send"}]},
    {"type": "web_search"},
]


def reply(**fields: Any) -> ResponsesReply:
    request = parse_request("/v1/responses", {"model": "m", "input": "hi"} | fields)
    made = reply_to("/v1/responses", request, CONTEXT)
    assert isinstance(made, ResponsesReply)
    return made


def stream(deltas: Sequence[AnswerDelta], **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream; each is valid for the official client, and its numbers are in order."""
    made = reply(stream=True, **fields)
    found = events(b"".join([made.opening(), *map(made.delta, deltas), made.closing()]))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    open_item: dict[str, Any] | None = None
    indices = itertools.count()
    for event in found:
        EVENT.validate_python(event)
        if "response" in event:
            assert set(REQUIRED) <= event["response"].keys()
            assert event["response"]["id"] == found[0]["response"]["id"]
        elif event["type"] == "response.output_item.added":
            assert open_item is None
            open_item = event["item"]
            assert event["output_index"] == next(indices)
            assert open_item["status"] == "in_progress"
        else:
            assert open_item is not None
            item_id = event["item"]["id"] if "item" in event else event["item_id"]
            assert item_id == open_item["id"]
            if event["type"] == "response.output_item.done":
                open_item = None
    assert open_item is None
    return found


def whole(deltas: Sequence[AnswerDelta], **fields: Any) -> dict[str, Any]:
    response = reply(**fields).whole(deltas)
    assert set(REQUIRED) <= response.keys()
    Response.model_validate(response)
    return response


def types(found: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in found]


ANSWER = [
    delta(Reasoning("think ")),
    delta(Reasoning("hard"), Content("Let me ")),
    delta(Content("look."), *call(0, "weather", '{"a":', "1}")),
    delta(*call(1, "patch", '{"input":', ' "one\\ntwo"}')),
    delta(*call(2, "send", "{}")),
    end("tool_calls", reasoning_tokens=4),
]


def test_a_client_that_asks_for_summaries_reads_the_reasoning_there() -> None:
    deltas = [delta(Reasoning("think ")), delta(Reasoning("hard"), Content("Yes.")), end("stop", reasoning_tokens=2)]
    found = stream(deltas, reasoning={"effort": "low", "summary": "auto"})
    assert types(found)[2:9] == [
        "output_item.added", "reasoning_summary_part.added", *["reasoning_summary_text.delta"] * 2,
        "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done",
    ]  # fmt: skip
    thought = found[-1]["response"]["output"][0]
    assert (thought["summary"], thought["content"]) == ([{"type": "summary_text", "text": "think hard"}], [])
    assert whole(deltas, reasoning={"summary": "auto"})["output"][0]["summary"] == thought["summary"]


def test_events_are_in_order() -> None:
    found = stream(ANSWER, tools=TOOLS)
    item = ["output_item.added", "output_item.done"]
    assert types(found) == [
        "created", "in_progress",
        item[0], "content_part.added", *["reasoning_text.delta"] * 2, "reasoning_text.done", "content_part.done",
        item[1],
        item[0], "content_part.added", *["output_text.delta"] * 2, "output_text.done", "content_part.done", item[1],
        item[0], *["function_call_arguments.delta"] * 2, "function_call_arguments.done", item[1],
        item[0], "custom_tool_call_input.delta", "custom_tool_call_input.done", item[1],
        item[0], "function_call_arguments.delta", "function_call_arguments.done", item[1],
        "completed",
    ]  # fmt: skip
    output = found[-1]["response"]["output"]
    assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == output
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "think hard"}]
    assert output[1]["content"][0]["text"] == "Let me look."
    assert (output[2]["name"], output[2]["call_id"], output[2]["arguments"]) == ("weather", "call_0", '{"a":1}')
    assert (output[3]["type"], output[3]["input"]) == ("custom_tool_call", "one\ntwo")
    assert (output[4]["name"], output[4]["namespace"]) == ("send", "mail")
    assert {entry["status"] for entry in output} == {"completed"}


def test_a_whole_response_is_that_of_the_stream() -> None:
    response = whole(ANSWER, tools=TOOLS)
    streamed = stream(ANSWER, tools=TOOLS)[-1]["response"]

    def plain(value: dict[str, Any]) -> Any:
        items = [{name: item[name] for name in item if name != "id"} for item in value["output"]]
        return {**value, "id": 0, "created_at": 0, "completed_at": 0, "output": items}

    assert plain(response) == plain(streamed)
    assert response["usage"] == {
        "input_tokens": 30,
        "input_tokens_details": {"cached_tokens": 20, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 39,
    }
    assert response["status"] == "completed"
    assert response["completed_at"] >= response["created_at"]


def test_every_write_has_whole_events() -> None:
    made = reply(stream=True, tools=TOOLS)
    for written in [made.opening(), *map(made.delta, ANSWER), made.ping(), made.closing()]:
        events(written)


@pytest.mark.parametrize("reason", ["length", "context"])
def test_an_answer_that_was_cut_off(reason: Any) -> None:
    found = stream([delta(Content("a")), end(reason)], max_output_tokens=1)
    assert types(found)[-1] == "incomplete"
    response = found[-1]["response"]
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["max_output_tokens"] == 1


def test_a_call_that_was_cut_off_is_incomplete() -> None:
    response = whole([delta(*call(0, "weather", '{"a":', complete=False)), end("length")], tools=TOOLS)
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["arguments"] == '{"a":'


def test_an_empty_answer_has_no_item() -> None:
    assert stream([end()])[-1]["response"]["output"] == []


def test_text_behind_a_call_is_a_new_message() -> None:
    output = whole([delta(Content("a"), *call(0, "weather", "{}"), Content("b")), end()], tools=TOOLS)["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    assert [item["content"][0]["text"] for item in (output[0], output[2])] == ["a", "b"]


def test_functions_of_one_name_keep_their_own() -> None:
    tools = [
        {"type": "namespace", "name": name, "description": "", "tools": [{"type": "function", "name": "search"}]}
        for name in ("a", "b")
    ]
    (request,) = parse_request("/v1/responses", {"model": "m", "input": "x", "tools": tools}).answer_requests()
    shown = request.tools[1]["function"]["name"]
    (item,) = whole([delta(*call(0, shown, "{}")), end("tool_calls")], tools=tools)["output"]
    assert (item["name"], item["namespace"]) == ("search", "b")


def test_encrypted_reasoning_returns_as_it_was() -> None:
    answer = [delta(Reasoning("naïve")), delta(Content("x")), end()]
    assert "encrypted_content" not in whole(answer)["output"][0]
    item = whole(answer, include=["reasoning.encrypted_content"], store=False)["output"][0]
    kept = {name: item[name] for name in ("type", "id", "summary", "encrypted_content")}
    body = {"model": "m", "input": [kept, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]}
    (request,) = parse_request("/v1/responses", body).answer_requests()
    assert request.messages[0] == {"role": "assistant", "content": "x", "reasoning_content": "naïve"}


def test_the_request_is_echoed() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    response = whole(
        [end()],
        tools=TOOLS,
        tool_choice={"type": "function", "name": "weather"},
        text={"format": form, "verbosity": "low"},
        instructions="be brief",
        metadata={"a": "b"},
        truncation="auto",
        temperature=0,
        top_p=0.5,
        store=False,
        user="u",
        reasoning={"effort": "low", "summary": "auto"},
        parallel_tool_calls=False,
    )
    nothing = {"description": None, "strict": None}
    assert response["tools"] == [nothing | TOOLS[0], *TOOLS[1:]]
    assert response["tool_choice"] == {"type": "function", "name": "weather"}
    assert response["text"] == {"format": nothing | form, "verbosity": "low"}
    expected = {
        "instructions": "be brief", "metadata": {"a": "b"}, "truncation": "auto", "temperature": 0, "top_p": 0.5,
        "store": False, "user": "u", "reasoning": {"effort": "low", "summary": "auto"}, "parallel_tool_calls": False,
    }  # fmt: skip
    assert {name: response[name] for name in expected} == expected
    plain = whole([end()])
    assert plain["text"] == {"format": {"type": "text"}}
    assert plain["tool_choice"] == "auto"
    assert plain["store"] is True


def test_log_probabilities() -> None:
    answer = [
        delta(Reasoning("z"), text="z"),
        delta(text="a"),  # held back until it is decided
        delta(Content("ab"), text="b"),
        delta(Content("c"), text="c"),
        end(),
    ]
    found = stream(answer, top_logprobs=2)
    deltas = [event["logprobs"] for event in found if event["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in logprobs] for logprobs in deltas] == [["a", "b"], ["c"]]
    part = found[-1]["response"]["output"][1]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["a", "b", "c"]
    assert part["logprobs"][0]["top_logprobs"][1]["logprob"] == -1.0
    assert whole(answer)["output"][1]["content"][0]["logprobs"] == []


def test_a_ping_is_an_event_that_the_client_accepts() -> None:
    tools = [{"type": "function", "name": "f", "description": "long " * 1000}]
    made = reply(stream=True, tools=tools, instructions="long " * 1000, metadata={"k": "v" * 500})
    made.opening()
    ping = made.ping()
    (event,) = events(ping)
    assert event["type"] == "response.in_progress"
    assert event["sequence_number"] == 2
    assert set(REQUIRED) <= event["response"].keys()
    ResponseInProgressEvent.model_validate(event)
    assert len(ping) < 1500


def test_hosted_tools_are_shown_while_they_are_small() -> None:
    function = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": None}
    small, large = {"type": "web_search"}, {"type": "mcp", "x": "x" * 70_000}
    response = whole([end()], tools=[small, large, function])
    assert response["tools"] == [small, function]
    assert response["edgelm"]["notes"] == ["ignored tools: mcp, web_search"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\ud83d"}', "a?"),
        ("[" * 100_000, "[" * 100_000),
        ('{"input": 1e999}', str(sys.float_info.max)),
        ('{"input": "cut', '{"input": "cut'),
    ],
    ids=["half a character", "deep", "infinite", "cut"],
)
def test_odd_arguments_of_a_custom_tool(arguments: str, text: str) -> None:
    found = stream([delta(*call(0, "patch", arguments)), end("tool_calls")], tools=TOOLS)
    assert found[-1]["response"]["output"][0]["input"] == text


def test_a_failure_keeps_what_there_is() -> None:
    made = reply(stream=True)
    made.opening()
    made.delta(delta(Content("half")))
    *_, done, event = events(made.error(as_api_error(EngineError("the engine died", "send it again"))))
    EVENT.validate_python(event)
    response = event["response"]
    assert (done["type"], event["type"]) == ("response.output_item.done", "response.failed")
    assert response["status"] == "failed"
    assert response["error"]["code"] == "server_error"
    assert "the engine died" in response["error"]["message"]
    assert response["output"][0]["content"][0]["text"] == "half"
    assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ApiError(429, "queue_full", "x"), "rate_limit_exceeded"),
        (ApiError(400, "context_length_exceeded", "x"), "context_length_exceeded"),
        (ApiError(503, "engine_died", "x"), "server_error"),
        (ApiError(400, "invalid_value", "x"), "invalid_prompt"),
    ],
)
def test_codes_of_failures_are_those_that_clients_know(error: ApiError, code: str) -> None:
    made = reply(stream=True)
    made.opening()
    (event,) = events(made.error(error))
    assert event["response"]["error"]["code"] == code
    (event,) = events(error_event(error))  # of the front
    EVENT.validate_python(event)
    assert event["code"] == code


def test_notes_are_shown() -> None:
    response = whole([end(notes=("not enforced: pattern",))], tools=TOOLS)
    assert response["edgelm"]["notes"] == ["not enforced: pattern", "ignored tools: web_search"]
    assert "edgelm" not in whole([end()])


def test_log_probabilities_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four events at the end repeat all of them: a long answer's stopped every other stream for half a second."""
    lengths = []
    dumps = responses_reply._json
    monkeypatch.setattr(responses_reply, "_json", lambda value: lengths.append(len(text := dumps(value))) or text)
    made = reply(stream=True, top_logprobs=2)
    begun = b"".join([made.opening(), *(made.delta(delta(Content("a"), text="a")) for _ in range(1000))])
    lengths.clear()
    ended = made.delta(end())
    assert max(lengths) < 5000  # of 100,000
    deltas = [event for event in events(begun) if event["type"] == "response.output_text.delta"]
    entries = [entry for event in deltas for entry in event["logprobs"]]
    done, part, item, response = events(ended)
    assert len(entries) == 1000
    assert done["logprobs"] == part["part"]["logprobs"] == item["item"]["content"][0]["logprobs"] == entries
    assert response["response"]["output"][0]["content"][0]["logprobs"] == entries


@pytest.mark.parametrize("count", [FEW_TOKENS, FEW_TOKENS + 1])
def test_a_whole_response_makes_no_events(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(responses_reply, "_json")
    response = reply(top_logprobs=2).whole([*(delta(Content("a"), text="a") for _ in range(count)), end()])
    assert isinstance(response["output"][0]["content"][0]["logprobs"], list) == (count <= FEW_TOKENS)
    entries = json.loads(b"".join(json_pieces(response)))["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == ["a"] * count
