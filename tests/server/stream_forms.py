"""The form of a streamed answer in every dialect: complete events, their order, and the last one.

Owns what OpenAI's and Anthropic's clients rely on. Knows nothing of the content.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

DONE = "[DONE]"
FINAL = ("response.completed", "response.incomplete")


def strict_json(text: str | bytes) -> Any:
    """Return a JSON value. Raises ValueError, also for NaN and Infinity."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def check_stream(path: str, content: bytes) -> int:
    """Assert that a whole stream has the form of its dialect; return the number of its events."""
    events = _events(content.decode())
    assert events, "the stream is empty"
    CHECKS[path](events)
    return len(events)


def check_lines(path: str, content: bytes) -> int:
    """Assert that a whole stream has the form of Ollama's API; return the number of its lines."""
    assert content.endswith(b"\n"), f"the last line is cut off: {content[-200:]!r}"
    lines = [strict_json(line) for line in content.decode().splitlines()]
    field = "message" if path == "/api/chat" else "response"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True], lines[-1]
    assert all(field in line and line["model"] and line["created_at"] for line in lines)
    last = lines[-1]
    assert last["done_reason"] in ("stop", "length")
    assert last["eval_count"] >= 0
    assert last["prompt_eval_count"] > 0
    return len(lines)


def _events(text: str) -> list[tuple[str, str]]:
    """Return the name and the data of each event; comments are skipped."""
    assert text.endswith("\n\n"), f"the last event is cut off: {text[-200:]!r}"
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if not lines:
            continue
        fields = [line.partition(": ") for line in lines]
        assert [name for name, _, _ in fields] in (["data"], ["event", "data"]), f"not an event: {block[:200]!r}"
        events.append((fields[0][2] if len(fields) == 2 else "", fields[-1][2]))
    return events


def _check_chunks(events: list[tuple[str, str]], kind: str) -> None:
    """Check OpenAI's chunks: one finish reason for every choice, an optional chunk of usage, then [DONE]."""
    assert events[-1] == ("", DONE), f"it ends with {events[-1]}"
    chunks = [strict_json(data) for name, data in events[:-1] if not name]
    assert len(chunks) == len(events) - 1
    ids, finished, seen = set(), set(), set()
    for at, chunk in enumerate(chunks):
        assert chunk["object"] == kind, chunk
        ids.add(chunk["id"])
        if not chunk["choices"]:
            assert at == len(chunks) - 1, "a chunk without choices is not the last one"
            assert chunk["usage"]["total_tokens"] >= 0
        for choice in chunk["choices"]:
            assert choice["index"] not in finished, "a choice goes on after its end"
            if kind == "chat.completion.chunk" and choice["index"] not in seen:
                assert choice["delta"]["role"] == "assistant"
            seen.add(choice["index"])
            if choice["finish_reason"] is not None:
                finished.add(choice["index"])
    assert len(ids) == 1
    assert finished == seen != set(), f"choices {seen}, ended {finished}"


def _check_response(events: list[tuple[str, str]]) -> None:
    """Check the events of /v1/responses: numbered, items one after the other, the response last."""
    data = [strict_json(text) for _, text in events]
    assert [event["type"] for event in data] == [name for name, _ in events]
    assert [event["sequence_number"] for event in data] == [*range(len(data))]
    names = [name for name, _ in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] in FINAL, f"it ends with {names[-1]}"
    assert not set(FINAL) & set(names[:-1])
    open_item, num_items = None, 0
    for event in data[2:-1]:
        if event["type"] == "response.in_progress":  # a ping
            continue
        assert event["output_index"] == num_items - (event["type"] != "response.output_item.added")
        if event["type"] == "response.output_item.added":
            assert open_item is None, "an item begins inside another"
            open_item, num_items = event["item"]["id"], num_items + 1
        elif event["type"] == "response.output_item.done":
            assert open_item == event["item"]["id"]
            open_item = None
        else:
            assert open_item == event["item_id"]
    assert open_item is None, "an item has no end"
    response = data[-1]["response"]
    assert len(response["output"]) == num_items
    assert response["status"] == names[-1].partition(".")[2]
    assert response["usage"]["total_tokens"] > 0


def _check_message(events: list[tuple[str, str]]) -> None:
    """Check Anthropic's events: blocks one after the other inside a message."""
    data = [strict_json(text) for name, text in events if name != "ping"]
    names = [name for name, _ in events if name != "ping"]
    assert [event["type"] for event in data] == names
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"], f"it ends with {names[-2:]}"
    assert data[-2]["delta"]["stop_reason"], "no stop_reason"
    open_block, num_blocks = None, 0
    for event in data[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert open_block is None, "a block begins inside another"
                assert event["index"] == num_blocks
                open_block, num_blocks = event["index"], num_blocks + 1
            case "content_block_delta":
                assert open_block == event["index"]
            case "content_block_stop":
                assert open_block == event["index"]
                open_block = None
            case other:
                raise AssertionError(f"{other} inside a message")
    assert open_block is None, "a block has no end"


def _check_completion(events: list[tuple[str, str]]) -> None:
    """Check llama-server's events: pieces of content, and the last one with the figures or what was asked of them."""
    pieces = [strict_json(data) for _, data in events]
    assert all(piece["stop"] is False for piece in pieces[:-1])
    assert pieces[-1].get("stop", True) is True


CHECKS: dict[str, Callable[[list[tuple[str, str]]], None]] = {
    "/v1/chat/completions": lambda events: _check_chunks(events, "chat.completion.chunk"),
    "/v1/completions": lambda events: _check_chunks(events, "text_completion"),
    "/v1/responses": _check_response,
    "/v1/messages": _check_message,
    "/completion": _check_completion,
    "/infill": _check_completion,
}


def check_error(path: str, content: bytes) -> None:
    """Assert that the body of an error has the form of the dialect that its path belongs to."""
    body = strict_json(content)
    error = body["error"]
    if path.startswith("/api/"):
        assert body.keys() == {"error"}
        assert isinstance(error, str)
        assert error.strip()
        return
    assert isinstance(error["message"], str), body
    assert error["message"].strip(), body
    assert isinstance(error["type"], str), body
    if path.startswith("/v1/messages"):
        assert body["type"] == "error", body
        assert body["request_id"].startswith("req_"), body
    else:
        assert error.keys() >= {"message", "type", "param", "code"}, body
        assert error["param"] is None or isinstance(error["param"], str), body
        assert isinstance(error["code"], str), body
