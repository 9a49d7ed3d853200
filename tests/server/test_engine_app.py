"""What an engine process answers, over an engine whose every token a test hands out."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from starlette.types import Message

from edgelm.completion import Delta
from edgelm.config import Settings
from edgelm.core import FinishReason, Sampled, Stats
from edgelm.errors import BusyError, EngineError, RequestError
from edgelm.server import engine_app as module
from edgelm.server.engine_app import EngineParts, engine_app
from edgelm.server.past import MAX_CHARS
from edgelm.text.chat import Rendered
from edgelm.text.known_chats import Prompt
from edgelm.text.template import too_long
from tests.engine.fake import info

STATS = Stats(
    prompt_tokens=3,
    cached_tokens=1,
    completion_tokens=2,
    drafted=4,
    accepted=3,
    queue_ms=1,
    prompt_ms=2,
    first_token_ms=3,
    decode_ms=4,
)
LIMIT_S = 30
WORDS = {1: b"one", 2: b" two", 3: b"\xe6\x97", 9: b""}


class FakeTokenizer:
    stop_ids = frozenset({9})

    def piece(self, token: int) -> bytes:
        return WORDS[token]

    def text_of(self, token: int) -> str:
        return f"<{token}>"

    def encode(self, text: str, *, special: bool, bos: bool) -> list[int]:
        assert not special
        assert not bos
        if "☃" in text:
            raise RequestError("the vocabulary cannot write it")
        return [len(word) for word in text.split()]


class FakeTemplates:
    stop_strings: tuple[str, ...] = ()
    error: RequestError | None = None
    prompt = (5, 6, 7)

    def __init__(self) -> None:
        self.learnt: list[list[int]] = []

    async def template(self) -> FakeTemplates:
        return self

    async def render_prompt(self, messages: list[dict[str, Any]], *, max_bytes: int) -> Prompt:
        if self.error is not None:
            raise self.error
        return Prompt(list(self.prompt), Rendered(""), {})

    async def learn(self, prompt: Prompt, answer: list[int]) -> None:
        assert prompt.ids == list(self.prompt)
        self.learnt.append(answer)


class Script:
    """The deltas of the next requests: an exception is raised, an Event is waited for."""

    def __init__(self, *steps: Delta | Exception | asyncio.Event) -> None:
        self.steps = steps
        self.stops: list[str] = []
        self.past: list[int] = []
        self.left = asyncio.Event()

    async def __call__(
        self, engine: Any, tokenizer: Any, prompt: Any, params: Any, stop: Any, *, past: Any, owner: str
    ) -> AsyncIterator[Delta]:
        self.stops, self.past, self.owner = stop, past, owner
        try:
            for step in self.steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        finally:
            self.left.set()


def delta(text: str, *ids: int, reason: FinishReason | None = None, logprob: float | None = None) -> Delta:
    return Delta(text, tuple(Sampled(each, logprob) for each in ids), reason, STATS if reason else None)


END = delta(" two", 2, 9, reason="stop")


@pytest.fixture
def templates() -> FakeTemplates:
    return FakeTemplates()


@pytest.fixture
def app(templates: FakeTemplates) -> Any:
    engine = SimpleNamespace(info=info(context=100), num_requests=2)
    loaded = SimpleNamespace(engine=engine, tokenizer=FakeTokenizer(), name="fake")
    return engine_app(EngineParts(loaded, templates, Settings()), "key")  # type: ignore[arg-type]


@asynccontextmanager
async def client(app: Any, key: str = "key") -> AsyncIterator[httpx2.AsyncClient]:
    headers = {"authorization": f"Bearer {key}"}
    async with (
        asyncio.timeout(LIMIT_S),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://x", headers=headers) as made,
    ):
        yield made


async def ask(app: Any, monkeypatch: pytest.MonkeyPatch, *steps: Any, **fields: Any) -> httpx2.Response:
    monkeypatch.setattr(module, "complete", Script(*steps))
    wanted = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    async with client(app) as http:
        return await http.post("/v1/chat/completions", json=wanted)


def events(answer: httpx2.Response) -> list[Any]:
    lines = answer.text.split("\n\n")
    assert lines.pop() == ""
    return [line if line == "data: [DONE]" or line[0] == ":" else json.loads(line[6:]) for line in lines]


async def test_the_shape_of_a_whole_answer(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = (await ask(app, monkeypatch, delta("one", 1), END)).json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("system_fingerprint").startswith("edgelm-")
    message = {"role": "assistant", "content": "one two", "refusal": None}
    assert answer == {
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
        "edgelm": {
            "finish_reason": "stop",
            "timings": {
                "queue_ms": 1,
                "prompt_ms": 2,
                "first_token_ms": 3,
                "decode_ms": 4,
                "decode_tokens_per_second": 250,
            },
            "speculation": {"drafted": 4, "accepted": 3},
            "cached_tokens": 1,
            "context": {"used": 5, "size": 100},
            "engine": info().engine,
            "device": info().device,
        },
    }


async def test_tokens_that_show_nothing_yet_make_no_chunk(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = await ask(app, monkeypatch, delta("", 3), delta("one", 1), END, stream=True)
    chunks = events(answer)
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "one"},
        {"content": " two"},
    ]
    assert chunks[-1] == "data: [DONE]"


async def test_what_was_drafted_is_told_beside_the_text(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (
        Delta("one", (Sampled(1),), drafted=((1, 3),)),
        Delta(" two", (Sampled(2),), drafted=((0, 2), (3, 4))),
        Delta("!", (), "stop", STATS),
    )
    whole = (await ask(app, monkeypatch, *steps)).json()
    assert whole["edgelm"]["drafted"] == [[1, 5], [6, 7]]
    chunks = events(await ask(app, monkeypatch, *steps, stream=True))[1:-1]
    assert [chunk.get("edgelm", {}).get("drafted") for chunk in chunks] == [[[1, 3]], [[0, 2], [3, 4]], None]
    last = Delta("!", (), "stop", STATS, ((0, 1),))
    chunks = events(await ask(app, monkeypatch, last, stream=True))
    assert chunks[1]["edgelm"]["drafted"] == [[0, 1]]
    assert chunks[1]["edgelm"]["speculation"] == {"drafted": 4, "accepted": 3}, "it stands with the rest"
    assert "drafted" not in (await ask(app, monkeypatch, END)).json()["edgelm"]


async def test_the_past_reaches_the_engine_as_plain_tokens(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(END, END)
    monkeypatch.setattr(module, "complete", script)
    past = [
        {"role": "user", "content": "a bcd"},
        {"role": "assistant", "content": "☃"},
        {"role": "user", "content": "ef"},
    ]
    wanted = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "edgelm": {"past": past}}
    async with client(app) as http:
        assert (await http.post("/v1/chat/completions", json=wanted)).status_code == 200
        assert script.past == [1, 3, 2], "what cannot be written is left out"
        del wanted["edgelm"]
        await http.post("/v1/chat/completions", json=wanted)
        assert script.past == []


async def test_of_a_long_past_the_newest_is_read(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(END)
    monkeypatch.setattr(module, "complete", script)
    past = [{"role": "user", "content": text} for text in ("x" * MAX_CHARS, "ab", "c" * 5)]
    wanted = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "edgelm": {"past": past}}
    async with client(app) as http:
        await http.post("/v1/chat/completions", json=wanted)
    assert script.past == [2, 5]


async def test_log_probabilities_that_json_cannot_hold(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Delta("one", (Sampled(1, -math.inf, ((9, -0.5), (3, -math.inf))),))
    answer = (await ask(app, monkeypatch, first, END, logprobs=True, top_logprobs=2)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "one",
        "logprob": -9999.0,
        "bytes": [111, 110, 101],
        "top_logprobs": [
            {"token": "<9>", "logprob": -0.5, "bytes": []},
            {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xE6, 0x97]},
        ],
    }
    assert [each["token"] for each in content] == ["one", " two"], "the stop token is no part of the answer"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BusyError("full"), 429, "queue_full"),
        (RequestError("odd"), 400, "invalid_value"),
        (EngineError("broke"), 503, "engine_died"),
    ],
)
async def test_what_fails_before_the_first_token_is_a_status(
    app: Any, monkeypatch: pytest.MonkeyPatch, stream: bool, error: Exception, status: int, code: str
) -> None:
    answer = await ask(app, monkeypatch, error, stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_what_fails_later_is_the_last_event(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = await ask(app, monkeypatch, delta("one", 1), EngineError("broke"), stream=True)
    assert answer.status_code == 200
    assert events(answer)[-1]["error"]["code"] == "engine_died"
    whole = await ask(app, monkeypatch, delta("one", 1), EngineError("broke"))
    assert whole.status_code == 503


async def test_signs_of_life_before_a_late_first_token(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    monkeypatch.setattr(module, "PING_S", 0.01)
    late = asyncio.Event()
    asyncio.get_running_loop().call_later(0.2, late.set)
    found = events(await ask(app, monkeypatch, late, delta("one", 1), END, stream=True))
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"
    assert found[1].startswith(":")
    assert found[-2]["choices"][0]["finish_reason"] == "stop"
    late.clear()
    asyncio.get_running_loop().call_later(0.2, late.set)
    assert events(await ask(app, monkeypatch, late, EngineError("broke"), stream=True))[-1]["error"]


async def test_a_prompt_that_does_not_fit(app: Any, templates: FakeTemplates, monkeypatch: pytest.MonkeyPatch) -> None:
    templates.prompt = (5,) * 100
    error = (await ask(app, monkeypatch, END)).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "have 100 tokens" in error["message"]
    assert "holds 100 tokens" in error["message"]
    templates.error = too_long(123_456)
    error = (await ask(app, monkeypatch, END)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "123,456" in error["message"]
    templates.error = RequestError("the template says no")
    assert "says no" in (await ask(app, monkeypatch, END)).json()["error"]["message"]


async def test_stop_strings_of_the_template_are_added(
    app: Any, templates: FakeTemplates, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates.stop_strings = ("\nUser:",)
    await ask(app, monkeypatch, END, stop=["x"])
    assert module.complete.stops == ["x", "\nUser:"]  # type: ignore[attr-defined]


async def test_only_who_has_the_key_is_answered(app: Any) -> None:
    async with client(app) as http:
        stats = (await http.get("/stats")).json()
        assert stats["requests"] == 2
        assert stats["rss_bytes"] > 2**20
    for wrong in ("", "other", "key2"):
        async with client(app, wrong) as http:
            assert (await http.get("/stats")).status_code == 401


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_ends_its_request(
    app: Any, monkeypatch: pytest.MonkeyPatch, stream: bool, begun: bool
) -> None:
    """The engine's generator is left at once, before and after the first token, streamed or not."""
    monkeypatch.setattr(module, "PATIENCE_S", LIMIT_S)
    never = asyncio.Event()
    script = Script(*([delta("one", 1)] if begun else []), never)
    monkeypatch.setattr(module, "complete", script)
    wanted = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    leaving = asyncio.Event()
    bodies = [{"type": "http.request", "body": json.dumps(wanted).encode(), "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if bodies:
            return bodies.pop()
        await leaving.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"authorization", b"Bearer key"), (b"content-type", b"application/json")],
    }
    async with asyncio.timeout(LIMIT_S):
        asking = asyncio.create_task(app(scope, receive, send))
        await asyncio.sleep(0.05)
        assert not script.left.is_set()
        leaving.set()
        await script.left.wait()
        await asking
    assert sent[0].get("status") == (200 if stream and begun else 499)
