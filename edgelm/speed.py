"""Prompt and decode speed of an engine, as `edgelm bench` reports them.

Owns the requests that are timed. Prompts are random tokens, never used twice, so that no prefix cache helps.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, replace
from typing import Self

from edgelm.core import ExecutorInfo, SamplingParams
from edgelm.engine.engine import Engine
from edgelm.engine.slots import SPARE_LEN
from edgelm.errors import RequestError


@dataclass(frozen=True, slots=True)
class SpeedTest:
    """`prompt` tokens of prefill, or `decode` tokens of decoding from an empty context, by `parallel` sequences."""

    prompt: int
    decode: int
    parallel: int

    @property
    def positions(self) -> int:
        """The positions in the cache with which all sequences run at the same time."""
        return self.parallel * (max(self.prompt, 1) + self.decode + 1) + SPARE_LEN * (self.parallel - 1)

    def shortened(self, context: int) -> Self:
        """Return the same test in a context that may be too short for it."""
        most = context - 2
        return replace(self, prompt=min(self.prompt, most), decode=min(self.decode, most))

    @property
    def name(self) -> str:
        """llama-bench's names: pp512, tg128; with several sequences tg128x8."""
        kind = f"tg{self.decode}" if self.decode else f"pp{self.prompt}"
        return kind if self.parallel == 1 else f"{kind}x{self.parallel}"


def check(info: ExecutorInfo, test: SpeedTest) -> None:
    """Raise RequestError for a test that does not fit the context."""
    each = max(test.prompt, 1) + test.decode
    if test.positions > info.capacity or each >= info.context:
        needed, there = max(test.positions, each + 1), min(info.capacity, info.context)
        raise RequestError(
            f"{test.name} needs {needed:,} tokens of context, there are {there:,}",
            "give smaller -p, -n, -b, or a larger --ctx",
        )


async def measure(engine: Engine, test: SpeedTest, repetitions: int) -> list[float]:
    """Return tokens per second of each repetition of a test that fits, after one that is not counted."""
    runs = [await _run(engine, test) for _ in range(repetitions + 1)]
    return [round(each, 2) for each in runs[1:]]


async def _run(engine: Engine, test: SpeedTest) -> float:
    params = SamplingParams(temperature=0, max_tokens=test.decode + 1 if test.decode else 1)

    async def one() -> list[float]:
        """Return when the sequence was submitted, and when each of its tokens came."""
        prompt = random.choices(range(engine.info.num_vocab), k=max(test.prompt, 1))
        times = [time.perf_counter()]
        async for event in engine.submit(prompt, params):
            times += [time.perf_counter()] * len(event.sampled)
        return times

    times = await asyncio.gather(*(one() for _ in range(test.parallel)))
    began = min(times_of[0] for times_of in times)
    first = max(times_of[1] for times_of in times)
    if not test.decode:
        return test.parallel * test.prompt / (first - began)
    # The clock starts when all sequences have their first token, so that no prefill is counted.
    counted = [time for times_of in times for time in times_of[2:] if time > first]
    return len(counted) / (max(counted) - first)
