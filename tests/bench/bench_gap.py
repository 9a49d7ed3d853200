"""The time between two tokens of a running answer while a long prompt arrives beside it.

    python -m tests.bench.bench_gap MODEL.gguf [--prompt 20000] [--limit 300] [--kv f16]

Prints gaps before the prompt came and while it was computed (for at most `--limit` seconds), in ms.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from contextlib import aclosing
from pathlib import Path

from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.base.machine.cpu import usable_cores
from edgelm.engine.clock import StepClock
from edgelm.engine.core import SamplingParams
from edgelm.engine.engine import Engine
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.scheduler import Scheduler

ALONE = 40  # tokens before the prompt comes


async def measure(
    engine: Engine, num_vocab: int, prompt_len: int, limit_s: float
) -> tuple[list[float], list[float], float]:
    """Return the gaps alone, the gaps beside the prompt, and how long the prompt took or was waited for."""
    rng = random.Random(1)
    alone: list[float] = []
    beside: list[float] = []
    arrived = asyncio.Event()
    done = asyncio.Event()

    async def answer() -> None:
        last = 0.0
        params = SamplingParams(temperature=1.0, max_tokens=8000)
        async with aclosing(engine.submit([rng.randrange(1000, num_vocab) for _ in range(64)], params)) as stream:
            async for _ in stream:
                now = time.perf_counter()
                if last:
                    (beside if arrived.is_set() else alone).append(1000 * (now - last))
                last = now
                if len(alone) >= ALONE:
                    arrived.set()
                if done.is_set():
                    return

    running = asyncio.create_task(answer())
    await arrived.wait()
    began = time.perf_counter()
    prompt = [rng.randrange(1000, num_vocab) for _ in range(prompt_len)]
    async with aclosing(engine.submit(prompt, SamplingParams(max_tokens=1))) as stream:
        try:
            async with asyncio.timeout(limit_s):
                async for _ in stream:
                    pass
        except TimeoutError:
            pass
    seconds = time.perf_counter() - began
    done.set()
    await running
    return alone, beside, seconds


def shown(gaps: list[float]) -> str:
    quantiles = statistics.quantiles(gaps, n=100)
    return f"p50 {quantiles[49]:.1f}, p99 {quantiles[98]:.1f}, longest {max(gaps):.1f} ms ({len(gaps)} tokens)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", type=int, default=20_000)
    parser.add_argument("--limit", type=float, default=300)
    parser.add_argument("--kv", default="f16")
    args = parser.parse_args()
    threads = usable_cores().physical
    model = LlamaModel(args.model)
    context = args.prompt + 8192
    executor = LlamaExecutor(model, LlamaOptions(context=context, kv=args.kv, threads=threads))
    clock = StepClock()
    engine = Engine(executor, Scheduler(executor.info, SlotKV(executor.info, 0), clock), clock).start()
    alone, beside, seconds = asyncio.run(measure(engine, model.num_vocab, args.prompt, args.limit))
    print(f"{args.model.stem}, kv {args.kv}, {threads} threads, a prompt of {args.prompt:,} tokens: {seconds:.0f} s")
    print(f"  before it came: {shown(alone)}")
    print(f"  beside it:      {shown(beside)}")
    engine.close()


if __name__ == "__main__":
    sys.exit(main())
