"""The job of `edgelm bench --in-process`: measure prompt and decode speed of an engine.

Owns the timed requests, and how a speed follows from the times of tokens. Prompts are random tokens, never used twice,
so that the prefix cache does not help.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

from edgelm.base.errors import RequestError
from edgelm.base.sampling import SamplingParams
from edgelm.base.workers.messages import EngineJob
from edgelm.engine.core import ExecutorInfo, PictureReader, in_prompt
from edgelm.engine.engine import Engine
from edgelm.engine.kv_slots import SPARE_LEN


@dataclass(frozen=True, slots=True)
class SpeedTest:
    """`prompt` tokens of prefill, or `decode` tokens of decoding from an empty context, by `parallel` sequences."""

    prompt: int
    decode: int
    parallel: int

    @property
    def positions(self) -> int:
        """The positions that the KV cache needs so that all sequences run at the same time."""
        return self.parallel * (max(self.prompt, 1) + self.decode + 1) + SPARE_LEN * (self.parallel - 1)

    def shortened(self, context: int) -> Self:
        """Return the same test, shortened to a context."""
        limit = context - 2
        return replace(self, prompt=min(self.prompt, limit), decode=min(self.decode, limit))

    @property
    def name(self) -> str:
        """llama-bench's names: pp512, tg128; with several sequences tg128x8."""
        kind = f"tg{self.decode}" if self.decode else f"pp{self.prompt}"
        return kind if self.parallel == 1 else f"{kind}x{self.parallel}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob(EngineJob):
    """Measure prompt and decode speed."""

    tests: tuple[SpeedTest, ...]
    repetitions: int
    shorten: bool = False  # shorten tests that exceed the context; without it they fail
    picture: Path | None = None  # the file of a picture to measure, too


class PictureTimes(NamedTuple):
    """What a picture costs, the median of some measurements."""

    tokens: int
    prepare_ms: float  # to decode the file and to bring it into the projector's size
    encode_ms: float
    first_token_ms: float  # with both


def check(info: ExecutorInfo, test: SpeedTest) -> None:
    """Raise RequestError for a test that does not fit the context."""
    seq_len = max(test.prompt, 1) + test.decode
    if test.positions > info.capacity or seq_len >= info.context:
        needed, available = max(test.positions, seq_len + 1), min(info.capacity, info.context)
        raise RequestError(
            f"{test.name} needs {needed:,} tokens of context, there are {available:,}",
            "give smaller -p, -n, -b, or a larger --ctx",
        )


async def measure(engine: Engine, test: SpeedTest, repetitions: int) -> list[float]:
    """Return tokens per second of each repetition, after a warm-up. The test must fit the context."""
    runs = [await _run(engine, test) for _ in range(repetitions + 1)]
    return [round(speed, 2) for speed in runs[1:]]


async def measure_picture(reader: PictureReader, engine: Engine, data: bytes, repetitions: int) -> PictureTimes:
    """Return the times of a picture in a prompt of its own, after a warm-up. Raises RequestError."""
    runs = [await _read_picture(reader, engine, data) for _ in range(repetitions + 1)][1:]
    return PictureTimes(
        runs[0].tokens, *(round(statistics.median(times), 1) for times in list(zip(*runs, strict=True))[1:])
    )


async def _read_picture(reader: PictureReader, engine: Engine, data: bytes) -> PictureTimes:
    began, encoded_ms = time.perf_counter(), reader.encode_ms
    parts = await asyncio.to_thread(reader.read, data + random.randbytes(8))  # decoders ignore what follows the picture
    prepared = time.perf_counter()
    tokens, spans = in_prompt(parts, random.choices(range(engine.info.num_vocab), k=1))
    async for _ in engine.submit(
        [*tokens, *random.choices(range(engine.info.num_vocab), k=1)],
        SamplingParams(temperature=0, max_tokens=1),
        pictures=spans,
        cache_namespace=str(began),  # the prefix cache shall not help
    ):
        pass
    ended = time.perf_counter()
    count = sum(len(part.tokens) for part in parts)
    return PictureTimes(count, 1000 * (prepared - began), reader.encode_ms - encoded_ms, 1000 * (ended - began))


async def _run(engine: Engine, test: SpeedTest) -> float:
    params = SamplingParams(temperature=0, max_tokens=test.decode + 1 if test.decode else 1)

    async def run_sequence() -> list[float]:
        """Return the time when a sequence was submitted, and the time of each of its tokens."""
        prompt = random.choices(range(engine.info.num_vocab), k=max(test.prompt, 1))
        times = [time.perf_counter()]
        async for event in engine.submit(prompt, params):
            times += [time.perf_counter()] * len(event.sampled)
        return times

    return tokens_per_second(test, await asyncio.gather(*(run_sequence() for _ in range(test.parallel))))


def tokens_per_second(test: SpeedTest, sequences: Sequence[Sequence[float]]) -> float:
    """Return the speed of sequences that ran together: the time when each was submitted, then those of its tokens.

    Raises RequestError for tokens that all came at once.
    """
    started_at = min(times[0] for times in sequences)
    # All sequences have their first token: decoding is timed from here.
    prefilled_at = max(times[1] for times in sequences)
    if not test.decode:
        return test.parallel * test.prompt / (prefilled_at - started_at)
    decoded_at = [time for times in sequences for time in times[2:] if time > prefilled_at]
    if not decoded_at:
        raise RequestError(f"{test.name} is too short to be timed", "give a larger -n")
    return len(decoded_at) / (max(decoded_at) - prefilled_at)
