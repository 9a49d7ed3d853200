"""Replay recorded answers against the n-gram drafter: `python -m tests.bench.drafter FILE.npz … --cost C`.

Greedy verification depends only on the text and the draft, so a recorded stream gives exact counts without a model. The
requests of a file run in order, and the first token of each answer is given. The drafter remembers the earlier answers
of the same file (not with --no-memory). It is told that each extra row costs C steps.

The output for each file, and with --tasks for each of its tasks: tokens per step, draft tokens per step, the speed-up
S(C) = tokens / sum over steps of (1 + C x drafted), and microseconds per step (`propose` and `observe`, wall clock).
With --repeat N everything runs N times, and each step counts with its least time: the steps are the same in each run,
so this is their time on an idle machine. The time before the first step of an answer and after its last one (`begin`,
`work`, `end`) is not included; --json gives it in microseconds per thousand tokens of prompt and answer.

With --gap G each step that waits for the result of the previous one takes G steps more: the host's work between them.
Steps are then launched ahead where the drafter's `missed_draft_cost` allows it, as the engine does. `ahead` is their
share; S without launching ahead is printed beside it.

File format: arrays `tokens` (all requests, prompt then answer), `offsets` (requests + 1), `prompt_len`, `task` (index
into `task_names`), `session`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgelm.engine.core import SamplingParams, Sequence
from edgelm.engine.speculation.ngram_drafter import NgramDrafter
from edgelm.engine.speculation.past_answers import PastAnswers

MAX_DRAFT = 64  # rows whose cost the drafter is told
WORK_S = 1.0


@dataclass
class Tally:
    """Totals over the steps of some requests."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    ahead: int = 0  # steps that were launched before the previous one was read
    step_ns: list[int] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.tokens += other.tokens
        self.steps += other.steps
        self.drafted += other.drafted
        self.ahead += other.ahead
        self.step_ns += other.step_ns

    def speedup(self, cost: float, gap: float) -> float:
        """Return tokens per time, in steps."""
        time = self.steps + cost * self.drafted + gap * (self.steps - self.ahead)
        return round(self.tokens * (1 + gap) / max(time, 1e-9), 4)

    def figures(self, cost: float) -> dict[str, float]:
        """Return the figures of the report."""
        steps = max(self.steps, 1)
        micro = np.array(self.step_ns or [0]) / 1000
        return {
            "tokens_per_step": round(self.tokens / steps, 4),
            "drafted_per_step": round(self.drafted / steps, 4),
            "speedup": self.speedup(cost, 0.0),
            "us_p50": round(float(np.percentile(micro, 50)), 2),
            "us_mean": round(float(micro.mean()), 2),
            "us_p99": round(float(np.percentile(micro, 99)), 2),
        }


@dataclass(frozen=True)
class Request:
    """One recorded request."""

    task: str
    tokens: list[int]
    prompt_len: int


@dataclass
class Replay:
    """The totals of a file: by task, and the time outside of the steps."""

    tasks: dict[str, Tally] = field(default_factory=dict)
    beside_ns: int = 0
    beside_tokens: int = 0

    def take_least(self, other: Replay) -> None:
        """Keep the lesser of two times of each step and of the time outside."""
        self.beside_ns = min(self.beside_ns, other.beside_ns)
        for task, tally in self.tasks.items():
            again = other.tasks[task]
            assert (tally.tokens, tally.steps, tally.drafted) == (again.tokens, again.steps, again.drafted)
            tally.step_ns = [min(pair) for pair in zip(tally.step_ns, again.step_ns, strict=True)]

    @property
    def whole(self) -> Tally:
        """The totals of all tasks."""
        tally = Tally()
        for task in self.tasks.values():
            tally.add(task)
        return tally


def read_requests(path: Path) -> list[Request]:
    """Return the requests of a file, in order."""
    with np.load(path) as data:
        tokens, offsets = data["tokens"].tolist(), data["offsets"].tolist()
        names = data["task_names"].tolist()
        return [
            Request(str(names[task]), tokens[start:stop], prompt_len)
            for start, stop, prompt_len, task in zip(
                offsets[:-1], offsets[1:], data["prompt_len"].tolist(), data["task"].tolist(), strict=True
            )
        ]


def replay(requests: Iterable[Request], cost: float, *, memory: bool = True, gap: float | None = None) -> Replay:
    """Run requests in order through a new drafter; with a gap, launch steps ahead where that pays."""
    clock = time.perf_counter_ns
    drafter = NgramDrafter(PastAnswers() if memory else None)
    costs = [cost] * MAX_DRAFT
    result = Replay()
    for number, request in enumerate(requests):
        tokens, first = request.tokens, request.prompt_len
        if len(tokens) <= first:
            continue
        seq = Sequence(number, tokens[: first + 1], first, SamplingParams())
        start = clock()
        drafter.begin(seq)
        while drafter.work(WORK_S):
            pass
        before = clock() - start
        tally = _decode(drafter, seq, tokens, costs, gap)
        start = clock()
        drafter.end(seq)
        while drafter.work(WORK_S):
            pass
        result.beside_ns += before + clock() - start
        result.beside_tokens += len(tokens)
        result.tasks.setdefault(request.task, Tally()).add(tally)
    return result


def _decode(drafter: NgramDrafter, seq: Sequence, tokens: list[int], costs: list[float], gap: float | None) -> Tally:
    tally = Tally()
    clock = time.perf_counter_ns
    ahead = False
    while len(seq.tokens) < len(tokens):
        start = clock()
        tally.ahead += ahead
        draft = [] if ahead else drafter.propose(seq, costs)
        ahead = gap is not None and not draft and drafter.missed_draft_cost(seq, costs) <= gap
        proposed = clock()
        known = len(seq.tokens)
        accepted = 0
        while accepted < len(draft) and tokens[known + accepted : known + accepted + 1] == [draft[accepted]]:
            accepted += 1
        seq.tokens += tokens[known : known + accepted + 1]
        ready = clock()
        if draft:
            drafter.observe(seq, len(draft), accepted)
        tally.step_ns.append(proposed - start + clock() - ready)
        tally.tokens += len(seq.tokens) - known
        tally.steps += 1
        tally.drafted += len(draft)
    return tally


def main(arguments: list[str]) -> None:
    """Print a table, or one JSON document."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.drafter", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.npz")
    parser.add_argument("--cost", type=float, required=True, metavar="C", help="of one row more, in steps")
    parser.add_argument("--gap", type=float, metavar="G", help="before a step that waits for the one before, in steps")
    parser.add_argument("--no-memory", action="store_true", help="each request is on its own")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="take each step's least time of N runs")
    parser.add_argument("--tasks", action="store_true", help="print each task, too")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    sets = {}
    for path in options.files:
        requests = read_requests(path)
        result = replay(requests, options.cost, memory=not options.no_memory)
        for _ in range(options.repeat - 1):
            result.take_least(replay(requests, options.cost, memory=not options.no_memory))
        gap: float | None = options.gap
        compared: dict[str, float] = {}
        if gap is not None:
            whole = replay(requests, options.cost, memory=not options.no_memory, gap=gap).whole
            compared = {
                "speedup_gap": result.whole.speedup(options.cost, gap),
                "speedup_ahead": whole.speedup(options.cost, gap),
                "ahead": round(whole.ahead / max(whole.steps, 1), 4),
            }
        tasks = {name: tally.figures(options.cost) for name, tally in result.tasks.items()}
        sets[path.stem] = {
            **result.whole.figures(options.cost),
            **compared,
            "beside_us_per_ktoken": round(result.beside_ns / max(result.beside_tokens, 1), 1),
            "tasks": tasks,
        }
    if options.json:
        print(json.dumps({"sets": sets}))
        return
    columns = ("tokens_per_step", "drafted_per_step", "speedup", "us_p50", "us_mean", "us_p99")
    if options.gap is not None:
        columns += ("speedup_gap", "speedup_ahead", "ahead")
    print(f"{f'cost {options.cost:g}':36}" + "".join(f"{column:>18}" for column in columns))
    for name, figures in sets.items():
        rows = [(name, figures)]
        if options.tasks:
            rows += [(f"  {task}", each) for task, each in figures["tasks"].items()]
        for label, row in rows:
            print(f"{label:36}" + "".join(f"{row[column]:>18.3f}" for column in columns if column in row))


if __name__ == "__main__":
    main(sys.argv[1:])
