"""What the prefix cache saves: time to the first token, with it and without, on one model.

    python -m tests.bench.bench_prefix MODEL.gguf [--rounds 3] [--kv int8] [--system 1500] [--answer 64]

Five cases, in rounds that alternate with and without: the second turn of a chat; the last turn of a tool loop, then a
question after it whose template omits the loop's thoughts; eight requests that come together with a system prompt in
common (median and last of the eight); a chat that another process held, reopened in a new one.
Each answer is compared with the one without a cache. With int8 (flash attention on, q8_0) logits do not depend on the
shape of batches, and where only one request runs at a time not on the order of cells either (docs/experiments.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from edgelm.backends.llama.build import snapshot_folder
from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.snapshot_files import Bounds
from edgelm.backends.snapshots import SnapshotStore
from edgelm.core import SamplingParams
from edgelm.engine.clock import StepClock
from edgelm.engine.engine import Engine
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.scheduler import Scheduler
from edgelm.machine.cpu import usable_cores

TOGETHER = 8
LOOP_TURNS = 5
QUESTION_LEN = 20
GIB = 2**30


@dataclass(frozen=True)
class Reply:
    """What one request gave."""

    first_s: float  # from the request to its first token
    cached: int
    tokens: list[int]


class Side:
    """An engine with the cache, or one that forgets each sequence at its end and shares none."""

    def __init__(self, args: argparse.Namespace, folder: Path | None, cached: bool = True) -> None:
        threads = usable_cores().physical
        model = LlamaModel(args.model)
        self.num_vocab = model.num_vocab
        options = LlamaOptions(context=args.context, kv=args.kv, threads=threads)
        files = snapshot_folder(folder, model, [args.model], options, Bounds(4 * GIB, 1e6)) if folder else None
        store = SnapshotStore(2 * GIB, files)
        executor = LlamaExecutor(model, options, store)
        clock = StepClock()
        kv = (SlotKV if cached else Forgetful)(executor.info, 2 * GIB, store)
        self.engine = Engine(executor, Scheduler(executor.info, kv, clock), clock).start()

    async def ask(self, prompt: list[int], max_tokens: int, cache_namespace: str = "") -> Reply:
        began, first, tokens, cached = time.perf_counter(), 0.0, list[int](), 0
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        async for event in self.engine.submit(prompt, params, cache_namespace=cache_namespace):
            first = first or time.perf_counter() - began
            tokens += [sample.id for sample in event.sampled]
            cached = event.stats.cached_tokens if event.stats else cached
        return Reply(first, cached, tokens)

    def ask_all(self, prompts: list[list[int]], max_tokens: int, namespaces: list[str] | None = None) -> list[Reply]:
        async def together() -> list[Reply]:
            names = namespaces or [""] * len(prompts)
            return list(
                await asyncio.gather(*(self.ask(p, max_tokens, n) for p, n in zip(prompts, names, strict=True)))
            )

        return asyncio.run(together())


class Forgetful(SlotKV):
    """Keeps nothing of a sequence that ends, and matches nothing."""

    def _best_match(self, seq: object, tokens: object) -> object:  # type: ignore[override]
        from edgelm.engine.kv_slots import _Match

        return _Match(0)

    def _comes_soon(self, seq: object, match: object) -> bool:
        return False


def second_turn(side: Side, args: argparse.Namespace, seed: int) -> Reply:
    rng = random.Random(seed)
    prompt = rng.choices(range(side.num_vocab), k=args.system)
    (first,) = side.ask_all([prompt], args.answer)
    (second,) = side.ask_all([[*prompt, *first.tokens, *rng.choices(range(side.num_vocab), k=QUESTION_LEN)]], 8)
    return second


def tool_loop(side: Side, args: argparse.Namespace, seed: int) -> list[Reply]:
    """Return the last turn of a loop, and the question after it: its prompt has nothing of the loop's answers."""
    rng = random.Random(seed)
    prompt = question = rng.choices(range(side.num_vocab), k=args.system)
    for _ in range(LOOP_TURNS):
        (reply,) = side.ask_all([prompt], args.answer)
        last, prompt = reply, [*prompt, *reply.tokens, *rng.choices(range(side.num_vocab), k=QUESTION_LEN)]
    (after,) = side.ask_all([[*question[:-3], *rng.choices(range(side.num_vocab), k=QUESTION_LEN)]], 8)
    return [last, after]


def shared_prompt(side: Side, args: argparse.Namespace, seed: int) -> list[Reply]:
    rng = random.Random(seed)
    system = rng.choices(range(side.num_vocab), k=args.system)
    return side.ask_all([system + rng.choices(range(side.num_vocab), k=QUESTION_LEN) for _ in range(TOGETHER)], 8)


def chat(seed: int, num_vocab: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(num_vocab), k=length)


def child(args: argparse.Namespace) -> None:
    """Be the process that a chat is opened in; print what its first token took."""
    began = time.perf_counter()
    side = Side(args, Path(args.folder) if args.folder else None)
    loaded_s = time.perf_counter() - began
    reply = side.ask_all([chat(args.child, side.num_vocab, args.system + args.answer + args.more)], 8)[0]
    began = time.perf_counter()
    side.engine.close()
    closed_s = time.perf_counter() - began
    found = {"first": reply.first_s, "cached": reply.cached, "tokens": reply.tokens}
    print(json.dumps(found | {"load": loaded_s, "close": closed_s}))


def in_process(args: argparse.Namespace, seed: int, folder: str, more: int) -> dict[str, object]:
    command = [sys.executable, "-m", "tests.bench.bench_prefix", str(args.model), "--child", str(seed)]
    command += ["--folder", folder, "--more", str(more), "--kv", args.kv, "--system", str(args.system)]
    command += ["--answer", str(args.answer), "--context", str(args.context)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(name: str, without: list[float], cached: list[float], equal: bool, note: str = "") -> None:
    ratios = sorted(a / b for a, b in zip(without, cached, strict=True))
    print(
        f"{name}: {statistics.median(without) * 1000:.0f} ms without, {statistics.median(cached) * 1000:.0f} ms with "
        f"the cache, ratio {statistics.median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f} in {len(ratios)}); "
        f"answers {'equal' if equal else 'NOT EQUAL'}{note}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv", default="int8")
    parser.add_argument("--system", type=int, default=1500)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--folder", default="")
    parser.add_argument("--child", type=int)
    parser.add_argument("--more", type=int, default=0)
    args = parser.parse_args()
    if args.child is not None:
        child(args)
        return
    name = f"{args.model.stem}, {args.kv}, {usable_cores().physical} threads"
    print(f"{name}: system prompt {args.system} tokens, answer {args.answer}, question {QUESTION_LEN}", flush=True)
    with_cache, without = Side(args, None), Side(args, None, cached=False)
    turns: list[tuple[Reply, Reply]] = []
    for round_ in range(args.rounds):
        seed = random.SystemRandom().randrange(2**32)
        sides = (without, with_cache) if round_ % 2 else (with_cache, without)
        replies = {side: second_turn(side, args, seed) for side in sides}
        turns.append((replies[without], replies[with_cache]))
    report(
        "second turn",
        [a.first_s for a, _ in turns],
        [b.first_s for _, b in turns],
        all(a.tokens == b.tokens for a, b in turns),
        f"; {turns[0][1].cached} tokens cached",
    )
    loops: list[tuple[list[Reply], list[Reply]]] = []
    for round_ in range(args.rounds):
        seed = random.SystemRandom().randrange(2**32)
        sides = (without, with_cache) if round_ % 2 else (with_cache, without)
        many = {side: tool_loop(side, args, seed) for side in sides}
        loops.append((many[without], many[with_cache]))
    for number, name in enumerate(
        (f"turn {LOOP_TURNS} of a tool loop", "a question after the loop, its answers omitted")
    ):
        report(
            name,
            [a[number].first_s for a, _ in loops],
            [b[number].first_s for _, b in loops],
            all(a[number].tokens == b[number].tokens for a, b in loops),
            f"; {loops[0][1][number].cached} tokens cached",
        )
    shared: list[tuple[list[Reply], list[Reply]]] = []
    for round_ in range(args.rounds):
        seed = random.SystemRandom().randrange(2**32)
        sides = (without, with_cache) if round_ % 2 else (with_cache, without)
        many = {side: shared_prompt(side, args, seed) for side in sides}
        shared.append((many[without], many[with_cache]))
    equal = all(a.tokens == b.tokens for each in shared for a, b in zip(*each, strict=True))
    for what, of in (("median", statistics.median), ("last", max)):
        report(
            f"shared system prompt, {TOGETHER} together, {what} of them",
            [of([reply.first_s for reply in a]) for a, _ in shared],
            [of([reply.first_s for reply in b]) for _, b in shared],
            equal,
            f"; cached {sorted(reply.cached for reply in shared[0][1])}",
        )
    with_cache.engine.close()
    without.engine.close()
    reopened: list[tuple[dict[str, object], dict[str, object]]] = []
    for _ in range(args.rounds):
        seed = random.SystemRandom().randrange(2**32)
        with tempfile.TemporaryDirectory(prefix="edgelm-bench-") as folder:
            in_process(args, seed, folder, 0)
            kept = in_process(args, seed, folder, QUESTION_LEN)
        reopened.append((in_process(args, seed, "", QUESTION_LEN), kept))
    report(
        "reopened after a restart",
        [float(str(a["first"])) for a, _ in reopened],
        [float(str(b["first"])) for _, b in reopened],
        all(a["tokens"] == b["tokens"] for a, b in reopened),
        f"; {reopened[0][1]['cached']} tokens cached",
    )


if __name__ == "__main__":
    main()
