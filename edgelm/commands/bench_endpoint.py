"""`edgelm bench` of a model that another server runs: what a client of it sees, by the clock and its token counts.

Prompts are random words, so that no prefix cache helps; how many tokens they are, the server tells. Whether it drafts
is its own affair.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgelm.base.errors import EngineError
from edgelm.client.json_values import mapping, whole
from edgelm.commands.endpoints import Endpoint
from edgelm.jobs.speed import SpeedTest

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father power"
).split()
FIRST = 40  # words of the request that tells how many tokens a word is
SHORT = 8  # words of the prompt of an answer whose speed is measured


class Run(NamedTuple):
    """One streamed answer."""

    began: float
    first: float
    last: float
    num_prompt: int  # tokens that were computed
    num_tokens: int  # of the answer


def bench_endpoint(endpoint: Endpoint, tests: Sequence[SpeedTest], repetitions: int, *, as_json: bool) -> None:
    """Print the speed of each test. Raises EngineError."""
    rows = asyncio.run(_measure(endpoint, tests, repetitions))
    shown = {"model": endpoint.model, "endpoint": endpoint.where, "results": rows, "through": "endpoint"}
    if as_json:
        print(json.dumps(shown, ensure_ascii=False))
        return
    table = Table(title=escape(f"{endpoint.model} at {endpoint.where}, as its clients see it"))
    for name in ("test", "tokens/s", "least to most", "first token", "tokens"):
        table.add_column(name, justify="left" if name == "test" else "right")
    for row in rows:
        runs = f"{min(row['runs']):.1f} to {max(row['runs']):.1f}"
        first = f"{row['first_token_ms']:.0f} ms"
        table.add_row(row["test"], f"{row['tokens_per_second']:.1f}", runs, first, f"{row['tokens']:,}")
    Console().print(table)


async def _measure(endpoint: Endpoint, tests: Sequence[SpeedTest], repetitions: int) -> list[dict[str, Any]]:
    try:
        per_word = 1.0
        if any(test.prompt for test in tests):
            run = await _run(endpoint, FIRST, 1)  # the template's tokens count as its words'
            per_word = max(run.num_prompt / FIRST, 0.5)
        else:
            await _run(endpoint, SHORT, 1)  # it may have to load the model
        return [await _row(endpoint, test, repetitions, per_word) for test in tests]
    finally:
        await endpoint.box.close()


async def _row(endpoint: Endpoint, test: SpeedTest, repetitions: int, per_word: float) -> dict[str, Any]:
    speeds, firsts, counts = [], [], []
    num_words, num_tokens = (SHORT, test.decode + 1) if test.decode else (max(round(test.prompt / per_word), 1), 1)
    for _ in range(repetitions):
        runs = await asyncio.gather(*(_run(endpoint, num_words, num_tokens) for _ in range(test.parallel)))
        first, last = min(run.first for run in runs), max(run.last for run in runs)
        if test.decode:
            counts.append(sum(run.num_tokens - 1 for run in runs))
            took_s = last - first
        else:
            counts.append(sum(run.num_prompt for run in runs))
            took_s = max(run.first for run in runs) - min(run.began for run in runs)
        if not counts[-1] or took_s <= 0:
            raise EngineError("the model answers with one token or none", "give a larger -n, or ask another model")
        speeds.append(round(counts[-1] / took_s, 2))
        firsts += [1000 * (run.first - run.began) for run in runs]
    return {
        "test": test.name,
        "tokens_per_second": sorted(speeds)[len(speeds) // 2],
        "runs": speeds,
        "first_token_ms": round(sorted(firsts)[len(firsts) // 2], 2),
        "tokens": sorted(counts)[len(counts) // 2],
    }


async def _run(endpoint: Endpoint, num_words: int, num_tokens: int) -> Run:
    """Time one answer to random words. Raises EngineError, also where its tokens are not told."""
    began = time.perf_counter()
    times: list[float] = []
    usage: dict[str, Any] = {}
    body = {
        "messages": [{"role": "user", "content": " ".join(random.choices(WORDS, k=num_words))}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,  # vLLM's, SGLang's and llama-server's
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with aclosing(endpoint.chunks("/chat/completions", body)) as chunks:
        async for chunk in chunks:
            usage = mapping(chunk.get("usage")) or usage
            choices = chunk.get("choices")
            delta = mapping(mapping(choices[0]).get("delta")) if isinstance(choices, list) and choices else {}
            if any(value for name, value in delta.items() if name != "role"):
                times.append(time.perf_counter())
    prompt, written = whole(usage.get("prompt_tokens")), whole(usage.get("completion_tokens"))
    if prompt is None or written is None:
        raise EngineError(f"{endpoint.where} tells no token counts (usage)", "without them there is no speed")
    cached = whole(mapping(usage.get("prompt_tokens_details")).get("cached_tokens")) or 0
    ended = time.perf_counter()
    return Run(began, times[0] if times else ended, times[-1] if times else ended, prompt - cached, written)
