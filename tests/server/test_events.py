"""GET /edgelm/events of a real front: engines that come and go while somebody watches, and readers that do not read."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.harness import ENDLESS, Front, serving, until, watching
from tests.server.test_serve import edgelm

Seen = list[tuple[str, dict[str, Any]]]


def names(seen: Seen) -> list[str]:
    return [name for name, _ in seen]


def num_ended(seen: Seen) -> int:
    return sum("finish_reason" in chunk for _, event in seen for chunk in event.get("chunks", []))


def test_a_watcher_sees_engines_come_and_go(front: Front, environment: dict[str, str]) -> None:
    with watching(front, query="?model=tiny") as seen:
        until("it is told that there is none", lambda: names(seen) == ["idle"])
        front.chat("long")
        front.chat("tiny")
        until("it is told of the engine", lambda: "engine" in names(seen))
        front.chat("tiny")
        until("the steps of an answer", lambda: num_ended(seen))
        assert names(seen)[:2] == ["idle", "engine"], "the other model is not told of"
        assert seen[1][1]["model"] == "tiny"
        assert edgelm(environment, "unload", "tiny").returncode == 0
        until("the end of the engine", lambda: names(seen)[-1] == "idle")
        front.chat("tiny")
        until("the engine that came back", lambda: names(seen).count("engine") == 2)


def test_watching_loads_nothing_and_keeps_nothing_loaded(own: dict[str, str], models: Path, tmp_path: Path) -> None:
    with serving(own, models / "tiny.gguf", log=tmp_path / "log") as front, watching(front) as seen:
        until("it is told that there is none", lambda: names(seen) == ["idle"])
        assert front.ps()["models"] == []
        front.chat("tiny", keep_alive="1s")
        until("the idle model is unloaded", lambda: front.ps("tiny") is None)
        until("the watcher is told", lambda: names(seen)[-1] == "idle")


def test_a_server_ends_while_it_is_watched(own: dict[str, str], models: Path, tmp_path: Path) -> None:
    with serving(own, models / "tiny.gguf", log=tmp_path / "log") as front:
        front.chat("tiny")
        with watching(front) as seen:
            until("the watcher is told of the engine", lambda: "kv" in names(seen))
            assert front.end() == 0
            until("the stream ends", lambda: names(seen)[-1] == "end")
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_watcher_that_does_not_read_slows_nothing(front: Front) -> None:
    front.chat("long")
    address = urlsplit(front.address)
    with socket.create_connection((address.hostname, address.port or 80)) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        lazy.sendall(f"GET /edgelm/events?model=long HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
        with watching(front, query="?model=long") as seen:
            until("the reader is told of the engine", lambda: "engine" in names(seen))
            answer = front.chat("long", max_tokens=3000, logprobs=True, top_logprobs=5, **ENDLESS).json()
            assert answer["usage"]["completion_tokens"] == 3000
            until("the reader has the last step", lambda: num_ended(seen))


@pytest.mark.parametrize("query", ["?model=none", "?model=../../etc/passwd"])
def test_an_unknown_model_cannot_be_watched(front: Front, query: str) -> None:
    answer = front.http.get(f"/edgelm/events{query}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
