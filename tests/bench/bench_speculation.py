"""Speculation on real llama.cpp: a random model forced along recorded streams, drafts on and off, request by request.

    python -m tests.bench.bench_speculation MODEL.gguf TRACE.npz ... [--requests 12] [--tokens 160] [--context 1024]
                                            [--kv f16] [--skip 0] [--free] [--out FILE]

Both sides are engines over the same weights, alternating; each recorded answer is forced on both, so what differs is
the steps. Prints for each file the ratio of decode times (off / on) over all requests, the median of the requests'
ratios with its 95 % interval (bootstrap), tokens a step, and what the measured surface of step times predicts for the
very steps that were run. The model sees the last `--context` tokens, the drafter all. Memory of past answers is that
of the earlier requests of the file; `--skip` requests only fill it. `--free` runs the model's own answers instead
(random weights: there is nothing to draft, so it shows the harm).
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

from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.core import CompletedSamples, Drafter, Masks, Sampled, SamplingParams, Sequence, Step
from edgelm.engine.clock import Measured, StepClock, StepCosts
from edgelm.engine.engine import Engine
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.scheduler import Scheduler
from edgelm.llama_binding import L
from edgelm.machine.cpu import usable_cores
from edgelm.machine.step_times import DEEP_ROWS, DEPTH, ROWS, SHALLOW_LEN, measure_steps
from edgelm.speculation.ngram_drafter import NgramDrafter
from edgelm.speculation.past_answers import PastAnswers
from edgelm.speculation.throttle import ThrottledDrafter

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
    """One engine, with drafts or without."""

    executor: Forced
    engine: Engine
    seconds: list[float] = field(default_factory=list)

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

        return asyncio.run(answer())


def read_requests(path: Path, args: argparse.Namespace) -> list[Request]:
    data = np.load(path, allow_pickle=False)
    requests = []
    for i in range(min(args.skip + args.requests, len(data["prompt_len"]))):
        tokens = data["tokens"][data["offsets"][i] : data["offsets"][i + 1]].tolist()
        prompt, answer = tokens[: data["prompt_len"][i]], tokens[data["prompt_len"][i] :][: args.tokens]
        kept = min(len(prompt), args.context - len(answer) - 1)
        requests.append(Request(prompt[: len(prompt) - kept], prompt[len(prompt) - kept :], answer))
    return [request for request in requests if len(request.answer) > 8]


def make_side(model: LlamaModel, args: argparse.Namespace, costs: StepCosts | None, drafter: Drafter | None) -> Side:
    options = LlamaOptions(
        context=args.context, kv=args.kv, threads=args.threads, batch_threads=args.threads, max_sequences=2
    )
    executor = Forced(LlamaExecutor(model, options))
    clock = StepClock(costs)
    guarded = ThrottledDrafter(drafter, clock) if drafter else None
    engine = Engine(executor, Scheduler(executor.info, SlotKV(executor.info, 2**28), clock, guarded), clock)
    return Side(executor, engine.start())


def measured_surface(model: LlamaModel, args: argparse.Namespace) -> list[Measured]:
    options = LlamaOptions(
        context=args.context, kv=args.kv, threads=args.threads, batch_threads=args.threads, max_sequences=2
    )
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
    drafter = NgramDrafter(PastAnswers())
    on, off = make_side(model, args, StepCosts(surface), drafter), make_side(model, args, None, None)
    predicting = StepCosts(surface)
    ratios, seconds_on, seconds_off, tokens, steps = [], 0.0, 0.0, 0, 0
    predicted_on = predicted_off = 0.0
    for number, request in enumerate(read_requests(path, args)):
        if number < args.skip:
            feed(drafter, request)
            continue
        sides = [on, off] if number % 2 else [off, on]
        times = {id(side): side.run(request, not args.free) for side in sides}
        ratios.append(times[id(off)] / times[id(on)])
        seconds_on += times[id(on)]
        seconds_off += times[id(off)]
        tokens += len(request.answer) - 1
        steps += len(on.executor.steps)
        predicted_on += sum(predicting.time(rows, depth) for rows, depth in on.executor.steps)
        predicted_off += sum(predicting.time(1, len(request.prompt) + i) for i in range(len(request.answer) - 1))
    on.engine.close()
    off.engine.close()
    low, high = interval(ratios)
    measured, predicted = seconds_off / seconds_on, predicted_off / predicted_on
    say(
        f"{path.stem}: {len(ratios)} requests, {tokens} tokens, {tokens / steps:.2f} tokens a step; off / on "
        f"{measured:.3f}, median {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}), predicted {predicted:.3f}, "
        f"measured / predicted {measured / predicted:.3f}"
    )


def feed(drafter: NgramDrafter, request: Request) -> None:
    """Let the drafter see a request without running it."""
    seq = Sequence(-1, [*request.prompt, *request.answer], len(request.prompt), SamplingParams(), past=request.past)
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
