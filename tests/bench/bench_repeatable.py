"""Which answers are equal with `--repeatable` and without, in each pair of ways to compute them, and what it costs.

    python -m tests.bench.bench_repeatable equal MODEL [--prompts 200] [--tokens 32] [--threads 1]
    python -m tests.bench.bench_repeatable cost MODEL
    python -m tests.bench.bench_repeatable drafts MODEL

MODEL is a GGUF, or a name of tests/real_models.py. `equal` continues passages of this repository's documentation, half
of them greedy and half seeded, and compares tokens and log-probabilities. `cost` measures steps at several depths, and
prompts. `drafts` measures decoding behind a long prompt with drafts and without, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

from edgelm.backends.build import build
from edgelm.backends.llama import build as llama_build
from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.llama.repeatable import rule_for
from edgelm.backends.model import LoadedModel
from edgelm.backends.reports import Reports
from edgelm.base.config import Settings
from edgelm.base.machine.cpu import usable_cores
from edgelm.base.places import Places
from edgelm.base.sampling import DraftChoice
from edgelm.base.workers.messages import EngineJob
from edgelm.engine.core import Chunk, SamplingParams, Sequence, Step, Trim
from tests.real_models import real_model

ROOT = Path(__file__).resolve().parents[2]
PROMPT_LEN = 48
TOGETHER = 8
SMALL_STEP = 24  # tokens
DEPTHS = (64, 512, 2048)
NUM_STEPS = 15
ROUNDS = 6

Answer = list[tuple[int, float | None]]
accepted = [0]  # drafted tokens


def passages(loaded: LoadedModel, count: int) -> list[list[int]]:
    """Return the beginnings of passages of the documentation, as tokens."""
    files = sorted((ROOT / "docs").rglob("*.md"))
    texts = [text for file in files for text in file.read_text().split("\n\n") if len(text) > 200 and "|" not in text]
    chosen = texts[:: max(len(texts) // count, 1)][:count]
    return [loaded.tokenizer.encode(text, special=False, bos=True)[:PROMPT_LEN] for text in chosen]


async def answers(
    loaded: LoadedModel, prompts: list[list[int]], tokens: int, *, together: int = 1, backwards: bool = False
) -> list[Answer]:
    limit = asyncio.Semaphore(together)

    async def one(number: int, prompt: list[int]) -> Answer:
        length = tokens // 2 + number % (tokens // 2 + 1)  # so that they end at different times
        params = SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=length, num_logprobs=0)
        async with limit:
            events = [event async for event in loaded.engine.submit(prompt, params)]
        accepted[0] += events[-1].stats.accepted if events[-1].stats else 0
        return [(sample.id, sample.logprob) for event in events for sample in event.sampled]

    numbered = list(enumerate(prompts))
    found = await asyncio.gather(*(one(*entry) for entry in (numbered[::-1] if backwards else numbered)))
    return list(found[::-1] if backwards else found)


def equality(model: Path, *, repeatable: bool, count: int, tokens: int, threads: int) -> None:
    settings = Settings(engine="llama", device="cpu", ctx=2048, repeatable=repeatable, spec="off", threads=threads)
    with tempfile.TemporaryDirectory() as home:
        environment = {f"EDGELM_{kind}_DIR": str(Path(home, kind)) for kind in ("CONFIG", "DATA", "RUNTIME", "CACHE")}
        places, prefixes = Places(environment), Path(home, "prefixes")

        @contextmanager
        def loaded(settings: Settings, kept: Path | None = None, **options: int) -> Iterator[LoadedModel]:
            with patch.object(llama_build, "LlamaOptions", partial(LlamaOptions, **options)):
                built = build(
                    EngineJob(model=model, settings=settings, drafts=True, prefixes=kept),
                    Reports(warn=print),
                    places=places,
                )
            try:
                yield built
            finally:
                built.engine.close()

        ways: dict[str, list[Answer]] = {}
        began = time.perf_counter()

        def run(name: str, built: LoadedModel, **options: bool | int) -> None:
            ways[name] = asyncio.run(answers(built, prompts, tokens, **options))  # type: ignore[arg-type]
            print(f"  {name}: {time.perf_counter() - began:.0f} s", flush=True)

        with loaded(settings, prefixes) as built:
            prompts = passages(built, count)
            run("cold", built)
            run("cached", built)
        with loaded(settings, prefixes) as built:
            run("restarted", built, backwards=True)
        with loaded(settings) as built:
            run("batch of 8", built, together=TOGETHER)
        with loaded(settings, max_tokens=SMALL_STEP) as built:
            run(f"steps of {SMALL_STEP}", built)
        with loaded(replace(settings, spec="8")) as built:
            asyncio.run(answers(built, prompts, tokens, together=TOGETHER))  # they are remembered, to draft from
            run("drafts", built)
            print(f"  {accepted[0]} drafted tokens were accepted with memory of the answers")
    kinds = {"greedy": [*range(0, len(prompts), 2)], "seeded": [*range(1, len(prompts), 2)]}
    print(f"repeatable {repeatable}: {len(prompts)} prompts of {PROMPT_LEN} tokens; texts that differ (numbers too)")
    for first, second in itertools.combinations(ways, 2):
        parts = []
        for kind, numbers in kinds.items():
            pairs = [(ways[first][number], ways[second][number]) for number in numbers]
            texts = sum([token for token, _ in a] != [token for token, _ in b] for a, b in pairs)
            parts.append(f"{kind} {texts} ({sum(a != b for a, b in pairs)}) of {len(numbers)}")
        print(f"  {first} / {second}: {', '.join(parts)}")


def cost(model: Path) -> None:
    threads = usable_cores().physical
    options = LlamaOptions(context=4096, kv="f16", threads=threads, max_sequences=2)
    with tempfile.TemporaryDirectory() as folder:
        variants = [("f16", False), ("k8v16", False), ("k8v16", True), ("int8", False), ("int8", True)]
        for kv, repeatable in variants:
            chosen, repack = replace(options, kv=kv), True
            if repeatable:
                rule = rule_for(partial(_loaded, model), chosen, [model], (), Path(folder), repack=True)
                chosen, repack = replace(chosen, repeatable_rows=rule.rows), rule.repack
            executor = LlamaExecutor(_loaded(model, repack), chosen)
            parts = [
                f"{depth}: {_step_ms(executor, depth, 1):.1f}, {_step_ms(executor, depth, 4):.1f}" for depth in DEPTHS
            ]
            prompt = _prompt_ms(executor, 512)
            name = f"{kv}{f' repeatable ({rule})' if repeatable else ''}"
            print(
                f"{name}: ms a step of 1 and of 4 rows at depth {'; '.join(parts)}; 512 prompt tokens {prompt:.0f} ms"
            )
            executor.close()


def _loaded(model: Path, repack: bool) -> LlamaModel:
    return LlamaModel(model, repack=repack)


_REQUEST = Sequence(-1, [0], 1, SamplingParams(temperature=0))


def _run(executor: LlamaExecutor, start: int, count: int, rows: int) -> None:
    tokens = [(977 * at) % executor.info.num_vocab for at in range(start, start + count)]
    executor.forward(Step((Chunk(_REQUEST, start, tokens, rows, 0),)))


def _step_ms(executor: LlamaExecutor, depth: int, rows: int) -> float:
    for start in range(0, depth, 512):
        _run(executor, start, min(512, depth - start), 0)
    times = []
    for _ in range(NUM_STEPS):
        began = time.perf_counter()
        _run(executor, depth, rows, rows)
        times.append(1000 * (time.perf_counter() - began))
        executor.forward(Step((), (Trim(0, depth),)))
    executor.forward(Step((), (Trim(0, 0),)))
    return statistics.median(times)


def _prompt_ms(executor: LlamaExecutor, count: int) -> float:
    times = []
    for _ in range(3):
        began = time.perf_counter()
        _run(executor, 0, count, 1)
        times.append(1000 * (time.perf_counter() - began))
        executor.forward(Step((), (Trim(0, 0),)))
    return statistics.median(times)


def drafts(model: Path, *, kv: str, repeatable: bool) -> None:
    """Decode random continuations, which no draft foresees, with drafts and without, in one engine.

    Two engines, each with its own memory, differ by up to 15 % in the same steps.
    """
    settings = Settings(engine="llama", device="cpu", ctx=4096, kv=kv, repeatable=repeatable, parallel=1, memory=False)
    with tempfile.TemporaryDirectory() as home:
        places = Places(
            {f"EDGELM_{kind}_DIR": str(Path(home, kind)) for kind in ("CONFIG", "DATA", "RUNTIME", "CACHE")}
        )
        built = build(EngineJob(model=model, settings=settings, drafts=True), Reports(warn=print), places=places)
        text = "\n\n".join(file.read_text() for file in sorted((ROOT / "docs" / "guide").glob("*.md")))
        prompt = built.tokenizer.encode(text, special=False, bos=True)[:2048]

        async def decode(draft: DraftChoice, seed: int) -> float:
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=160, draft=draft)
            async with asyncio.timeout(300):
                events = [event async for event in built.engine.submit(prompt, params)]
            stats = events[-1].stats
            assert stats
            return stats.decode_tokens_per_second

        ways: tuple[DraftChoice, ...] = ("auto", "off", "off", "auto")
        ratios = []
        asyncio.run(decode("off", ROUNDS))  # reads the prompt
        for seed in range(ROUNDS):
            first, second, third, fourth = (asyncio.run(decode(draft, seed)) for draft in ways)
            ratios.append((first + fourth) / (second + third))
        built.engine.close()
    shown = " ".join(f"{ratio:.3f}" for ratio in ratios)
    print(
        f"{kv}{' repeatable' if repeatable else ''}: with drafts / without, 2,048 tokens deep: {shown}, "
        f"median {statistics.median(ratios):.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["equal", "cost", "drafts"])
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=usable_cores().physical)
    args = parser.parse_args()
    model = Path(args.model) if args.model.endswith(".gguf") else real_model(args.model)
    print(f"{model.name}, {usable_cores().physical} cores")
    if args.what == "equal":
        for repeatable in (True, False):
            equality(model, repeatable=repeatable, count=args.prompts, tokens=args.tokens, threads=args.threads)
    elif args.what == "cost":
        cost(model)
    else:
        for kv, repeatable in (("int8", False), ("int8", True), ("k8v16", True)):
            drafts(model, kv=kv, repeatable=repeatable)


if __name__ == "__main__":
    main()
