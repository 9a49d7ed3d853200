"""A server that is busy, or whose model is not ready, says when to come back, in the form of each API."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from edgelm.base.errors import BusyError, ModelError
from edgelm.server.api.errors import as_api_error
from edgelm.server.api.handlers import error_response
from tests.server.fake_engines import Launches
from tests.server.test_engine_app import END, FakeEngine, app, client, engine, templates
from tests.server.test_front import fronted

__all__ = ["app", "engine", "templates"]  # fixtures

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": CHAT,
    "/api/chat": CHAT | {"stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
    "/completion": {"prompt": "hi"},
}
each_path = pytest.mark.parametrize("path", BODIES)


def check(answer: httpx2.Response, status: int, anthropics: tuple[int, str], openais: str, words: str) -> None:
    """Check a refusal that asks to come back."""
    path, body = answer.request.url.path, answer.json()
    expected = anthropics[0] if path.startswith("/v1/messages") else status
    assert answer.status_code == expected
    assert 1 <= int(answer.headers["retry-after"]) <= 120
    assert "x-should-retry" not in answer.headers
    if path.startswith("/v1/messages"):
        assert (body["type"], body["error"]["type"]) == ("error", anthropics[1])
        assert words in body["error"]["message"]
    elif path.startswith("/api/"):
        assert words in body["error"]
    else:
        assert body["error"]["type"] == openais
        assert words in body["error"]["message"]


@each_path
async def test_a_full_queue(app: Any, engine: FakeEngine, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise BusyError("3 requests of this client are open already", "wait until some are answered")

    monkeypatch.setattr(engine, "submit", full)
    async with client(app) as http:
        answer = await http.post(path, json={"model": "m"} | BODIES[path])
        check(answer, 429, (429, "rate_limit_error"), "rate_limit_error", "3 requests of this client")


@each_path
async def test_a_model_that_is_not_loaded_yet(tmp_path: Path, path: str) -> None:
    (tmp_path / "m.gguf").write_bytes(b"")
    async with fronted(Launches(), tmp_path / "m.gguf") as http:
        answer = await http.post(path, json={"model": "m"} | BODIES[path], headers={"prefer": "wait=0"})
        check(answer, 503, (529, "overloaded_error"), "server_error", "is being loaded")


@each_path
def test_a_model_that_never_loads_is_not_asked_for_again(path: str) -> None:
    answer = error_response(path, as_api_error(ModelError("it needs 90 GiB", "take a smaller one")))
    assert answer.status_code == (500 if path.startswith("/v1/messages") else 503)
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers
    if path.startswith("/v1/messages"):
        assert json.loads(bytes(answer.body))["error"]["type"] == "api_error"


@each_path
async def test_an_answer_that_cannot_repeat(app: Any, engine: FakeEngine, path: str) -> None:
    """A model that was not loaded with --repeatable refuses `repeatable`, in every API, and false demands nothing."""

    def body(value: bool) -> dict[str, Any]:
        field = {"repeatable": value}
        return {"model": "m"} | BODIES[path] | ({"options": field} if path.startswith("/api/") else field)

    engine.scripts = [(END,)]
    async with client(app) as http:
        refused = await http.post(path, json=body(value=True))
        assert refused.status_code == 400
        assert "`edgelm serve --repeatable`" in refused.text
        assert (await http.post(path, json=body(value=False))).status_code == 200
        assert len(engine.prompts) == 1
        engine.info = replace(engine.info, repeatable=True)
        assert (await http.post(path, json=body(value=True))).status_code == 200
        assert engine.params[-1].seed == 0, "it is the same in another process"
