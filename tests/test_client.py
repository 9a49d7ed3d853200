"""The client against an endpoint that answers, and against one that fails in every way."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgelm.client.endpoint import (
    AnswerStats,
    ChatRequest,
    Client,
    Delta,
    Finished,
    ModelEntry,
    Turn,
    _spans,
    normalize_address,
    stats_from_json,
    stats_to_json,
)
from edgelm.client.failures import ContextFullError, UnreachableError
from edgelm.client.local import OwnFront, find_front
from edgelm.errors import BusyError, EdgeLMError, EngineError, RequestError
from tests.tui.fake_endpoint import ANSWER, FakeEndpoint

REQUEST = ChatRequest("starter", (Turn("system", "Be brief."), Turn("user", "Sort")), {"temperature": 0.5, "top_k": 4})


@pytest.fixture
async def endpoint() -> AsyncIterator[FakeEndpoint]:
    async with FakeEndpoint().serve() as found:
        yield found


@pytest.fixture
async def client(endpoint: FakeEndpoint) -> AsyncIterator[Client]:
    found = Client(endpoint.address)
    await found.connect()
    yield found
    await found.close()


async def ask(client: Client, request: ChatRequest = REQUEST) -> tuple[str, Finished]:
    text, finished = "", None
    async for item in client.chat(request):
        if isinstance(item, Delta):
            text += item.text
        else:
            finished = item
    assert finished is not None
    return text, finished


async def fail(client: Client) -> tuple[str, EdgeLMError]:
    """Return what came before the error, and the error."""
    text = ""
    try:
        async for item in client.chat(REQUEST):
            assert isinstance(item, Delta)
            text += item.text
    except EdgeLMError as error:
        return text, error
    raise AssertionError("no error came")


async def test_an_answer_of_edgelm(client: Client, endpoint: FakeEndpoint) -> None:
    text, finished = await ask(client)
    assert text == ANSWER
    assert finished.reason == "stop"
    stats = finished.stats
    assert (stats.engine, stats.device, stats.drafted, stats.accepted) == ("llama", "cpu", 40, 31)
    assert stats.context_size == 4096
    assert stats.tokens_per_second == 41.3
    assert endpoint.requests == [
        {
            "model": "starter",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sort"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.5,
            "top_k": 4,
        }
    ]
    assert endpoint.headers[0]["prefer"] == "wait"


async def test_what_was_drafted_comes_with_the_text(client: Client, endpoint: FakeEndpoint) -> None:
    endpoint.answers, endpoint.drafted = ["one two three"], "w"
    deltas = [item async for item in client.chat(REQUEST) if isinstance(item, Delta)]
    assert deltas == [Delta("one"), Delta(" two", "", ((0, 4),)), Delta(" three")]


@pytest.mark.parametrize(
    "spans", [[[0, 9]], [[-1, 2]], [[2, 2]], [[0, 2], [1, 3]], [[True, 2]], [0, 2], 7, [[0, 1, 2]]]
)
async def test_spans_that_make_no_sense_are_none(spans: object) -> None:
    assert _spans({"drafted": spans}, 4) == ()


async def test_the_past_goes_to_edgelm_only(client: Client, endpoint: FakeEndpoint) -> None:
    request = replace(REQUEST, past=(Turn("user", "q0"), Turn("assistant", "a0")))
    await ask(client, request)
    past = [{"role": "user", "content": "q0"}, {"role": "assistant", "content": "a0"}]
    assert endpoint.requests[-1]["edgelm"] == {"past": past}
    endpoint.is_edgelm = False
    await client.connect()
    await ask(client, request)
    assert "edgelm" not in endpoint.requests[-1]


async def test_another_endpoint_gets_only_what_openai_knows(client: Client, endpoint: FakeEndpoint) -> None:
    endpoint.is_edgelm = False
    await client.connect()
    assert not client.is_edgelm
    text, finished = await ask(client)
    assert text == ANSWER
    assert "top_k" not in endpoint.requests[0]
    assert endpoint.requests[0]["temperature"] == 0.5
    assert "prefer" not in endpoint.headers[0]
    assert finished.stats.engine == ""
    assert finished.stats.drafted is None
    assert finished.stats.first_token_ms is not None, "measured here"
    assert finished.stats.context_used == finished.stats.prompt_tokens + finished.stats.completion_tokens  # type: ignore[operator]
    assert await client.loading("starter") is None


async def test_an_endpoint_that_refuses_stream_options(client: Client, endpoint: FakeEndpoint) -> None:
    endpoint.is_edgelm, endpoint.refuse_usage = False, True
    await client.connect()
    assert (await ask(client))[0] == ANSWER
    assert [("stream_options" in each) for each in endpoint.requests] == [True, False]
    await ask(client)
    assert "stream_options" not in endpoint.requests[2], "it is remembered"


async def test_the_key_in_the_environment_is_not_sent(endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    for key, sent in ((None, "Bearer none"), ("mine", "Bearer mine")):
        client = Client(endpoint.address, key)
        await ask(client)
        assert endpoint.headers.pop()["authorization"] == sent
        await client.close()


async def test_models(client: Client, endpoint: FakeEndpoint) -> None:
    found = await client.models()
    assert found[0] == ModelEntry("starter", 3_900_000, 4096, "llama", "Q8_0", True)
    endpoint.is_edgelm = False
    assert (await client.models())[0] == ModelEntry("starter")


async def test_a_loading_model_is_waited_for(client: Client, endpoint: FakeEndpoint) -> None:
    endpoint.loading = [0.2, 0.6]
    found = await client.loading("starter")
    assert found is not None
    assert (found.state, found.progress) == ("starting", 0.2)
    assert (await ask(client))[0] == ANSWER
    assert len(endpoint.requests) == 3
    assert await client.loading("starter") is None


async def test_reasoning_is_apart_from_the_text(client: Client, endpoint: FakeEndpoint) -> None:
    endpoint.reasoning, endpoint.answers = "First think.", ["Then say."]
    items = [item async for item in client.chat(REQUEST) if isinstance(item, Delta)]
    assert "".join(item.reasoning for item in items) == "First think."
    assert "".join(item.text for item in items) == "Then say."


async def test_the_engine_dies_in_the_middle(client: Client, endpoint: FakeEndpoint) -> None:
    endpoint.die_after = 3
    text, error = await fail(client)
    assert text == "Quicksort picks a"
    assert isinstance(error, EngineError)
    assert str(error) == "the engine was ended by signal 9; your next message starts it again"
    endpoint.die_after = None
    assert (await ask(client))[0] == ANSWER


@pytest.mark.parametrize("how", ["drop_after", "end_early_after"])
async def test_the_connection_breaks_in_the_middle(client: Client, endpoint: FakeEndpoint, how: str) -> None:
    setattr(endpoint, how, 3)
    text, error = await fail(client)
    assert text == "Quicksort picks a"
    assert isinstance(error, EngineError)
    assert "broke" in str(error)
    setattr(endpoint, how, None)
    assert (await ask(client))[0] == ANSWER


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (400, {"error": {"message": "9 > 4", "code": "context_length_exceeded"}}, ContextFullError, "raise --ctx"),
        (400, {"error": {"message": "top_p is 7"}}, RequestError, "refuses the request: top_p is 7"),
        (401, {"error": "who are you"}, RequestError, "--api-key"),
        (404, {"detail": "no such model"}, RequestError, "/model"),
        (429, {"error": {"message": "queue is full"}}, BusyError, "queue is full"),
        (500, {}, EngineError, "HTTP 500"),
        (503, {"error": {"message": "out of memory", "code": "engine_died"}}, EngineError, "starts it"),
        (422, {"detail": [{"loc": ["body"]}]}, RequestError, "HTTP 422"),
    ],
)  # fmt: skip
async def test_a_refusal_is_one_line_that_says_what_to_do(
    client: Client, endpoint: FakeEndpoint, status: int, body: dict[str, object], kind: type[EdgeLMError], words: str
) -> None:
    endpoint.refuse = (status, body)
    text, error = await fail(client)
    assert text == ""
    assert type(error) is kind
    assert words in str(error)
    assert "\n" not in str(error)


async def test_nobody_is_there() -> None:
    client = Client("http://127.0.0.1:9")
    with pytest.raises(UnreachableError, match="cannot be reached"):
        await client.connect()
    await client.close()


async def test_something_else_is_there() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b"<html>hello</html>"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    await client.connect()
    assert not client.is_edgelm
    with pytest.raises(EdgeLMError):
        await client.models()
    with pytest.raises(EdgeLMError):
        await ask(client)
    await client.close()
    server.close()


async def test_a_cancelled_answer_ends_its_request(client: Client, endpoint: FakeEndpoint) -> None:
    endpoint.stall_after = 3
    task = asyncio.create_task(ask(client))
    for _ in range(500):
        if endpoint.requests:
            break
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(500):
        if endpoint.cancelled:
            break
        await asyncio.sleep(0.01)
    assert endpoint.cancelled == 1


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:11500", "http://127.0.0.1:11500/v1"),
        ("http://127.0.0.1:11500/", "http://127.0.0.1:11500/v1"),
        ("http://127.0.0.1:11500/v1/", "http://127.0.0.1:11500/v1"),
        ("gpu.local:8000", "http://gpu.local:8000/v1"),
        ("https://example.org/openai/v1", "https://example.org/openai/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_addresses(given: str, url: str) -> None:
    assert normalize_address(given) == url


@pytest.mark.parametrize("given", ["", "ftp://x", "http://", "http://x:99999", "http://x:y", "http://x/?a=b"])
def test_what_is_no_address(given: str) -> None:
    with pytest.raises(RequestError, match="is not an endpoint"):
        normalize_address(given)


def test_stats_survive_other_versions() -> None:
    stats = AnswerStats(prompt_tokens=3, engine="llama", tokens_per_second=2.5)
    assert stats_from_json(stats_to_json(stats)) == stats
    assert stats_from_json('{"prompt_tokens": 3, "of_tomorrow": 1}') == AnswerStats(prompt_tokens=3)
    assert stats_from_json("") is None


def test_a_running_front_is_found_and_a_stale_one_is_not(tmp_path: Path) -> None:
    assert find_front(tmp_path) is None
    file = tmp_path / "front.json"
    file.write_text(json.dumps({"pid": os.getpid(), "address": "http://127.0.0.1:1"}))
    assert find_front(tmp_path) == "http://127.0.0.1:1"
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    file.write_text(json.dumps({"pid": int(process.stdout), "address": "http://127.0.0.1:1"}))
    assert find_front(tmp_path) is None
    for text in ("", "[]", '{"pid": "x"}', "{"):
        file.write_text(text)
        assert find_front(tmp_path) is None


def front(tmp_path: Path, code: str) -> OwnFront:
    found = OwnFront([], tmp_path / "logs" / "serve.log")
    found._command = [sys.executable, "-c", code]
    return found


async def test_a_front_of_our_own_ends_when_its_input_closes(tmp_path: Path) -> None:
    code = 'import sys; print(\'{"address": "http://127.0.0.1:5"}\', flush=True); sys.stdin.read()'
    own = front(tmp_path, code)
    assert await own.start() == "http://127.0.0.1:5"
    process = own._process
    assert process is not None
    assert not own.died
    await own.stop()
    assert process.returncode == 0


async def test_a_front_that_does_not_start_says_why(tmp_path: Path) -> None:
    own = front(tmp_path, "import sys; sys.exit('error: port 1 is taken; choose another')")
    with pytest.raises(EngineError, match="does not start: port 1 is taken; choose another") as caught:
        await own.start()
    assert "serve.log" in caught.value.hint


async def test_a_front_that_dies_is_noticed(tmp_path: Path) -> None:
    own = front(tmp_path, 'print(\'{"address": "http://127.0.0.1:5"}\', flush=True)')
    await own.start()
    assert own._process is not None
    await own._process.wait()
    assert own.died
    await own.stop()
    assert not own.died
