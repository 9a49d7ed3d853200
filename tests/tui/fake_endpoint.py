"""An OpenAI-compatible endpoint without a model: it streams fixed answers at a set rate, and fails on request.

`python -m tests.tui.fake_endpoint [PORT [TOKENS_PER_SECOND [TOKENS]]]` serves it for a look at the screen.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

ANSWER = """Quicksort picks a *pivot* and splits the list around it:

1. what is **smaller** goes left,
2. what is larger goes right.

```python
def quicksort(items: list[int]) -> list[int]:
    \"\"\"Return the items in order.\"\"\"
    if len(items) < 2:
        return items
    pivot, *rest = items
    left = [x for x in rest if x < pivot]  # smaller
    return quicksort(left) + [pivot] + quicksort([x for x in rest if x >= pivot])
```

| case | time |
|---|---|
| average | `O(n log n)` |
| worst | `O(n²)` |

> It is not stable.
"""


@dataclass
class FakeEndpoint:
    """The endpoint; its fields may be changed at any time."""

    answers: list[str] = field(default_factory=lambda: [ANSWER])  # the next request gets the first; the last one stays
    tokens_per_second: float = 0.0  # 0: as fast as it can
    first_token_s: float = 0.0
    is_edgelm: bool = True
    models: list[str] = field(default_factory=lambda: ["starter", "qwen3-4b-q4_k_m.gguf"])
    context: int = 4096
    paths: dict[str, str] = field(default_factory=dict)  # of models
    other_names: list[str] = field(default_factory=list)  # of models that it lists by one name
    seeing: list[str] = field(default_factory=list)  # the models that read pictures
    runs_at: dict[str, str] = field(default_factory=dict)  # models that other servers run behind it
    die_after: int | None = None  # tokens, then an error event as the front sends it when its engine died
    drop_after: int | None = None  # tokens, then the connection is cut
    stall_after: int | None = None  # tokens, then nothing more
    end_early_after: int | None = None  # tokens, then a clean end without a finish reason
    refuse: tuple[int, dict[str, Any]] | None = None  # status and body for every chat
    loading: list[float] = field(default_factory=list)  # progress values; one 503 for each
    refuse_key: bool = False
    refuse_usage: bool = False
    refuse_reasoning: bool = False  # in a message, as edgelm 0.3.1 does
    refuse_late_system: int = 0  # the status that a system message behind the first message gets; 0: it is taken
    max_chars: int | None = None  # of all messages; more are refused as too long for the context
    embedding: dict[str, bool] = field(default_factory=dict)  # embedding models, and whether they are loaded
    refuse_embeddings: bool = False
    stall_embeddings: bool = False
    embedded: list[list[str]] = field(default_factory=list)  # the inputs of each request for vectors
    finish_reason: str = "stop"  # as edgelm says it
    calls: list[list[dict[str, Any]]] = field(default_factory=list)  # deltas of calls; each request takes the first
    drafted: str = ""  # tokens that hold one of these characters were drafted
    reasoning: str = ""
    reasoning_field: str = "reasoning_content"
    reasoning_tokens: int | None = None  # in the usage
    stall_after_reasoning: bool = False  # then nothing more
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    cancelled: int = 0
    alternatives: list[tuple[str, float]] = field(
        default_factory=lambda: [(" likely", 0.6), (" other", 0.3), ("<end>", 0.1)]
    )
    probes: list[dict[str, Any]] = field(default_factory=list)  # requests for alternatives and titles
    title: str = ""  # for requests that do not stream
    stall_titles: bool = False
    cancelled_titles: int = 0
    unused_gpu: str = ""  # of its engines
    busy: int = 0  # requests of others, as /edgelm/ps tells them
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # of the engine, by name
    watched: list[str] = field(default_factory=list)  # paths with which events were asked for
    unwatched: int = 0
    address: str = ""

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[FakeEndpoint]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", port)
        self.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def __post_init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._watchers: list[asyncio.StreamWriter] = []

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split("\r\n", 1)[0].split(" ")
        lines = [line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line]
        headers = {name.lower(): value for name, value in lines}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if (method, path) == ("POST", "/v1/chat/completions"):
            self.headers.append(headers)
            request = json.loads(body)
            if not request.get("stream"):
                reply = self._likeliest(request)
                if self.stall_titles:
                    await reader.read(1)
                    self.cancelled_titles += 1
                    return False
                await _send(writer, 200, reply)
                return True
            return await self._chat(request, reader, writer)
        if method == "GET" and path.startswith("/edgelm/events") and self.is_edgelm:
            await self._tell(path, writer, reader)
            return False
        if (method, path) == ("POST", "/v1/embeddings"):
            status, document = self._embed(json.loads(body)["input"])
            if self.stall_embeddings:
                await asyncio.Event().wait()
        elif (method, path) == ("POST", "/v1/messages/count_tokens") and self.is_edgelm:
            content = json.loads(body)["messages"][-1]["content"]
            status, document = 200, {"input_tokens": 10 + 256 * sum(part["type"] == "image" for part in content)}
        elif (method, path) == ("POST", "/tokenize"):
            pieces = re.findall(r"\s*\S+|\s+$", json.loads(body)["content"])
            status, document = 200, {"tokens": [{"id": i, "piece": piece} for i, piece in enumerate(pieces)]}
        else:
            status, document = self._page(path)
        await _send(writer, status, document)
        return True

    def _page(self, path: str) -> tuple[int, dict[str, Any]]:
        if path == "/v1/models" and self.refuse_key:
            return 401, {"error": {"message": "the API key is missing or wrong"}}
        if path == "/v1/models":
            own = {"edgelm": {"bytes": 3_900_000, "context": self.context, "architecture": "llama",
                              "quantization": "Q8_0", "loaded": True}} if self.is_edgelm else {}  # fmt: skip
            data = [{"id": name, "object": "model", "created": 1, "owned_by": "test", **own} for name in self.models]
            data += [{"id": name, "edgelm": {"kind": "embedding", "loaded": loaded}}
                     for name, loaded in self.embedding.items()]  # fmt: skip
            for model in data:
                if model["id"] in self.seeing:
                    model["edgelm"] = {**model["edgelm"], "pictures": True}
                if model["id"] in self.runs_at:
                    model["edgelm"] = {**model["edgelm"], "remote": self.runs_at[model["id"]]}
                if model["id"] in self.paths:
                    model["edgelm"] = {"path": self.paths[model["id"]]}
            return 200, {"object": "list", "data": data}
        if (name := unquote(path.removeprefix("/v1/models/"))) in [*self.models, *self.other_names]:
            own = {"path": self._path_of(self.models[0])} | ({"pictures": True} if name in self.seeing else {})
            return 200, {"id": path, "object": "model", "edgelm": own}
        if path == "/edgelm/ps" and self.is_edgelm:
            state = {"state": "starting", "progress": self.loading[0]} if self.loading else {"state": "ready"}
            state |= {"requests": self.busy, "unused_gpu": self.unused_gpu or None}
            return 200, {"pid": 1, "models": [{"model": name, "path": self._path_of(name), "error": None,
                                               "progress": None, **state}
                                              for name in self.models]}  # fmt: skip
        return 404, {"error": {"message": f"there is nothing at {path}", "code": "not_found"}}

    @staticmethod
    def _path_of(name: str) -> str:
        return f"/models/{name}.gguf"

    def _embed(self, texts: list[str]) -> tuple[int, dict[str, Any]]:
        """Return vectors of two numbers: whether a text is about cats, and whether it is not."""
        self.embedded.append(texts)
        if self.refuse_embeddings:
            return 500, {"error": {"message": "the engine was ended by signal 9"}}
        cats = [float("feline" in text.lower() or "cat" in text.lower()) for text in texts]
        return 200, {"data": [{"embedding": [cat, 1 - cat], "index": i} for i, cat in enumerate(cats)]}

    def _likeliest(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the alternatives behind the beginning of an answer."""
        self.probes.append(request)
        top = [
            {"token": text, "logprob": math.log(share), "bytes": list(text.encode()) if text != "<end>" else []}
            for text, share in self.alternatives
        ]
        entry = {**top[0], "top_logprobs": top}
        return {
            "choices": [{"message": {"role": "assistant", "content": self.title}, "logprobs": {"content": [entry]}}]
        }

    async def _tell(self, path: str, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        """Send events of the engine, and keep the connection until the watcher leaves."""
        self.watched.append(path)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for name, document in self.events:
            writer.write(f"event: {name}\ndata: {json.dumps(document)}\n\n".encode())
        self._watchers.append(writer)
        await writer.drain()
        try:
            await reader.read(1)
        finally:
            self._watchers.remove(writer)
            self.unwatched += 1

    def _logprobs(self, token: str) -> dict[str, Any]:
        top = [{"token": text, "logprob": math.log(share), "bytes": []} for text, share in self.alternatives]
        return {"content": [{"token": token, "logprob": -0.1, "bytes": list(token.encode()), "top_logprobs": top}]}

    def _tell_step(self, number: int, token: str) -> None:
        """Send the step of a token to those who watch."""
        top = [{"text": text, "logprob": math.log(share)} for text, share in self.alternatives]
        tokens = [{"id": number, "text": token, "logprob": -0.1, "top": top}]
        chunk = {"sequence": 1, "prompt": 50, "start": 50 + number, "computed": 1, "new": 1, "tokens": tokens}
        step = {"step": number + 1, "at": time.time(), "ms": 5, "running": 1, "waiting": 0, "chunks": [chunk]}
        for watcher in self._watchers:
            watcher.write(f"event: step\ndata: {json.dumps(step)}\n\n".encode())

    async def _chat(self, request: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self.requests.append(request)
        if self.loading:
            progress = self.loading.pop(0)
            error = {"code": "model_loading", "message": "the model is loading", "progress": progress}
            await _send(writer, 503, {"error": error}, "Retry-After: 0.1\r\n")
            return True
        if self.refuse_usage and "stream_options" in request:
            await _send(writer, 400, {"error": {"message": "unknown field stream_options"}})
            return True
        if self.refuse_reasoning and any("reasoning_content" in message for message in request["messages"]):
            await _send(writer, 400, {"error": {"message": "there is no field messages.1.reasoning_content"}})
            return True
        if self.refuse_late_system and any(message["role"] == "system" for message in request["messages"][1:]):
            await _send(writer, self.refuse_late_system, {"error": {"message": "System message must be first."}})
            return True
        if self.max_chars is not None and sum(len(item["content"]) for item in request["messages"]) > self.max_chars:
            error = {"code": "context_length_exceeded", "message": "the prompt is too long"}
            await _send(writer, 400, {"error": error})
            return True
        if self.refuse is not None:
            await _send(writer, *self.refuse)
            return True
        text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        left = asyncio.create_task(reader.read(1))
        try:
            await self._stream(re.findall(r"\s*\S+\s*?(?=\s|$)|\s+", text), request, writer, left)
        finally:
            if left.done():
                self.cancelled += 1
            left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        return False

    async def _stream(
        self, tokens: list[str], request: dict[str, Any], writer: asyncio.StreamWriter, left: asyncio.Task[bytes]
    ) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        started = time.perf_counter()
        await asyncio.sleep(self.first_token_s)
        _event(writer, _chunk({"role": "assistant"}))
        for i, part in enumerate(re.findall(r"\S+\s*", self.reasoning)):
            _event(writer, _chunk({self.reasoning_field: part}))
            await writer.drain()
            if left.done():
                return
            if self.tokens_per_second:
                due = started + self.first_token_s + (i + 1) / self.tokens_per_second
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
        if self.stall_after_reasoning:
            await left
            return
        started = time.perf_counter() - self.first_token_s
        for i, token in enumerate(tokens):
            if i == self.die_after:
                _event(writer, {"error": {"code": "engine_died", "message": "the engine was ended by signal 9"}})
                await writer.drain()
                return
            if i == self.drop_after:
                writer.transport.abort()
                return
            if i == self.end_early_after:
                return
            if i == self.stall_after:
                await left
                return
            own = {"edgelm": {"drafted": [[0, len(token)]]}} if set(self.drafted) & set(token) else {}
            self._tell_step(i, token)
            chunk = _chunk({"content": token}, logprobs=self._logprobs(token) if request.get("logprobs") else None)
            _event(writer, {**chunk, **own})
            await writer.drain()
            if left.done():
                return
            if self.tokens_per_second:
                due = started + self.first_token_s + (i + 1) / self.tokens_per_second
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
        self._end(writer, len(tokens), len(json.dumps(request["messages"])) // 4)
        await writer.drain()

    def _end(self, writer: asyncio.StreamWriter, count: int, prompt: int) -> None:
        for part in self.calls.pop(0) if self.calls else ():
            _event(writer, _chunk({"tool_calls": [part]}))
        thought = self.reasoning_tokens
        own = {
            "finish_reason": self.finish_reason,
            "timings": {"queue_ms": 0.1, "prompt_ms": 180.0, "first_token_ms": 210.0, "decode_ms": 1000.0,
                        "decode_tokens_per_second": 41.3},
            "speculation": {"drafted": 40, "accepted": 31},
            "cached_tokens": 0,
            "context": {"used": prompt + count, "size": self.context},
            "engine": "llama",
            "device": "cpu",
        }  # fmt: skip
        extra = {"edgelm": own} if self.is_edgelm else {}
        _event(writer, {**_chunk({}, "stop"), **extra})
        usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count} | (
            {} if thought is None else {"completion_tokens_details": {"reasoning_tokens": thought}}
        )
        _event(writer, {**_chunk({}), "choices": [], "usage": usage, **extra})
        writer.write(b"data: [DONE]\n\n")


def _chunk(
    delta: dict[str, Any], finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    return {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "starter", "choices": [choice]}


def _event(writer: asyncio.StreamWriter, document: dict[str, Any]) -> None:
    writer.write(b"data: " + json.dumps(document).encode() + b"\n\n")


async def _send(writer: asyncio.StreamWriter, status: int, document: dict[str, Any], extra: str = "") -> None:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def _main(port: int = 0, tokens_per_second: float = 40.0, tokens: int = 0) -> None:
    repeats = -(-tokens // len(re.findall(r"\S+", ANSWER)))
    fake = FakeEndpoint(tokens_per_second=tokens_per_second, first_token_s=0.3)
    if repeats:
        fake.answers = ["\n".join([ANSWER] * repeats)]
    engine = {"model": "starter", "engine": "llama", "device": "cpu", "context": 4096, "capacity": 8192, "slots": 4}
    fake.events = [("engine", engine)]
    async with fake.serve(port) as endpoint:
        print(endpoint.address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(*(int(value) for value in sys.argv[1:])))
