"""The client with a working endpoint, and with one that fails in every way."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from edgelm.base.config import load_config
from edgelm.base.errors import BusyError, EdgeLMError, EngineError, RequestError
from edgelm.base.runtime import FrontRecord, announce, announced, find_front, find_fronts
from edgelm.base.workers import parent
from edgelm.base.workers.messages import Serving
from edgelm.base.workers.parent import Worker
from edgelm.base.workers.wire import encode
from edgelm.client.addresses import is_loopback, is_same_server, normalize_address
from edgelm.client.answer_stream import (
    AnswerStats,
    AnswerStream,
    Delta,
    Finished,
    _spans,
    reasoning_of,
    stats_from_json,
    stats_to_json,
)
from edgelm.client.endpoint import ChatRequest, Client, ModelEntry
from edgelm.client.failures import ContextFullError, UnreachableError
from edgelm.client.json_values import number, whole
from edgelm.client.link import Link
from edgelm.client.local import OwnFront
from edgelm.client.turns import MAX_URL_LEN, Turn
from tests.tui.fake_endpoint import ANSWER, FakeEndpoint

REQUEST = ChatRequest("starter", (Turn("system", "Be brief."), Turn("user", "Sort")), {"temperature": 0.5, "top_k": 4})


@pytest.fixture
async def endpoint() -> AsyncIterator[FakeEndpoint]:
    async with FakeEndpoint().serve() as endpoint:
        yield endpoint


@pytest.fixture
async def client(endpoint: FakeEndpoint) -> AsyncIterator[Client]:
    client = Client(endpoint.address)
    await client.connect()
    yield client
    await client.close()


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
    """Return the text before the error, and the error."""
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


async def test_drafted_spans_come_with_the_text(client: Client, endpoint: FakeEndpoint) -> None:
    endpoint.answers, endpoint.drafted = ["one two three"], "w"
    deltas = [item async for item in client.chat(REQUEST) if isinstance(item, Delta)]
    assert deltas == [Delta("one"), Delta(" two", "", ((0, 4),)), Delta(" three")]


@pytest.mark.parametrize(
    "spans", [[[0, 9]], [[-1, 2]], [[2, 2]], [[0, 2], [1, 3]], [[True, 2]], [0, 2], 7, [[0, 1, 2]]]
)
async def test_invalid_spans_are_ignored(spans: object) -> None:
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


async def test_another_endpoint_gets_only_openai_fields(client: Client, endpoint: FakeEndpoint) -> None:
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
    assert [("stream_options" in body) for body in endpoint.requests] == [True, False]
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
    models = await client.models()
    assert models[0] == ModelEntry("starter", 3_900_000, 4096, "llama", "Q8_0", True)
    endpoint.is_edgelm = False
    assert (await client.models())[0] == ModelEntry("starter")


async def test_a_loading_model_is_waited_for(client: Client, endpoint: FakeEndpoint) -> None:
    endpoint.loading = [0.2, 0.6]
    loading = await client.loading("starter")
    assert loading is not None
    assert (loading.state, loading.progress) == ("starting", 0.2)
    assert (await ask(client))[0] == ANSWER
    assert len(endpoint.requests) == 3
    assert await client.loading("starter") is None


@pytest.mark.parametrize("other", ["/models/tiny.gguf", "small", "tiny:latest"])
async def test_an_engine_is_found_by_any_name_of_its_model(client: Client, endpoint: FakeEndpoint, other: str) -> None:
    endpoint.other_names, endpoint.unused_gpu, endpoint.loading = [other], "a GPU is not used", [0.5]
    for name in (endpoint.models[0], other):
        assert await client.unused_gpu(name) == endpoint.unused_gpu
        loading = await client.loading(name)
        assert loading is not None
        assert loading.progress == 0.5
    assert await client.unused_gpu("unknown") == ""
    endpoint.loading = []
    assert await client.is_idle(other)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_reasoning_is_separate_from_the_text(client: Client, endpoint: FakeEndpoint, name: str) -> None:
    endpoint.reasoning, endpoint.answers, endpoint.reasoning_field = "First think.", ["Then say."], name
    items = [item async for item in client.chat(REQUEST) if isinstance(item, Delta)]
    assert "".join(item.reasoning for item in items) == "First think."
    assert "".join(item.text for item in items) == "Then say."


@pytest.mark.parametrize(
    ("extra", "reasoning"),
    [
        ({"reasoning_content": "a", "reasoning": "a"}, "a"),  # both have the same text: it is read once
        ({"reasoning_content": None, "reasoning": "b"}, "b"),
        ({"reasoning_content": "", "reasoning": "b"}, "b"),
        ({"reasoning_content": ["?"], "reasoning": "b"}, "b"),
        ({"reasoning": {"text": "?"}}, ""),
    ],
)
def test_one_of_the_names_of_reasoning_is_read(extra: dict[str, object], reasoning: str) -> None:
    assert reasoning_of(extra) == reasoning


@pytest.mark.parametrize(("told", "tokens"), [(340, 340), (None, None)])
async def test_the_tokens_of_the_reasoning(
    client: Client, endpoint: FakeEndpoint, told: int | None, tokens: int | None
) -> None:
    endpoint.reasoning, endpoint.reasoning_tokens = "First think.", told
    _, finished = await ask(client)
    assert finished.stats.reasoning_tokens == tokens


THOUGHTFUL = replace(REQUEST, turns=(Turn("user", "q"), Turn("assistant", "a", "I think."), Turn("user", "r")))


async def test_reasoning_goes_back_to_edgelm_only(client: Client, endpoint: FakeEndpoint) -> None:
    await ask(client, replace(THOUGHTFUL, past=(Turn("user", "q0"), Turn("assistant", "a0", "Hm."))))
    answer = {"role": "assistant", "content": "a", "reasoning_content": "I think."}
    assert endpoint.requests[-1]["messages"] == [
        {"role": "user", "content": "q"},
        answer,
        {"role": "user", "content": "r"},
    ]
    assert endpoint.requests[-1]["edgelm"]["past"][1] == {
        "role": "assistant",
        "content": "a0",
        "reasoning_content": "Hm.",
    }
    endpoint.is_edgelm = False
    await client.connect()
    await ask(client, THOUGHTFUL)
    assert endpoint.requests[-1]["messages"][1] == {"role": "assistant", "content": "a"}


async def test_an_older_edgelm_that_refuses_reasoning(client: Client, endpoint: FakeEndpoint) -> None:
    endpoint.refuse_reasoning = True
    assert (await ask(client, THOUGHTFUL))[0] == ANSWER
    assert [("reasoning_content" in body["messages"][1]) for body in endpoint.requests] == [True, False]
    await ask(client, THOUGHTFUL)
    assert "reasoning_content" not in endpoint.requests[2]["messages"][1], "it is remembered"


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
        (404, {"detail": "no such model"}, RequestError, "/model; the address may need /v1"),
        (404, {"error": {"message": "no m", "code": "model_not_found"}}, RequestError, "no m; choose a model with"),
        (429, {"error": {"message": "queue is full"}}, BusyError, "queue is full"),
        (500, {}, EngineError, "HTTP 500"),
        (503, {"error": {"message": "out of memory", "code": "engine_died"}}, EngineError, "starts it"),
        (503, {"error": {"message": "used up; lower it", "code": "out_of_memory"}}, EngineError, "used up; lower it"),
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
    assert ("/v1" in str(error)) is ("detail" in body and status == 404), "only where something else may answer"


async def test_an_unreachable_address() -> None:
    client = Client("http://127.0.0.1:9")
    with pytest.raises(UnreachableError, match="cannot be reached"):
        await client.connect()
    await client.close()


async def test_a_redirect_to_another_server_is_not_followed(endpoint: FakeEndpoint) -> None:
    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        place = f"{endpoint.address}/v1/chat/completions"
        head = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n"
        writer.write(head.encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(redirect, "127.0.0.1", 0)
    client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with server:
        _, error = await fail(client)
        await client.close()
    assert error.message == f"{client.address} redirects to {endpoint.address}"
    assert endpoint.requests == [], "only the server that the user named gets the conversation"


@pytest.mark.parametrize(
    ("target", "same"),
    [
        ("http://gpu.example/v1/models/", True),
        ("http://gpu.example:80/v1", True),
        ("https://gpu.example/v1", True),
        ("https://other.example/v1", False),
        ("http://gpu.example:8080/v1", False),
    ],
)
def test_the_server_of_a_redirect(target: str, same: bool) -> None:
    assert is_same_server("http://gpu.example/v1/models", target) == same


async def streamed(body: bytes, cuts: int = 7) -> tuple[str, str, Finished]:
    """Return reasoning, text and end of an answer that a server sends as these bytes, in small pieces."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"POST"):
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
            for at in range(0, len(body), cuts):
                writer.write(body[at : at + cuts])
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        await client.connect()
        items = [item async for item in client.chat(REQUEST)]
    finally:
        await client.close()
        server.close()
    *deltas, finished = items
    assert isinstance(finished, Finished)
    parts = [delta for delta in deltas if isinstance(delta, Delta)]
    return "".join(part.reasoning for part in parts), "".join(part.text for part in parts), finished


def said(*contents: str) -> list[bytes]:
    """Return the chunks of an answer, the last with its end."""
    deltas = [{"delta": {"content": content}, "index": 0} for content in contents]
    documents = [{"choices": [delta]} for delta in [*deltas, {"delta": {}, "index": 0, "finish_reason": "stop"}]]
    return [json.dumps(document).encode() for document in documents]


@pytest.mark.parametrize("cuts", [1, 7, 4096])
async def test_events_by_the_standard(cuts: int) -> None:
    one, two, end = said("Hello ", "world")
    body = b"\xef\xbb\xbfdata: " + one + b"\n\nretry: 3000\n\n: a comment\n\nid: 7\n\nevent: ping\n\ndata:\n\n"
    body += b"id: 8\r\nevent: message\r\ndata:" + two + b"\r\n\r\n\r\ndata: " + end + b"\n\ndata: [DONE]\n\n"
    assert (await streamed(body, cuts))[:2] == ("", "Hello world")


@pytest.mark.parametrize("cuts", [1, 3, 4096])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
async def test_lines_end_by_the_standard_alone(cuts: int, end: bytes) -> None:
    """Python's splitlines() would cut a text at U+2028 and U+0085."""
    chunks = [chunk.decode("unicode_escape").encode() for chunk in said("a\u2028b", "c\u0085")]
    body = b"".join(b"data: " + chunk + 2 * end for chunk in chunks)
    assert (await streamed(body, cuts))[:2] == ("", "a\u2028bc\u0085")


async def test_fields_of_other_types_are_none() -> None:
    odd: list[object] = [
        {"choices": [{"delta": {"content": ["x"], "tool_calls": "x", "reasoning": 1}, "finish_reason": 7}]},
        {"choices": [{"delta": "x"}]}, {"choices": ["x"]}, {"choices": {}}, {"choices": [], "usage": 3}, 7, "x", [],
    ]  # fmt: skip
    body = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in odd)
    reasoning, text, finished = await streamed(body + b"".join(b"data: " + chunk + b"\n\n" for chunk in said("Yes")))
    assert (reasoning, text, finished.reason) == ("", "Yes", "stop")


@pytest.mark.parametrize(
    "document", [b"{", b"[" * 100_000, b"9" * 5000, b'"\xff"'], ids=["cut", "deep", "long", "bytes"]
)
async def test_an_event_that_is_no_json_is_another_protocol(document: bytes) -> None:
    with pytest.raises(EdgeLMError, match="does not speak OpenAI's protocol"):
        await streamed(b"data: " + document + b"\n\n")


async def test_pictures_that_were_stored_whole_are_sent_smaller(client: Client, endpoint: FakeEndpoint) -> None:
    noise = random.Random(0).randbytes(3 * 900 * 900)
    file = io.BytesIO()
    Image.frombytes("RGB", (900, 900), noise).save(file, "PNG")
    large, small = (f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (file.getvalue(), b"small"))
    broken = f"data:image/png;base64,{base64.b64encode(bytes(2 * 2**20)).decode()}"
    for _ in range(2):
        await ask(client, ChatRequest("starter", (Turn("user", "Look", images=(large, small, broken)),)))
    sent = [
        [part["image_url"]["url"] for part in request["messages"][0]["content"] if part["type"] == "image_url"]
        for request in endpoint.requests
    ]
    assert sent[0] == sent[1]
    assert sent[0][0].startswith("data:image/jpeg;base64,")
    assert len(sent[0][0]) <= MAX_URL_LEN < len(large)
    assert sent[0][1:] == [small, broken], "one that is small, and one that nobody can decode, are sent as they are"


def test_nothing_is_asked_about_an_endpoint_of_this_machine(tmp_path: Path) -> None:
    def link(endpoint: str | None) -> Link:
        return Link(endpoint=endpoint, api_key=None, runtime=tmp_path, log=tmp_path / "log")

    assert link(None).is_here
    assert link("http://127.0.0.1:11434/v1").is_here
    assert link("http://[::1]:1234/v1").is_here
    assert link("http://localhost/v1").is_here
    assert not link("http://192.168.1.5:11500/v1").is_here
    assert not link("https://localhost.example/v1").is_here


@pytest.mark.parametrize(
    ("contents", "reasoning", "text"),
    [
        (["<think>", "Hm, ", "2 < 3", "</think>", "\n\n", "Yes"], "Hm, 2 < 3", "Yes"),
        (["\n<th", "ink>\nHm</", "think", ">\nYes </think>"], "\nHm", "Yes </think>"),
        (["<think>never closed </thi"], "never closed </thi", ""),
        (["a <think> in the text"], "", "a <think> in the text"),
        (["<thin"], "", "<thin"),
        (["<b>", "bold"], "", "<b>bold"),
    ],
)
async def test_a_thought_in_the_content_is_reasoning(contents: list[str], reasoning: str, text: str) -> None:
    body = b"".join(b"data: " + chunk + b"\n\n" for chunk in said(*contents))
    assert (await streamed(body))[:2] == (reasoning, text)


async def test_another_kind_of_server() -> None:
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
    ("address", "url"),
    [
        ("http://127.0.0.1:11500", "http://127.0.0.1:11500/v1"),
        ("http://127.0.0.1:11500/", "http://127.0.0.1:11500/v1"),
        ("http://127.0.0.1:11500/v1/", "http://127.0.0.1:11500/v1"),
        ("gpu.local:8000", "http://gpu.local:8000/v1"),
        ("https://example.org/openai/v1", "https://example.org/openai/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_addresses(address: str, url: str) -> None:
    assert normalize_address(address) == url


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("http://localhost:1/v1", True), ("http://127.9.0.1", True), ("http://[::1]:1", True),
        ("http://localhost.gpu.example", False), ("http://127.gpu.example:1", False), ("http://10.0.0.1", False),
    ],
)  # fmt: skip
def test_addresses_of_this_machine(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


@pytest.mark.parametrize("status", [400, 500])
async def test_a_server_that_takes_no_late_system_message_gets_it_in_the_users(
    client: Client, endpoint: FakeEndpoint, status: int
) -> None:
    turns = (Turn("user", "a"), Turn("assistant", "b"), Turn("system", "passage"), Turn("user", "q"))
    endpoint.refuse_late_system = status
    for _ in range(2):
        assert (await ask(client, ChatRequest("starter", turns)))[0] == ANSWER
    roles = [[message["role"] for message in request["messages"]] for request in endpoint.requests]
    assert roles == [["user", "assistant", "system", "user"]] + 2 * [["user", "assistant", "user"]], "it is remembered"
    assert endpoint.requests[-1]["messages"][-1]["content"] == "passage\n\nq"


async def test_another_refusal_of_a_late_system_message_is_told(client: Client, endpoint: FakeEndpoint) -> None:
    turns = (Turn("user", "a"), Turn("system", "passage"), Turn("user", "q"))
    endpoint.refuse = (400, {"error": {"message": "no such model"}})
    with pytest.raises(RequestError, match="no such model"):
        await ask(client, ChatRequest("starter", turns))
    endpoint.refuse = None
    await ask(client, ChatRequest("starter", turns))
    assert [message["role"] for message in endpoint.requests[-1]["messages"]] == ["user", "system", "user"]


async def test_vectors(client: Client, endpoint: FakeEndpoint) -> None:
    assert await client.embed("minilm", ["a cat", "a dog"]) == [[1.0, 0.0], [0.0, 1.0]]
    endpoint.refuse_embeddings = True
    with pytest.raises(EngineError, match="signal 9"):
        await client.embed("minilm", ["a cat"])


@pytest.mark.parametrize("address", ["", "ftp://x", "http://", "http://x:99999", "http://x:y", "http://x/?a=b"])
def test_invalid_addresses(address: str) -> None:
    with pytest.raises(RequestError, match="is not an endpoint"):
        normalize_address(address)


def test_stats_survive_other_versions() -> None:
    stats = AnswerStats(prompt_tokens=3, engine="llama", tokens_per_second=2.5)
    assert stats_from_json(stats_to_json(stats)) == stats
    assert stats_from_json('{"prompt_tokens": 3, "of_tomorrow": 1}') == AnswerStats(prompt_tokens=3)
    assert stats_from_json("") is None
    odd = '{"reasoning_ms": Infinity, "prompt_tokens": NaN, "completion_tokens": 1e999, "drafted": -1, "engine": 4, '
    odd += '"context_size": 4096.0, "first_token_ms": 1e300, "accepted": "3", "tokens_per_second": 8}'
    assert stats_from_json(odd) == AnswerStats(context_size=4096, tokens_per_second=8)
    assert stats_from_json("[1]") is stats_from_json("{") is None


def test_a_running_front_is_found_and_a_stale_one_is_not(tmp_path: Path) -> None:
    assert find_front(tmp_path) is None
    file = tmp_path / "front.json"
    file.write_text(json.dumps({"pid": os.getpid(), "address": "http://127.0.0.1:1"}))
    assert find_front(tmp_path) == FrontRecord(os.getpid(), "http://127.0.0.1:1")
    file.write_text(json.dumps({"pid": os.getpid(), "address": "http://127.0.0.1:1", "key": "of the front"}))
    front = find_front(tmp_path)
    assert front
    assert front.headers == {"authorization": "Bearer of the front"}
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    file.write_text(json.dumps({"pid": int(process.stdout), "address": "http://127.0.0.1:1"}))
    assert find_front(tmp_path) is None
    for text in ("", "[]", '{"pid": "x"}', "{"):
        file.write_text(text)
        assert find_front(tmp_path) is None


@pytest.mark.parametrize("whose", ["folder", "file", "link", "writable folder"])
def test_a_front_that_another_user_may_have_written_is_not_found(
    whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    file, record = runtime / "front.json", FrontRecord(os.getpid(), "http://127.0.0.1:1")
    with announced(runtime, record):
        assert find_fronts(runtime) == [record]
        real, other = os.lstat, runtime if whose == "folder" else file
        if whose == "link":
            file.rename(tmp_path / "elsewhere.json")
            file.symlink_to(tmp_path / "elsewhere.json")
        elif whose == "writable folder":
            runtime.chmod(0o777)
        else:
            monkeypatch.setattr(Path, "lstat", lambda path: not_ours(real(path)) if path == other else real(path))
        assert find_fronts(runtime) == []
        assert find_front(runtime) is None


def not_ours(status: os.stat_result) -> os.stat_result:
    return os.stat_result([*status[:4], os.getuid() + 1, *status[5:]])


def test_fronts_of_the_same_library_come_first(tmp_path: Path) -> None:
    """All homes of a user may share a runtime folder."""
    other = FrontRecord(os.getpid(), "http://127.0.0.1:1", library="of another home")
    mine = FrontRecord(os.getppid(), "http://127.0.0.1:2", library="mine")
    with announced(tmp_path, other), announced(tmp_path, mine):
        assert find_front(tmp_path) == other
        assert find_fronts(tmp_path, "mine") == [mine, other]
        assert (other.serves("mine"), mine.serves("mine")) == (False, True)


@pytest.mark.parametrize(("library", "attaches"), [("mine", True), ("of another home", False)])
async def test_a_chat_attaches_to_a_server_of_its_library_only(
    endpoint: FakeEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, attaches: bool
) -> None:
    started: list[OwnFront] = []

    async def start(own: OwnFront) -> FrontRecord:
        started.append(own)
        return FrontRecord(os.getpid(), endpoint.address)

    monkeypatch.setattr(OwnFront, "start", start)
    with announced(tmp_path, FrontRecord(os.getpid(), endpoint.address, library="mine")):
        link = Link(endpoint=None, api_key=None, runtime=tmp_path, log=tmp_path / "serve.log", library=library)
        await link.client()
        await link.close()
    assert bool(started) is not attaches


async def test_a_chat_says_where_its_server_cannot_write_its_log(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in place of a folder")
    link = Link(endpoint=None, api_key=None, runtime=tmp_path / "run", log=tmp_path / "cache" / "edgelm" / "serve.log")
    with pytest.raises(EngineError, match=r"serve.log cannot be written: Not a directory; .*EDGELM_CACHE_DIR"):
        await link.client()
    await link.close()


@pytest.mark.parametrize(
    "name", ["HF_HUB_CACHE", "HF_HOME", "EDGELM_MODEL_DIRS", "EDGELM_CONFIG_DIR", "EDGELM_DATA_DIR"]
)
def test_folders_of_models_make_another_library(name: str, tmp_path: Path) -> None:
    home = {"HF_HOME": str(tmp_path / "hf"), "EDGELM_CONFIG_DIR": str(tmp_path / "config")}
    (tmp_path / "link").symlink_to(tmp_path)
    mine = load_config({}, home).library
    assert load_config({}, home | {name: str(tmp_path / "other")}).library != mine
    same = home | {"HF_HOME": str(tmp_path / "link" / "hf")}
    assert load_config({}, same).library == mine, "the same folders by another path"
    assert load_config({"model_dirs": [str(tmp_path)]}, home).library == mine, "a server with more models"


def test_a_front_is_found_until_it_ends_while_others_come_and_go(tmp_path: Path) -> None:
    first, second, third = (FrontRecord(pid, f"http://127.0.0.1:{pid}") for pid in (os.getpid(), os.getppid(), 1))
    gone = tmp_path / "front-999999999.json"
    gone.write_text(json.dumps({"pid": 999999999, "address": "http://127.0.0.1:1"}))
    with ExitStack() as stack:
        with announced(tmp_path, first):
            stack.enter_context(announced(tmp_path, second))
            assert find_fronts(tmp_path) == [first, second]
            assert not gone.exists()
        assert find_fronts(tmp_path) == [second]
        with announced(tmp_path, third):
            assert sorted(find_fronts(tmp_path)) == sorted([second, third])
        assert find_front(tmp_path) == second
    assert find_front(tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_a_front_whose_file_was_removed_is_recorded_again(tmp_path: Path) -> None:
    """A cleaner of temporary folders removes old files; another front may come before this one writes its own again."""
    first, second = (FrontRecord(pid, f"http://127.0.0.1:{pid}") for pid in (os.getpid(), os.getppid()))
    runtime = tmp_path / "run"
    with announced(runtime, first):
        shutil.rmtree(runtime)
        announce(runtime, first)
        assert find_fronts(runtime) == [first]
        assert not runtime.stat().st_mode & 0o077
        (runtime / "front.json").unlink()
        with announced(runtime, second):
            for _ in range(2):
                announce(runtime, first)
                assert find_fronts(runtime) == [second, first]
                assert len([*runtime.iterdir()]) == 2
    assert not list(runtime.iterdir())


SERVING = f"print({encode(Serving('http://127.0.0.1:5')).decode()!r}, end='', flush=True)"


@pytest.fixture
def front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], OwnFront]:
    """Return a front whose process runs the given code instead of `edgelm serve`."""

    def make(code: str) -> OwnFront:
        monkeypatch.setattr(parent, "Worker", partial(Worker, command=(sys.executable, "-c", code)))
        return OwnFront([], tmp_path / "logs" / "serve.log")

    return make


async def test_a_front_of_our_own_ends_when_its_input_closes(front: Callable[[str], OwnFront]) -> None:
    own = front(f"import sys; {SERVING}; sys.stdin.read()")
    assert (await own.start()).address == "http://127.0.0.1:5"
    worker = own._worker
    assert worker is not None
    assert not own.died
    await own.stop()
    assert worker.exit().code == 0


async def test_a_front_that_does_not_start_says_why(front: Callable[[str], OwnFront]) -> None:
    own = front("import sys; sys.exit('error: port 1 is taken; choose another')")
    with pytest.raises(EngineError, match="does not start: port 1 is taken; choose another") as caught:
        await own.start()
    assert "serve.log" in caught.value.hint


async def test_a_front_that_dies_is_noticed(front: Callable[[str], OwnFront]) -> None:
    own = front(SERVING)
    await own.start()
    assert own._worker is not None
    own._worker.exit()
    assert own.died
    await own.stop()
    assert not own.died


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 10**400, True, "1", None])
def test_what_is_no_finite_number_is_unknown(value: object) -> None:
    assert number(value) is None
    assert whole(value) is None


def test_a_server_in_a_folder_of_others_says_that_nobody_finds_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = FrontRecord(os.getpid(), "http://127.0.0.1:1")
    for mode, found in ((0o700, record), (0o775, None)):
        tmp_path.chmod(mode)
        with announced(tmp_path, record):
            assert find_front(tmp_path) == found
        assert ("others may write to it" in caplog.text) == (found is None)


@pytest.mark.parametrize(
    ("endpoint", "runs_at", "where"),
    [
        (None, "", ""),
        (None, "127.0.0.1:8000", ""),
        (None, "box:8000, 127.0.0.1:8000", "box:8000"),
        ("http://192.168.1.5:11500/v1", "", "http://192.168.1.5:11500/v1"),
    ],
)
async def test_a_front_here_may_send_what_is_written_elsewhere(
    tmp_path: Path, endpoint: str | None, runs_at: str, where: str
) -> None:
    link = Link(endpoint=endpoint, api_key=None, runtime=tmp_path, log=tmp_path / "log")
    entries = [ModelEntry("big", remote=runs_at), ModelEntry("small")]

    async def models(*, again: bool = False) -> list[ModelEntry]:
        link._models = entries
        return entries

    link.models = models  # type: ignore[method-assign]
    assert await link.destination("big") == where
    assert await link.destination("small") == (endpoint or "")


def test_the_tokens_of_a_chunk_are_counted() -> None:
    reading = AnswerStream(0.0)
    several = reading.take({"choices": [{"delta": {"content": "one two"}}], "edgelm": {"tokens": 3}})
    assert several == Delta("one two", tokens=3)
    assert reading.take({"choices": [{"delta": {"content": " "}}], "edgelm": {"tokens": -1}}) == Delta(" ")
