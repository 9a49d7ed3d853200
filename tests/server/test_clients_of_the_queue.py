"""Who takes turns with whom: the client that the front names to an engine."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request

from edgelm.server.front import client_of
from edgelm.server.keys import Key


def client(key: Key | None, host: str = "127.0.0.1", port: int = 1, agent: str = "") -> str:
    headers = [(b"user-agent", agent.encode())] if agent else []
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


@pytest.mark.parametrize("agent", ["", "ä\r\nx: y"])
def test_the_name_is_a_header(agent: str) -> None:
    assert client(None, agent=agent).isalnum()
