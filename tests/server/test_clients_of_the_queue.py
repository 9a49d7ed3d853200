"""Who takes turns with whom: the client that the front names to an engine."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request

from edgelm.server.front import client_of
from edgelm.server.keys import Key


def client(key: Key | None, host: str = "127.0.0.1", port: int = 1, agent: str = "", **more: str) -> str:
    headers = [(b"user-agent", agent.encode())] if agent else []
    headers += [(name.encode(), value.encode()) for name, value in more.items()]
    scope: dict[str, Any] = {"type": "http", "client": (host, port), "headers": headers, "state": {"key": key}}
    return client_of(Request(scope))


def test_a_key_is_one_client_wherever_it_comes_from() -> None:
    one, two = Key("one", "one-secret"), Key("two", "two-secret")
    assert client(one) == client(one, host="10.0.0.1", agent="other")
    assert client(one) != client(two)


def test_without_keys_programs_are_told_apart_and_connections_are_not() -> None:
    assert client(None, port=1, agent="editor") == client(None, port=2, agent="editor")
    assert client(None, agent="editor") != client(None, agent="chat")
    assert client(None, agent="editor") != client(None, host="10.0.0.1", agent="editor")


def test_programs_without_a_name_are_told_apart_by_the_headers_of_their_library() -> None:
    """As those of .NET, Rust's reqwest and Node's http: without this, all of them were one client."""
    sent = [
        {"accept": "*/*"},
        {"content-type": "application/json"},
        {"accept-encoding": "identity", "content-type": "application/json"},
        {"content-type": "application/json", "accept-encoding": "identity"},
        {"content-type": "application/json", "origin": "http://localhost:3000"},
    ]
    assert len({client(None, **headers) for headers in sent}) == len(sent)
    once = client(None, port=1, **sent[1] | {"content-length": "10", "x-request-id": "1"})
    again = client(None, port=2, **sent[1] | {"content-length": "12", "x-request-id": "2"})
    assert once == again == client(None, **sent[1])
    assert client(None, host="10.0.0.1", **sent[1]) != once
    assert client(None, agent="editor", **sent[0]) == client(None, agent="editor", **sent[1])


@pytest.mark.parametrize("agent", ["", "ä\r\nx: y"])
def test_the_name_is_a_header(agent: str) -> None:
    assert client(None, agent=agent).isalnum()
