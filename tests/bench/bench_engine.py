"""edgelm's engine against a bare loop over llama.cpp: same weights, same settings, alternating blocks of one process.

    python tests/bench/bench_engine.py MODEL.gguf [--batch 1] [--rounds 9] [--tokens 64] [--idle 8192]

Prints the ratio of tokens per second (edgelm / bare) as a median over rounds and its spread. A spread of the rounds'
ratios (half the range between the quartiles, as a share of the median) over 3 % is inconclusive. `--idle N` compares
the engine with itself instead: decoding after a conversation of N tokens was left idle, against an empty cache.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.base.machine.cpu import usable_cores
from edgelm.engine.clock import StepClock
from edgelm.engine.core import SamplingParams
from edgelm.engine.engine import Engine
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.scheduler import Scheduler
from tests.bare import BareLoop

PROMPT_LEN = 16


@dataclass(frozen=True)
class Sides:
    model: LlamaModel
    engine: Engine
    bare: BareLoop

    def prompts(self, count: int, length: int = PROMPT_LEN) -> list[list[int]]:
        return [random.choices(range(self.model.num_vocab), k=length) for _ in range(count)]

    def run_bare(self, prompts: list[list[int]], tokens: int) -> float:
        """Decode all prompts together; return decoded tokens per second."""
        self.bare.clear()
        last = [self.bare.decode(prompt, 0) if i == 0 else self._prefill(i, prompt) for i, prompt in enumerate(prompts)]
        began = time.perf_counter()
        for step in range(tokens):
            self.bare.fill([(token, PROMPT_LEN + step, i, True) for i, token in enumerate(last)])
            last = [int(token) for token in self.bare.run(len(last))]
        return len(prompts) * tokens / (time.perf_counter() - began)

    def _prefill(self, sequence: int, prompt: list[int]) -> int:
        self.bare.fill([(token, at, sequence, at == len(prompt) - 1) for at, token in enumerate(prompt)])
        return int(self.bare.run(1)[0])

    def run_engine(self, prompts: list[list[int]], tokens: int) -> float:
        async def one(prompt: list[int]) -> tuple[float, float]:
            first = last = 0.0
            async for event in self.engine.submit(prompt, SamplingParams(temperature=0, max_tokens=tokens + 1)):
                last = time.perf_counter()
                if event.sampled and not first:
                    first = last
            return first, last

        async def together() -> float:
            times = await asyncio.gather(*map(one, prompts))
            return max(last for _, last in times) - max(first for first, _ in times)

        return len(prompts) * tokens / asyncio.run(together())

    def leave_idle(self, length: int) -> None:
        """Leave a conversation of `length` tokens behind; after the first time its prefix is cached."""
        self.run_engine([random.Random(length).choices(range(self.model.num_vocab), k=length)], 1)

    def round(self, args: argparse.Namespace, engine_first: bool) -> tuple[float, float]:
        """Run both sides once; return their speeds, ours first."""
        prompts = self.prompts(args.batch)

        def ours() -> float:
            if args.idle:
                self.leave_idle(args.idle)
            return self.run_engine(prompts, args.tokens)

        def theirs() -> float:
            if args.idle:
                return self.run_engine(self.prompts(args.batch), args.tokens)
            return self.run_bare(prompts, args.tokens)

        if engine_first:
            return ours(), theirs()
        other = theirs()
        return ours(), other


def report(name: str, ours: list[float], theirs: list[float]) -> None:
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    low, median, high = statistics.quantiles(ratios, n=4)
    spread = (high - low) / 2 / median
    verdict = "" if spread <= 0.03 else "  INCONCLUSIVE: spread over 3 %"
    print(
        f"{name}: {statistics.median(ours):.2f} against {statistics.median(theirs):.2f} tok/s, ratio {median:.4f} "
        f"(quartiles {low:.4f} to {high:.4f}, spread {spread:.1%}, {len(ratios)} rounds){verdict}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--kv", default="f16")
    parser.add_argument("--idle", type=int, default=0)
    args = parser.parse_args()
    threads = usable_cores().physical
    model = LlamaModel(args.model)
    context = max(args.idle + 1024, args.batch * (PROMPT_LEN + args.tokens + 2))
    options = LlamaOptions(context=context, kv=args.kv, threads=threads)
    executor = LlamaExecutor(model, options)
    clock = StepClock()
    engine = Engine(executor, Scheduler(executor.info, SlotKV(executor.info, 2**31), clock), clock).start()
    bare = BareLoop(model.native, context, kv=args.kv, flash=args.kv == "int8", threads=threads, sequences=args.batch)
    sides = Sides(model, engine, bare)
    ours, theirs = [], []
    for round_ in range(args.rounds + 1):
        speeds = sides.round(args, engine_first=round_ % 2 == 0)
        if round_:  # the first one warms up
            ours.append(speeds[0])
            theirs.append(speeds[1])
    what = f"after {args.idle} idle tokens / empty" if args.idle else "edgelm / bare"
    report(f"{args.model.stem}, batch {args.batch}, {args.kv}, {threads} threads, {what}", ours, theirs)
    bare.close()
    engine.close()


if __name__ == "__main__":
    sys.exit(main())
