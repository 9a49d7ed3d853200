"""The cost of counting in a step: `python -m tests.bench.bench_counters [--rounds N] [--requests N] [--tokens N]`.

Runs the built-in model on one thread, with and without counters in turn, and prints the medians of a token's processor
time and their ratio; then the time of the counting call alone.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import edgelm.models
from edgelm.core import SamplingParams
from edgelm.engine.counters import Counters
from edgelm.engine.engine import Engine
from tests.served import loaded_model


class NoCounters(Counters):
    """Counts nothing."""

    def admitted(self, *_: Any) -> None: ...

    def first_tokens(self, *_: Any) -> None: ...

    def more_tokens(self, *_: Any) -> None: ...

    def draft(self, *_: Any) -> None: ...

    def ended(self, *_: Any) -> None: ...


async def token_us(engine: Engine, num_requests: int, num_tokens: int) -> float:
    """Return the processor time of a token, in microseconds, of requests that run at the same time."""

    async def answer(number: int) -> int:
        params = SamplingParams(max_tokens=num_tokens, seed=number)
        return sum([len(event.sampled) async for event in engine.submit([number % 100 + 3] * 8, params)])

    began = time.process_time()
    generated = sum(await asyncio.gather(*map(answer, range(num_requests))))
    return 1e6 * (time.process_time() - began) / generated


def measure(rounds: int, num_requests: int, num_tokens: int) -> dict[str, float]:
    """Return the medians with counters and without; they take turns, and so does which comes first."""
    times: dict[str, list[float]] = {"with": [], "without": []}
    (path,) = (Path(edgelm.models.__path__[0]) / "starter").glob("*.gguf")
    with loaded_model(path, context=1024) as loaded:
        asyncio.run(token_us(loaded.engine, num_requests, num_tokens))
        for number in range(2 * rounds):
            kind = ("with", "without", "without", "with")[number % 4]
            loaded.engine.counters = Counters() if kind == "with" else NoCounters()
            times[kind].append(asyncio.run(token_us(loaded.engine, num_requests, num_tokens)))
    return {kind: statistics.median(values) for kind, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    for attempt in range(3):
        median = measure(args.rounds, args.requests, args.tokens)
        ratio = median["with"] / median["without"]
        print(f"{attempt}: {median['with']:7.1f} us with, {median['without']:7.1f} us without: {ratio:.4f}")
    counters, calls = Counters(), 200_000
    began = time.process_time()
    for _ in range(calls):
        counters.more_tokens(1, 0.002)
    print(f"a token of a later step is counted in {(time.process_time() - began) / calls * 1e6:.2f} us")


if __name__ == "__main__":
    main()
