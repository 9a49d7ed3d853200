"""Speculation on real llama.cpp: a random model forced along recorded streams, drafts on and off, request by request.

    python -m tests.bench.bench_speculation MODEL.gguf TRACE.npz ... [--requests 12] [--tokens 160] [--context 1024]
                                            [--kv f16] [--skip 0] [--free] [--without PART ...] [--out FILE]

Both sides are engines over the same weights, alternating; each recorded answer is forced on both, so what differs is
the steps. Prints for each file the ratio of decode times (off / on) over all requests, the median of the requests'
ratios with its 95 % interval (bootstrap), tokens a step, and what the measured surface of step times predicts for the
very steps that were run. The model sees the last `--context` tokens, the drafter all. Memory of past answers is that
of the earlier requests of the file; `--skip` requests only fill it. `--free` runs the model's own answers instead
(random weights: there is nothing to draft, so it shows the harm). `--without` adds a side for each part of speculation
whose name begins so (`bench_ablation`), and prints its speed relative to drafts with all parts on.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.llama.binding import L
from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.base.machine.cpu import usable_cores
from edgelm.engine.clock import Measured, StepClock, StepCosts
from edgelm.engine.core import CompletedSamples, Drafter, Masks, Sampled, SamplingParams, Sequence, Step
from edgelm.engine.engine import Engine
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.scheduler import Scheduler
from edgelm.engine.step_times import DEEP_ROWS, DEPTH, ROWS, SHALLOW_LEN, measure_steps
from tests.bench.bench_ablation import ALL_ON, PARTS, Part, constants_of, make_drafter

BOOTSTRAP = 2000


@dataclass(frozen=True)
class Request:
    past: list[int]
    prompt: list[int]
    answer: list[int]


class Forced:
    """An executor that samples the recorded answer. Everything else, and its time, is llama.cpp's."""

    def __init__(self, inner: LlamaExecutor) -> None:
        self._inner = inner
        self.info = inner.info
        self.answer: list[int] | None = None  # None: the model's own
        self.steps: list[tuple[int, int]] = []  # rows, depth of those without prefill

    def forward(self, step: Step) -> None:
        if step.num_tokens == step.num_rows:
            self.steps.append((step.num_rows, sum(chunk.start for chunk in step.chunks)))
        self._inner.forward(step)

    def sample(self, step: Step, masks: Masks | None) -> CompletedSamples:
        if self.answer is None:
            return self._inner.sample(step, masks)
        logits = self._inner.logits(step)
        (chunk,) = step.chunks
        taken: list[Sampled] = []
        first = chunk.end - chunk.rows + 1 - chunk.seq.prompt_len
        for row in range(chunk.rows):
            logits[row].argmax()  # what greedy sampling costs
            taken.append(Sampled(self.answer[first + row]))
            if row == len(chunk.draft) or taken[-1].id != chunk.draft[row]:
                break
        return CompletedSamples([taken])

    def logits(self, step: Step) -> NDArray[np.float32]:
        return self._inner.logits(step)

    def close(self) -> None:
        free_context(self._inner)


@dataclass
class Side:
    """One engine, with drafts or without (no part)."""

    executor: Forced
    engine: Engine
    part: Part | None
    drafter: Drafter | None
    seconds: list[float] = field(default_factory=list)  # of each request

    def run(self, request: Request, forced: bool) -> float:
        """Return the seconds from the first token to the last."""
        self.executor.answer = request.answer if forced else None
        self.executor.steps = []

        async def answer() -> float:
            first = last = 0.0
            params = SamplingParams(temperature=0, max_tokens=len(request.answer))
            async for event in self.engine.submit(request.prompt, params, past=request.past):
                last = time.perf_counter()
                first = first or (last if event.sampled else 0.0)
            return last - first

        with constants_of(self.part or ALL_ON):
            return asyncio.run(answer())


def read_requests(path: Path, args: argparse.Namespace) -> list[Request]:
    """Return the recorded requests. Tokens are numbered anew, so that a model of any vocabulary takes them."""
    data = np.load(path, allow_pickle=False)
    requests = []
    all_tokens = np.unique(data["tokens"], return_inverse=True)[1]
    for i in range(min(args.skip + args.requests, len(data["prompt_len"]))):
        tokens = all_tokens[data["offsets"][i] : data["offsets"][i + 1]].tolist()
        prompt, answer = tokens[: data["prompt_len"][i]], tokens[data["prompt_len"][i] :][: args.tokens]
        kept = min(len(prompt), args.context - len(answer) - 1)
        requests.append(Request(prompt[: len(prompt) - kept], prompt[len(prompt) - kept :], answer))
    return [request for request in requests if len(request.answer) > 8]


def make_side(model: LlamaModel, args: argparse.Namespace, surface: list[Measured], part: Part | None) -> Side:
    options = LlamaOptions(context=args.context, kv=args.kv, threads=args.threads, max_sequences=2)
    executor = Forced(LlamaExecutor(model, options))
    clock = StepClock(StepCosts(surface) if part else None)
    drafter = make_drafter(part, clock) if part else None
    engine = Engine(executor, Scheduler(executor.info, SlotKV(executor.info, 2**28), clock, drafter), clock)
    return Side(executor, engine.start(), part, drafter)


def measured_surface(model: LlamaModel, args: argparse.Namespace) -> list[Measured]:
    options = LlamaOptions(context=args.context, kv=args.kv, threads=args.threads, max_sequences=2)
    executor = LlamaExecutor(model, options)
    deep = min(DEPTH, args.context // 2)
    wanted = [(rows, SHALLOW_LEN) for rows in ROWS] + [(rows, deep) for rows in DEEP_ROWS]
    rounds = [measure_steps(executor, wanted, 600) for _ in range(3)]
    free_context(executor)
    times: dict[tuple[int, int], list[float]] = {}
    for rows, depth, seconds in (point for points in rounds for point in points):
        times.setdefault((rows, depth), []).append(seconds)
    return [Measured(rows, depth, statistics.median(each)) for (rows, depth), each in times.items()]


def free_context(executor: LlamaExecutor) -> None:
    """Free an executor's memory, but not the model, which others share."""
    native, executor._context = executor._context, None
    L.llama_free(native)


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by bootstrap."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(BOOTSTRAP))
    return medians[int(0.025 * BOOTSTRAP)], medians[int(0.975 * BOOTSTRAP)]


def run_file(path: Path, model: LlamaModel, args: argparse.Namespace, surface: list[Measured], say: Any) -> None:
    parts = [part for part in PARTS if part.name.startswith(tuple(args.without))] if args.without else []
    sides = [make_side(model, args, surface, part) for part in (None, ALL_ON, *parts)]
    off, on, *others = sides
    predicting = StepCosts(surface)
    tokens, steps, predicted_on, predicted_off = 0, 0, 0.0, 0.0
    for number, request in enumerate(read_requests(path, args)):
        if number < args.skip:
            for side in sides[1:]:
                feed(side, request)
            continue
        for side in [*sides[number % len(sides) :], *sides[: number % len(sides)]]:
            side.seconds.append(side.run(request, not args.free))
        tokens += len(request.answer) - 1
        steps += len(on.executor.steps)
        predicted_on += sum(predicting.time(rows, depth) for rows, depth in on.executor.steps)
        predicted_off += sum(predicting.time(1, len(request.prompt) + i) for i in range(len(request.answer) - 1))
    for side in sides:
        side.engine.close()
    if not on.seconds:
        say(f"{path.stem}: no request behind the {args.skip} that only fill the memory of past answers")
        return
    measured, predicted = sum(off.seconds) / sum(on.seconds), predicted_off / predicted_on
    say(
        f"{path.stem}: {len(on.seconds)} requests, {tokens} tokens, {tokens / steps:.2f} tokens a step; off / on "
        f"{measured:.3f}, median {ratio(off, on)}, predicted {predicted:.3f}, measured / predicted "
        f"{measured / predicted:.3f}"
    )
    for side in others:
        assert side.part
        whole = sum(on.seconds) / sum(side.seconds)
        say(f"    without {side.part.name}: all on / this {whole:.3f}, median {ratio(on, side)}")


def ratio(one: Side, other: Side) -> str:
    """Return the median of the requests' ratios of time, with its interval."""
    ratios = [a / b for a, b in zip(one.seconds, other.seconds, strict=True)]
    low, high = interval(ratios)
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def feed(side: Side, request: Request) -> None:
    """Let the drafter of a side see a request without running it."""
    drafter = side.drafter
    assert drafter
    seq = Sequence(-1, [*request.prompt, *request.answer], len(request.prompt), SamplingParams(), past=request.past)
    with constants_of(side.part or ALL_ON):
        drafter.begin(seq)
        while drafter.work(1.0):
            pass
        drafter.end(seq)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=usable_cores().physical)
    parser.add_argument("--kv", default="f16")
    parser.add_argument("--free", action="store_true")
    parser.add_argument("--without", nargs="+", default=[], metavar="PART")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    def say(line: str) -> None:
        print(line, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(line + "\n")

    model = LlamaModel(args.model)
    surface = measured_surface(model, args)
    say(f"{args.model.stem}, kv {args.kv}, context {args.context}, {args.threads} threads, {platform.machine()}")
    base = next(point.seconds for point in surface if point.rows == 1)
    say(
        "steps of (rows @ depth), in ms and in plain steps: "
        + ", ".join(
            f"{point.rows} @ {point.depth}: {1000 * point.seconds:.1f} ({point.seconds / base:.2f})"
            for point in surface
        )
    )
    for path in args.traces:
        run_file(path, model, args, surface, say)


if __name__ == "__main__":
    main()
