"""Prompt and decode speed of an engine, as `edgelm bench` reports them.

Owns the requests that are timed. Prompts are random tokens, never used twice, so that no prefix cache helps.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

from edgelm.core import SamplingParams
from edgelm.engine.engine import Engine
from edgelm.errors import RequestError


@dataclass(frozen=True, slots=True)
class SpeedTest:
    """`prompt` tokens of prefill, or `decode` tokens of decoding from an empty context, by `parallel` sequences."""

    prompt: int
    decode: int
    parallel: int

    @property
    def name(self) -> str:
        """llama-bench's names: pp512, tg128; with several sequences tg128x8."""
        kind = f"tg{self.decode}" if self.decode else f"pp{self.prompt}"
        return kind if self.parallel == 1 else f"{kind}x{self.parallel}"


async def measure(engine: Engine, test: SpeedTest, repetitions: int) -> list[float]:
    """Return tokens per second of each repetition, over all sequences, after one that is not counted.

    Raises RequestError for a test that does not fit the context.
    """
    info = engine.info
    length = test.parallel * (test.prompt + test.decode + 1)
    if length > info.capacity or test.prompt + test.decode >= info.context:
        raise RequestError(
            f"{test.name} needs {length:,} tokens of context, there are {min(info.capacity, info.context):,}",
            "raise --ctx, or give smaller -p, -n, -b",
        )
    runs = [await _run(engine, test) for _ in range(repetitions + 1)]
    return [round(each, 2) for each in runs[1:]]


async def _run(engine: Engine, test: SpeedTest) -> float:
    params = SamplingParams(temperature=0, max_tokens=test.decode + 1 if test.decode else 1)

    async def one() -> tuple[float, float, float]:
        """Return when the sequence was submitted, when it got its first token, and its last."""
        prompt = random.choices(range(engine.info.num_vocab), k=max(test.prompt, 1))
        began = first = last = time.perf_counter()
        async for event in engine.submit(prompt, params):
            last = time.perf_counter()
            if event.sampled and first == began:
                first = last
        return began, first, last

    times = await asyncio.gather(*(one() for _ in range(test.parallel)))
    if test.decode:  # all have their first token before the clock starts, so no prefill is counted
        return test.parallel * test.decode / (max(last for *_, last in times) - max(first for _, first, _ in times))
    return test.parallel * test.prompt / (max(first for _, first, _ in times) - min(began for began, *_ in times))
