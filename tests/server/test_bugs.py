"""A bug in a route, of the front or of an engine process: an error for the client, and its traceback in the log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import Front, body, serving, until


@pytest.fixture
def front(own: dict[str, str], models: Path, tmp_path: Path) -> Iterator[Front]:
    own |= {"PYTHONPATH": str(Path(__file__).parents[2])}  # engine processes do not look into the current folder
    with serving(own, models / "tiny.gguf", log=tmp_path / "log", module="tests.server.buggy_front") as running:
        yield running


def test_every_status_500_has_a_line_in_the_log(front: Front) -> None:
    """The front's log has the request's id, and the traceback, of the engine process too."""
    answer = front.chat(text="bug", headers={"x-request-id": "of-the-engine"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    until("the engine's traceback", lambda: "RuntimeError: a bug in the engine" in front.log.read_text())
    answer = front.http.get("/metrics", headers={"x-request-id": "of-the-front"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    answer = front.http.post("/v1/chat/completions", json=body("tiny", "hi", stream=True))
    assert "the engine closed the connection" in answer.text.splitlines()[-2]
    until("the stream's traceback", lambda: "RuntimeError: a bug in a stream" in front.log.read_text())
    log = front.log.read_text()
    assert "POST /v1/chat/completions: status 500 in the engine of tiny, request of-the-engine\n" in log
    assert "tiny.gguf: request of-the-engine: " in log
    assert "GET /metrics: status 500, request of-the-front\n" in log
    assert "RuntimeError: a bug in the front" in log
