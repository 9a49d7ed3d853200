"""Calls of tools as endpoints stream them, each in its own way."""

from __future__ import annotations

from typing import Any

import pytest

from edgelm.client.answer_stream import Delta, Finished
from edgelm.client.endpoint import ChatRequest, Client
from edgelm.client.turns import Call, FunctionTool, Turn
from tests.tui.fake_endpoint import FakeEndpoint

DEEP = '{"a": ' + "[" * 5000 + "]" * 5000 + "}"


def part(arguments: object = "", name: str | None = None, **values: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}, **values}


@pytest.mark.parametrize(
    ("parts", "calls"),
    [
        ([], []),
        (  # as OpenAI streams them
            [
                part(name="a", index=0, id="x"),
                part('{"n": ', index=0),
                part(name="b", index=1, id="y"),
                part("1}", index=0),
                part("{}", index=1),
            ],
            [Call("x", "a", '{"n": 1}'), Call("y", "b", "{}")],
        ),
        (
            [part("{}", "a", index=0, id="x"), part("{}", "b", index=0, id="y")],
            [Call("x", "a", "{}"), Call("y", "b", "{}")],
        ),
        ([part("{}", "a", id="x"), part("{}", "b", id="y")], [Call("x", "a", "{}"), Call("y", "b", "{}")]),
        ([part("{}", "a"), part("{}", "b")], [Call("", "a", "{}"), Call("", "b", "{}")]),
        ([part({"n": 1}, "a", index=0, id="x")], [Call("x", "a", '{"n": 1}')]),
        ([part(None, "a", index=0, id="x")], [Call("x", "a", "{}")]),
        (
            [part("{}", "a", index=0, id="x"), part("{}", "b", index=1, id="x")],
            [Call("x", "a", "{}"), Call("", "b", "{}")],
        ),
        ([{"index": 0}, part("{}", index=0)], []),
        ([part(DEEP, "a"), part("{}", "b")], [Call("", "a", DEEP + "{}")]),
    ],
    ids=["none", "pieces", "one index", "no index", "no ids", "object", "no arguments", "same ids", "no name", "deep"],
)
async def test_calls_are_gathered(parts: list[dict[str, Any]], calls: list[Call]) -> None:
    async with FakeEndpoint(answers=["Look."], calls=[parts]).serve() as endpoint:
        client = Client(endpoint.address)
        tool = FunctionTool("a", "Say it", {"type": "object"})
        items = [item async for item in client.chat(ChatRequest("starter", (Turn("user", "Q"),), tools=(tool,)))]
        await client.close()
    finished = items[-1]
    assert isinstance(finished, Finished)
    assert "".join(item.text for item in items if isinstance(item, Delta)) == "Look."
    assert [Call(call.id if expected.id else "", call.name, call.arguments)
            for call, expected in zip(finished.calls, calls, strict=True)] == calls  # fmt: skip
    assert len({call.id for call in finished.calls}) == len(calls)
    assert all(call.id for call in finished.calls)
    assert endpoint.requests[0]["tools"] == [
        {"type": "function", "function": {"name": "a", "description": "Say it", "parameters": {"type": "object"}}}
    ]
