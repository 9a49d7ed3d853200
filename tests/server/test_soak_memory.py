"""Mixed requests that are all new, thousands of them in `make soak`: the memory of an engine stays where it was.

Schemas, tools, embeddings, stop strings, several choices, counts, and streams that their clients leave. Half of the
requests fill what has a bound: grammars, tokens of prompts, drafts, idle conversations.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.counts import Count
from tests.server.harness import Figures, Front, figures, serving

REQUESTS = Count(test=40, soak=12_000)
CLIENTS = 3
LIMIT_S = 120.0
MAX_GROWTH_BYTES = Count(test=128, soak=8) * 2**20  # of the engine, in the second half
WORDS = "river stone music winter garden paper engine window silver forest market bread letter harbor candle".split()

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads memory and open files in /proc")


@pytest.fixture
def front(own: dict[str, str], tmp_path: Path) -> Iterator[Front]:
    small = ("--prefix-cache-ram", "0.05", "--prefix-cache-disk", "0.05")
    auto = {"EDGELM_SPEC": "auto"}
    with serving(own | auto, "starter", "--threads", "1", *small, log=tmp_path / "log") as running:
        assert running.chat("starter", max_tokens=1).status_code == 200
        yield running


class Client:
    """Sends requests that no other client sends."""

    def __init__(self, http: httpx2.AsyncClient, rng: random.Random, outcomes: Counter[str]) -> None:
        self._http = http
        self._rng = rng
        self._outcomes = outcomes

    def text(self, num_words: int) -> str:
        return " ".join(self._rng.choice(WORDS) for _ in range(num_words))

    def name(self) -> str:
        return f"{self._rng.choice(WORDS)}{self._rng.randrange(10**6)}"

    def schema(self) -> dict[str, Any]:
        kinds = [{"type": "string", "maxLength": self._rng.randrange(3, 20)}, {"type": "boolean"}, {"type": "integer"}]
        kinds.append({"enum": [self.name() for _ in range(4)]})
        properties = {self.name(): self._rng.choice(kinds) for _ in range(self._rng.randrange(1, 5))}
        return {"type": "object", "properties": properties, "required": [*properties][:2]}

    def chat(self, **fields: Any) -> dict[str, Any]:
        turns = [{"role": "user", "content": self.text(self._rng.randrange(5, 60))}]
        return {"model": "starter", "messages": turns, "max_tokens": self._rng.randrange(4, 40)} | fields

    def body(self, kind: str) -> tuple[str, dict[str, Any]]:
        """Return path and body of a request of a kind."""
        chat, rng = "/v1/chat/completions", self._rng
        match kind:
            case "schema":
                form = {"type": "json_schema", "json_schema": {"name": "x", "schema": self.schema()}}
                return chat, self.chat(response_format=form)
            case "tools":
                tools = [{"name": self.name(), "parameters": self.schema()} for _ in range(rng.randrange(1, 4))]
                functions = [{"type": "function", "function": tool} for tool in tools]
                return chat, self.chat(tools=functions, tool_choice=rng.choice(["auto", "required"]))
            case "stop":
                return chat, self.chat(stop=[self.name(), "the"])
            case "choices":
                return chat, self.chat(n=rng.randrange(2, 4), temperature=1.0, logprobs=True, top_logprobs=3)
            case "left":
                return chat, self.chat(max_tokens=200, stream=True)
            case "embeddings":
                return "/v1/embeddings", {"model": "starter", "input": [self.text(20) for _ in range(4)]}
            case "messages":
                turns = [{"role": "user", "content": self.text(30)}]
                return "/v1/messages", {"model": "starter", "messages": turns, "max_tokens": 20}
            case "responses":
                return "/v1/responses", {"model": "starter", "input": self.text(30), "max_output_tokens": 20}
            case _:
                return "/v1/responses/input_tokens", {"model": "starter", "input": self.text(300)}

    async def send(self, kind: str) -> None:
        path, body = self.body(kind)
        async with self._http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200, (kind, await answer.aread())
            if kind == "left":
                left = self._rng.randrange(2, 20)
                async for _ in answer.aiter_lines():
                    if not (left := left - 1):
                        break
            else:
                await answer.aread()
        self._outcomes[kind] += 1


KINDS = ("schema", "tools", "stop", "choices", "left", "embeddings", "messages", "responses", "count")


async def load(front: Front, rng: random.Random, count: int, outcomes: Counter[str]) -> Figures:
    """Send so many requests, some at a time; return the figures afterwards."""
    turns = asyncio.Semaphore(CLIENTS)
    async with httpx2.AsyncClient(base_url=front.address, timeout=LIMIT_S, trust_env=False) as http:

        async def send(number: int) -> None:
            async with turns:
                await Client(http, random.Random(rng.random()), outcomes).send(KINDS[number % len(KINDS)])

        for first in range(0, count, 256):
            await asyncio.gather(*(send(number) for number in range(first, min(first + 256, count))))
    return await asyncio.to_thread(figures, front, "starter")


@pytest.mark.timeout(Count(test=300, soak=10_800))
async def test_memory_under_mixed_load_is_flat(front: Front) -> None:
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")
    rng, outcomes = random.Random(seed), Counter[str]()
    pid = front.ps("starter")["pid"]
    warm = await load(front, rng, REQUESTS // 2, outcomes)
    after = await load(front, rng, REQUESTS // 2, outcomes)
    print(f"{outcomes.total()} requests: {dict(outcomes)}\nafter the first half: {warm}\nafter the second: {after}")
    assert front.ps("starter")["pid"] == pid
    assert after.engine_bytes < warm.engine_bytes + MAX_GROWTH_BYTES
    assert after.front_bytes < warm.front_bytes + MAX_GROWTH_BYTES
    assert after.engine_files <= warm.engine_files + 8
