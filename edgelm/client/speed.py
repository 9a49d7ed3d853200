"""Prompt and decode speed of an endpoint: streamed completions, timed where a user's program reads them.

Owns the timed requests. Prompts are random tokens, never used twice, so that the prefix cache does not help; nothing is
drafted, and the tokens that end an answer are forbidden. Knows nothing of the process that answers.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from edgelm.base.errors import EngineError
from edgelm.base.runtime import FrontRecord
from edgelm.client.failures import detail_of
from edgelm.client.json_values import mapping
from edgelm.jobs.speed import SpeedTest, tokens_per_second

CONNECT_S, ANSWER_S = 10.0, 900.0  # an answer may wait for the engine to load
FORBIDDEN = -100.0  # the least bias of OpenAI's API


@dataclass(frozen=True, slots=True)
class Served:
    """A model of an endpoint, and what the requests need to know of its vocabulary."""

    front: FrontRecord
    model: str
    num_vocab: int
    stop_ids: Sequence[int]

    async def load(self) -> None:
        """Let the endpoint load the model. Raises EngineError."""
        async with self._client() as client:
            await _stream(client, "/models/load", {"model": self.model})

    async def measure(self, test: SpeedTest, repetitions: int) -> list[float]:
        """Return tokens per second of each repetition, after a warm-up. Raises EngineError."""
        async with self._client() as client:
            runs = [await self._run(client, test) for _ in range(repetitions + 1)]
        return [round(speed, 2) for speed in runs[1:]]

    def _client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            base_url=self.front.address,
            headers=self.front.headers,
            verify=self.front.tls(),
            timeout=httpx2.Timeout(ANSWER_S, connect=CONNECT_S),
            trust_env=False,
        )

    async def _run(self, client: httpx2.AsyncClient, test: SpeedTest) -> float:
        bodies = [self._body(test) for _ in range(test.parallel)]

        async def run_sequence(body: dict[str, Any]) -> list[float]:
            started_at = time.perf_counter()
            events = await _stream(client, "/v1/completions", body)
            return [started_at, *_token_times(events, body["max_tokens"])]

        return tokens_per_second(test, await asyncio.gather(*map(run_sequence, bodies)))

    def _body(self, test: SpeedTest) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": random.choices(range(self.num_vocab), k=max(test.prompt, 1)),
            "max_tokens": test.decode + 1 if test.decode else 1,
            "temperature": 0,
            "logit_bias": {str(token): FORBIDDEN for token in self.stop_ids},
            "speculation": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


Events = list[tuple[float, str]]  # when a line of a stream was read, and the line


async def _stream(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> Events:
    """Send a request; return the lines of its answer with their times. Raises EngineError."""
    events: Events = []
    try:
        async with client.stream("POST", path, json=body) as response:
            async for line in response.aiter_lines():
                events.append((time.perf_counter(), line))
    except httpx2.HTTPError as error:
        raise EngineError(f"the endpoint broke: {str(error) or type(error).__name__}") from None
    if response.status_code != 200:
        raise EngineError(f"the endpoint refuses a request: {_reason(events[-1][1] if events else '')}")
    return events


def _token_times(events: Events, num_tokens: int) -> list[float]:
    """Return when each token of a completion arrived. Raises EngineError for another number of tokens.

    A token that has no text, such as a part of a character, comes with a later one: their times are spread evenly.
    """
    times: list[float] = []
    usage: dict[str, Any] = {}
    drafted = False
    for read_at, line in events:
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise EngineError(f"the endpoint failed: {detail_of(event)}")
        usage = mapping(event.get("usage")) or usage
        for choice in event.get("choices", ()):
            times.append(read_at)
            drafted |= bool(mapping(mapping(choice.get("edgelm")).get("speculation")).get("drafted"))
    count = usage.get("completion_tokens")
    if count != num_tokens or not times:
        raise EngineError(f"the model answered with {count} tokens in place of {num_tokens}", "try --in-process")
    if drafted:
        raise EngineError("the endpoint drafted tokens, although it was asked not to")
    return [times[index * len(times) // num_tokens] for index in range(num_tokens - 1)] + times[-1:]


def _reason(answer: str) -> str:
    try:
        return detail_of(json.loads(answer)) or "no reason given"
    except ValueError:
        return "no reason given"
