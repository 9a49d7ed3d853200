"""Many streams at once, and clients that leave at every moment: nothing stays open, and memory comes back."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from edgelm.server.engines.process import KEPT_S
from tests.counts import Count
from tests.server.harness import LIMIT_S, Figures, Front, Watch, figures, serving, until
from tests.server.stream_forms import CHECKS, check_error, check_stream

LEAVING = Count(test=60, soak=1000)
LEAVING_AT_ONCE = 12
STREAMS = Count(test=60, soak=300)
STREAMS_LIMIT_S = 280.0
MAX_HEALTH_S = 5.0
MAX_FRONT_GROWTH_BYTES = 32 * 2**20
MAX_ENGINE_GROWTH_BYTES = 256 * 2**20  # the prefix cache keeps prompts of clients that left
MAX_FILES_GROWTH = 8
LONG = 400  # tokens of an answer that its client leaves
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset, and not politely
TOOL = {"name": "look", "description": "Look up", "parameters": {"type": "object", "properties": {"a": {}}}}

PATHS = [path for path in CHECKS if path != "/infill"]  # for which the starter has no marks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads memory and open files in /proc")


@pytest.fixture
def front(own: dict[str, str], tmp_path: Path) -> Iterator[Front]:
    with serving(own, "starter", log=tmp_path / "log") as running:
        for form in ("text", "json_object"):  # starts the engine and what it needs for grammars
            assert running.chat("starter", max_tokens=1, response_format={"type": form}).status_code == 200
        yield running
    assert (tmp_path / "log").read_text() == ""


def text_body(path: str, text: str, max_tokens: int) -> dict[str, Any]:
    """Return a body of a dialect."""
    turns = [{"role": "user", "content": text}]
    fields: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": turns, "max_tokens": max_tokens},
        "/v1/completions": {"prompt": text, "max_tokens": max_tokens},
        "/v1/responses": {"input": text, "max_output_tokens": max_tokens},
        "/v1/messages": {"messages": turns, "max_tokens": max_tokens},
        "/v1/messages/count_tokens": {"messages": turns},
        "/v1/responses/input_tokens": {"input": text},
        "/completion": {"prompt": text, "n_predict": max_tokens},
    }
    return {"model": "starter", **fields[path]}


def settled(front: Front) -> Figures:
    """Wait until no request is open, and connections that are only kept are closed; return the figures then."""
    until("no request is open", lambda: (now := front.ps("starter"))["requests"] == 0 and now["idle_s"] > 0)
    time.sleep(KEPT_S + 1)
    assert front.chat("starter", max_tokens=1).status_code == 200  # closes the kept connections that are too old
    return figures(front, "starter")


def check_growth(before: Figures, after: Figures) -> None:
    print(f"before: {before}\nafter:  {after}")
    assert after.front_bytes < before.front_bytes + MAX_FRONT_GROWTH_BYTES
    assert after.engine_bytes < before.engine_bytes + MAX_ENGINE_GROWTH_BYTES
    assert after.front_files <= before.front_files + MAX_FILES_GROWTH
    assert after.engine_files <= before.engine_files + MAX_FILES_GROWTH


class LeavingClient:
    """A connection that sends a request, or a part of it, and closes before the answer is complete."""

    def __init__(self, front: Front, rng: random.Random) -> None:
        self._address = urlsplit(front.address)
        self._rng = rng
        self.path = rng.choice([*PATHS, *PATHS, "/v1/messages/count_tokens", "/v1/responses/input_tokens"])
        self.moment = rng.choice([*MOMENTS])

    async def leave(self) -> None:
        assert self._address.hostname
        self.reader, self.writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        try:
            async with asyncio.timeout(LIMIT_S):
                await MOMENTS[self.moment](self)
        finally:
            if self._rng.random() < 0.5:
                self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.writer.transport.abort()

    async def send(self, *, stream: bool, share: float = 1.0) -> None:
        wanted = text_body(self.path, f"A long story, number {self._rng.random()}", LONG) | {"stream": stream}
        content = json.dumps(wanted).encode()
        head = f"POST {self.path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        head += "connection: close\r\n" if stream else ""  # it reads to the end of a short one
        self.writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode())
        self.writer.write(content[: int(share * len(content))])
        await self.writer.drain()

    async def pause(self, longest_s: float) -> None:
        await asyncio.sleep(self._rng.uniform(0, longest_s))

    async def in_the_body(self) -> None:
        await self.send(stream=True, share=self._rng.uniform(0, 0.99))
        await self.pause(0.05)

    async def at_once(self) -> None:
        await self.send(stream=self._rng.random() < 0.5)

    async def while_it_waits(self) -> None:
        await self.send(stream=False)
        await self.pause(0.4)

    async def in_the_stream(self) -> None:
        await self.send(stream=True)
        for _ in range(self._rng.randrange(1, 30)):
            if not await self.reader.readline():
                break

    async def after_half_a_close(self) -> None:
        await self.send(stream=self._rng.random() < 0.5)
        self.writer.write_eof()
        await self.pause(0.4)


MOMENTS: dict[str, Callable[[LeavingClient], Any]] = {
    "in the body": LeavingClient.in_the_body,
    "at once": LeavingClient.at_once,
    "while it waits": LeavingClient.while_it_waits,
    "in the stream": LeavingClient.in_the_stream,
    "after half a close": LeavingClient.after_half_a_close,
}


async def leave_all(front: Front, rng: random.Random, count: int) -> tuple[Counter[str], str]:
    """Let clients come and leave, some at a time; return how many left at which moment, and who stayed longest."""
    turns = asyncio.Semaphore(LEAVING_AT_ONCE)
    clients = [LeavingClient(front, random.Random(rng.random())) for _ in range(count)]

    async def run(client: LeavingClient) -> tuple[float, str]:
        async with turns:
            came = time.monotonic()
            await client.leave()
            return time.monotonic() - came, f"{client.path} {client.moment}"

    longest_s, who = max(await asyncio.gather(*map(run, clients)))
    return Counter(client.moment for client in clients), f"{longest_s:.1f} s {who}"


@pytest.mark.timeout(Count(test=300, soak=1800))
async def test_clients_that_leave(front: Front) -> None:
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    engine = front.ps("starter")["pid"]
    before = figures(front, "starter")
    began = time.monotonic()
    with Watch(front) as watch:
        moments, longest = await leave_all(front, rng, LEAVING)
    left_s = time.monotonic() - began
    after = await asyncio.to_thread(settled, front)
    print(f"{LEAVING} clients left within {left_s:.1f} s, the slowest after {longest}: {dict(moments)}")
    print(f"/health: at most {watch.slowest_s * 1e3:.0f} ms")
    check_growth(before, after)
    assert front.ps("starter")["pid"] == engine
    watch.check(MAX_HEALTH_S)


def stream_body(path: str, number: int) -> dict[str, Any]:
    """Return a body of a dialect, some with a tool and some with another form."""
    wanted = text_body(path, f"client {number}", 4 + number % 13) | {"stream": True}
    chat = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required", "max_tokens": 40}
    more: dict[str, list[dict[str, Any]]] = {
        "/v1/chat/completions": [{"stream_options": {"include_usage": True}}, chat, {"n": 2, "logprobs": True}],
        "/v1/completions": [{"stream_options": {"include_usage": True}}, {"logprobs": 2}, {"prompt": ["a", "b"]}],
        "/v1/responses": [{"store": False}, {"tools": [{"type": "function", **TOOL}], "tool_choice": "required"}],
        "/v1/messages": [
            {"tools": [{"name": "look", "input_schema": TOOL["parameters"]}], "tool_choice": {"type": "any"}}
        ],
        "/completion": [{"json_schema": {"type": "boolean"}}, {"stop": ["e"]}],
    }
    forms = [{}, *more[path]]
    return wanted | forms[number // len(PATHS) % len(forms)]


async def streamed(http: httpx2.AsyncClient, number: int, outcomes: Counter[str]) -> None:
    """Stream an answer to its end, again after the pause that a busy server asks for."""
    path = PATHS[number % len(PATHS)]
    while True:
        async with http.stream("POST", path, json=stream_body(path, number)) as answer:
            content = await answer.aread()
        if answer.status_code != 429:
            break
        check_error(path, content)
        outcomes["told to come back"] += 1
        await asyncio.sleep(float(answer.headers["retry-after"]))
    assert answer.status_code == 200, content
    outcomes["events"] += check_stream(path, content)
    outcomes[path] += 1


@pytest.mark.timeout(400)
async def test_many_streams_of_all_dialects(front: Front) -> None:
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    options: dict[str, Any] = {"limits": limits, "timeout": STREAMS_LIMIT_S, "trust_env": False}
    async with httpx2.AsyncClient(base_url=front.address, **options) as http:
        before = figures(front, "starter")
        began, outcomes = time.monotonic(), Counter[str]()
        with Watch(front) as watch:
            await asyncio.gather(*(streamed(http, number, outcomes) for number in range(STREAMS)))
    took_s = time.monotonic() - began
    print(f"{STREAMS} streams in {took_s:.1f} s: {dict(outcomes)}; /health {watch.slowest_s * 1e3:.0f} ms")
    assert sum(outcomes[path] for path in PATHS) == STREAMS
    check_growth(before, await asyncio.to_thread(settled, front))
    watch.check(MAX_HEALTH_S)
