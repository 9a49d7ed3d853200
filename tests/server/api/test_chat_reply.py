"""Calls, drafted text and counts in the answers of /v1/chat/completions, streamed and whole."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from edgelm.engine.core import Sampled
from edgelm.jobs.request import AnswerDelta
from edgelm.server.api.dialects import parse_request, reply_to
from edgelm.server.api.logprobs import FEW_TOKENS, chat_logprobs
from edgelm.server.sse import json_pieces
from edgelm.text.parse import Content, Reasoning
from tests.server.api.scripted import CONTEXT, call, delta, end

FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CUSTOM = [{"type": "custom", "custom": {"name": "f"}}]


def reply(*deltas: AnswerDelta, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the whole answer, and the chunks of a stream; OpenAI's types take both."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    path = "/v1/chat/completions"
    request = parse_request(path, body)
    whole = reply_to(path, request, CONTEXT).whole(deltas)
    ChatCompletion.model_validate(whole)
    stream = reply_to(path, request, CONTEXT)
    written = stream.opening() + b"".join(map(stream.delta, deltas)) + stream.closing()
    lines = written.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line[6:]) for line in lines[:-2]]
    for chunk in chunks if fields.get("tools") != CUSTOM else ():  # the client's types know no streamed custom call
        ChatCompletionChunk.model_validate(chunk)
    return whole, chunks


def shown(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks[1:]]


def test_the_first_delta_of_a_call_has_its_name_and_the_later_ones_its_arguments() -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    parts = [Content("Well"), *call(0, "f", '{"a": ', "1}"), *call(1, "f", "{}")]
    whole, chunks = reply(*(delta(part) for part in parts), end("tool_calls"), tools=tools)
    begin = [
        {"index": i, "id": f"call_{i}", "type": "function", "function": {"name": "f", "arguments": ""}} for i in (0, 1)
    ]
    assert shown(chunks) == [
        {"content": "Well"},
        {"tool_calls": [begin[0]]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {"tool_calls": [begin[1]]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]
    (choice,) = whole["choices"]
    assert [c["function"]["arguments"] for c in choice["message"]["tool_calls"]] == ['{"a": 1}', "{}"]
    assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    alone, _ = reply(end("tool_calls", *call(0, "f", "{}")), tools=tools)
    assert alone["choices"][0]["message"]["content"] is None


def test_the_older_form_of_a_call() -> None:
    whole, chunks = reply(end("tool_calls", *call(0, "f", '{"a": ', "1}")), functions=[FUNCTION])
    message = whole["choices"][0]["message"]
    assert message["function_call"] == {"name": "f", "arguments": '{"a": 1}'}
    assert "tool_calls" not in message
    calls = [fields["function_call"] for fields in shown(chunks)]
    assert "".join(part["arguments"] for part in calls) == '{"a": 1}'
    assert whole["choices"][0]["finish_reason"] == "function_call"


@pytest.mark.parametrize("complete", [True, False])
def test_the_input_of_a_custom_tool_is_a_text(complete: bool) -> None:
    arguments = '{"input": "say \\"x\\""}' if complete else '{"input": "sa'
    expected = 'say "x"' if complete else arguments
    parts = call(0, "f", arguments[:8], arguments[8:], complete=complete)
    whole, chunks = reply(*(delta(part) for part in parts), end("tool_calls" if complete else "length"), tools=CUSTOM)
    assert whole["choices"][0]["message"]["tool_calls"] == [
        {"id": "call_0", "type": "custom", "custom": {"name": "f", "input": expected}}
    ]
    inputs = [c["custom"]["input"] for fields in shown(chunks) for c in fields.get("tool_calls", ())]
    assert "".join(inputs) == expected, "streamed as whole"


def test_a_custom_tool_whose_arguments_are_nested_too_deep() -> None:
    arguments = '{"a": ' + "[" * 5000 + "]" * 5000 + "}"
    whole, _ = reply(delta(*call(0, "f", arguments)), end("tool_calls"), tools=CUSTOM)
    assert whole["choices"][0]["message"]["tool_calls"][0]["custom"]["input"] == arguments


def test_drafted_spans_stand_with_their_content() -> None:
    parts = (Content("ab"), Content("cd", True), Reasoning("x"), Content("ef", True))
    whole, chunks = reply(delta(*parts), end())
    assert [
        (chunk["choices"][0]["delta"].get("content"), chunk.get("edgelm", {}).get("drafted")) for chunk in chunks[1:]
    ] == [("abcd", [[2, 4]]), (None, None), ("ef", [[0, 2]]), (None, None)]
    assert whole["edgelm"]["drafted"] == [(2, 6)]


def test_usage_does_not_depend_on_which_choice_ends_first() -> None:
    deltas = (end(choice=2), end(choice=1), end(choice=0, reasoning_tokens=4))
    whole, chunks = reply(*deltas, n=3, stream_options={"include_usage": True})
    assert whole["usage"] == chunks[-1]["usage"]
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (30, 27)
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_notes_come_with_the_figures() -> None:
    whole, chunks = reply(end(notes=("not enforced: x",)))
    assert whole["edgelm"]["notes"] == chunks[-1]["edgelm"]["notes"] == ["not enforced: x"]


@pytest.mark.parametrize("count", [FEW_TOKENS, FEW_TOKENS + 1])
def test_log_probabilities_of_a_large_answer_are_written_in_pieces(count: int) -> None:
    """All entries of large answers are never in memory at once: the collector stopped every stream for them."""
    sampled = tuple(Sampled(1, -0.5, ((1, -0.5), (2, -2.0))) for _ in range(count))
    request = parse_request(
        "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    )
    answer = replace(end("stop", Content("x")), sampled=sampled)
    whole = reply_to("/v1/chat/completions", request, CONTEXT).whole([answer])
    assert isinstance(whole["choices"][0]["logprobs"]["content"], list) == (count <= FEW_TOKENS)
    entries = json.loads(b"".join(json_pieces(whole)))["choices"][0]["logprobs"]["content"]
    assert entries == chat_logprobs(CONTEXT.tokenizer, sampled)
    assert len(entries) == count
