"""Grammars: compile time, masks, forced drafts and the cost of a grammar in free text.

    python -m tests.bench.bench_grammar [PAIRS] [VOCABULARY.gguf ...]      (from the checkout)

Runs a model of random weights in the shape of a 135M one on llama.cpp, in alternating pairs. Prints medians and ratios.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.core import Matcher, SamplingParams, Sequence, Stats
from edgelm.engine.clock import StepClock
from edgelm.engine.engine import Engine
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.scheduler import Scheduler
from edgelm.machine.cpu import usable_cores
from edgelm.sampling.grammar import GrammarCompiler
from edgelm.text.tokenizer import LlamaTokenizer
from edgelm.workers.grammars import GrammarSpec
from tests.bench.random_models import SHAPES, write_model
from tests.completion import complete
from tests.engine.fake import SimpleDrafter

NAMES = ["temperature", "humidity", "wind_speed", "pressure", "visibility", "cloud_cover", "dew_point", "uv_index"]
KEYED = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 10**11, "maximum": 10**14} for name in NAMES},
    "required": NAMES,
    "additionalProperties": False,
}
SCHEMAS = {
    "object": {"type": "object"},
    "8 integers": KEYED,
    "strings": {"type": "array", "items": {"type": "string"}},
    "enum of 2000": {"enum": [f"value {number}" for number in range(2000)]},
}
FREE = "start: TEXT\nTEXT: /(.|\\n)*/"
CALLS = 'start: call* TEXT\ncall: head "x"\nhead[lazy]: /(.|\\n)*<tool_call>/\nTEXT: /(.|\\n)*/'
FREE_TOKENS = 48


class Silent(SimpleDrafter):
    """Speculation is on, with nothing to propose: only forced tokens are drafted."""

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        return []


async def time_vocabulary(path: Path) -> None:
    """Print the times of one vocabulary: of its compiler, of grammars, and of masks on random walks."""
    tokenizer = LlamaTokenizer.from_file(path)
    began = time.thread_time()
    compiler = GrammarCompiler(tokenizer, tokenizer.num_tokens)
    print(f"\n{path.name}: {tokenizer.num_tokens:,} tokens, compiler {time.thread_time() - began:.2f} s CPU")
    await compiler.compile(GrammarSpec("regex", "first"))  # starts the process
    for name, schema in SCHEMAS.items():
        began = time.perf_counter()
        grammar = await compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
        compile_ms = 1000 * (time.perf_counter() - began)
        times, rng = [], random.Random(0)
        for _ in range(8):
            matcher = grammar.matcher()
            for _ in range(60):
                rows = np.empty((1, -(-tokenizer.num_tokens // 32)), np.int32)
                began = time.perf_counter()
                matcher.fill([], rows)
                times.append(1e6 * (time.perf_counter() - began))
                allowed = np.flatnonzero(np.unpackbits(rows[0].view(np.uint8), bitorder="little"))
                token = int(allowed[rng.randrange(len(allowed))])
                if token in tokenizer.stop_ids:
                    break
                matcher.accept(token)
                if matcher.done:
                    break
        median, worst = statistics.median(times), sorted(times)[int(0.99 * len(times))]
        print(f"  {name:14} compile {compile_ms:7.1f} ms   mask p50 {median:6.0f} us   p99 {worst:6.0f} us")
    await compiler.close()


def start(path: Path, threads: int, speculation: bool) -> tuple[Engine, LlamaTokenizer]:
    model = LlamaModel(path)
    tokenizer = LlamaTokenizer.of_model(model.native, model)
    executor = LlamaExecutor(model, LlamaOptions(context=2048, threads=threads))
    clock = StepClock()
    drafter = Silent() if speculation else None
    return Engine(
        executor, Scheduler(executor.info, SlotKV(executor.info, 2**26), clock, drafter), clock
    ).start(), tokenizer


async def run(engine: Engine, tokenizer: LlamaTokenizer, matcher: Matcher | None, seed: int, tokens: int) -> Stats:
    params = SamplingParams(
        max_tokens=tokens, seed=seed, stop_ids=frozenset() if matcher is None else tokenizer.stop_ids
    )
    rng = random.Random(seed)
    prompt = [rng.randrange(300, 30_000) for _ in range(20)]
    stats = None
    async for delta in complete(engine, tokenizer, prompt, params, matcher=matcher):
        stats = delta.stats or stats
    assert stats
    return stats


async def time_answers(path: Path, pairs: int) -> None:
    threads = usable_cores().physical
    plain, tokenizer = start(path, threads, speculation=False)
    drafting, _ = start(path, threads, speculation=True)
    compiler = GrammarCompiler(tokenizer, plain.info.num_vocab)
    keyed = await compiler.compile(GrammarSpec("json_schema", json.dumps(KEYED)))
    ratios, shares, steps = [], [], []
    for seed in range(pairs):
        order = [plain, drafting] if seed % 2 else [drafting, plain]
        stats = {engine: await run(engine, tokenizer, keyed.matcher(), seed, 400) for engine in order}
        ratios.append(stats[drafting].decode_tokens_per_second / stats[plain].decode_tokens_per_second)
        shares.append(stats[drafting].forced / stats[drafting].completion_tokens)
        steps.append(stats[drafting].completion_tokens / (stats[drafting].completion_tokens - stats[drafting].forced))
    print(f"\n135M-shaped model, {threads} threads, {pairs} pairs")
    print(
        f"  forced drafts: {statistics.median(shares):.0%} of the tokens, {statistics.median(steps):.2f} tokens a step"
        f" (1 without), speed x{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    single, _ = start(path, 1, speculation=False)
    for name, lark in (("free text", FREE), ("free text that may call", CALLS)):
        grammar = await compiler.compile(GrammarSpec("lark", lark))
        wall, cpu = [], []
        for seed in range(pairs):
            matchers = [None, grammar.matcher()] if seed % 2 else [grammar.matcher(), None]
            speeds: dict[bool, tuple[float, float]] = {}
            for matcher in matchers:
                began = time.process_time()
                stats_of = await run(single, tokenizer, matcher, seed, FREE_TOKENS)
                if stats_of.completion_tokens == FREE_TOKENS:
                    speeds[matcher is None] = stats_of.decode_tokens_per_second, 1 / (time.process_time() - began)
            if len(speeds) == 2:
                wall.append(speeds[False][0] / speeds[True][0])
                cpu.append(speeds[False][1] / speeds[True][1])
        print(
            f"  {name}, 1 thread: x{statistics.median(wall):.3f} of the speed without a grammar"
            f" (by processor time x{statistics.median(cpu):.3f}, {len(wall)} pairs)"
        )
    single.close()
    await compiler.close()
    plain.close()
    drafting.close()


async def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "135m.gguf"
        write_model(path, SHAPES["smol-135m"], GGMLQuantizationType.Q8_0)
        for vocabulary in [path, *map(Path, sys.argv[2:])]:
            await time_vocabulary(vocabulary)
        await time_answers(path, pairs)


if __name__ == "__main__":
    asyncio.run(main())
