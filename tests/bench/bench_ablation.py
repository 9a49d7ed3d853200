"""The parts of speculation, each switched off: recorded answers and misleading streams, at simulated step costs.

    python -m tests.bench.bench_ablation TRACE.npz ... [--only PART ...] [--json FILE]

The drafter, its throttle and the engine's clock are the product's; the steps are not run: a step takes the time that
its rows cost. The clock is told these costs before the first step, as after the benchmark at start, or too low ones
("0.03 told, 0.35 true": a machine that became busy). Time that the drafter itself takes is not counted, so the figures
are the same on every machine. Prints the speed without each part, relative to all parts on, for every recorded set;
for misleading streams the speed relative to no drafts; and for steps launched ahead, by tests/bench/drafter.py.

    prior      the logistic prior of acceptance; without: one rate for all kinds of evidence, the better of two
    offsets    corrections where this conversation and past answers agree or differ
    reach      the factor for the depth of a draft
    habits     biases by text, by the last token and by the guessed one
    caution    a row must be worth 1.2 times its cost; without: 1.0
    throttle   accounts and pauses of requests that lose, plain steps for comparison
    stakes     the learnt cost of a missed draft, by which steps are launched ahead
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from edgelm.engine.clock import Measured, StepClock, StepCosts
from edgelm.engine.core import Chunk, Drafter, SamplingParams, Sequence, Step
from edgelm.engine.speculation import acceptance, ngram_drafter, throttle
from edgelm.engine.speculation.acceptance import MAX_DRAFT, PRIOR_STRENGTH, Acceptance, Reach
from edgelm.engine.speculation.ngram_drafter import NgramDrafter
from edgelm.engine.speculation.past_answers import PastAnswers
from edgelm.engine.speculation.throttle import ThrottledDrafter
from tests.bench.adversarial import Answer, Recorded, streams
from tests.bench.drafter import read_requests, replay

AHEAD = "ahead"
STEP_S = 0.01  # of a plain step
TOLD_ROWS = 1, 2, 3, 4, 6, 8, 12, 16, 25
GAPS = 0.05, 0.35
STAIRCASE_SETS = "templated", "agentic", "alpaca"  # of bench_speculation
WORK_S = 1.0
# Steps of a 1B Q4_0 model on two virtual cores by rows, in plain steps (docs/results/speculation-2026-11-21.txt).
MEASURED = {1: 1.0, 2: 1.73, 3: 2.24, 4: 2.41, 5: 3.07, 6: 3.72, 7: 4.33, 8: 5.06, 12: 6.47, 16: 6.39, 32: 11.64}


Figures = dict[str, dict[str, dict[str, float]]]  # kind, part, cell


@dataclass(frozen=True)
class Costs:
    """The time of a step by its rows, in plain steps: the true one, and the one that was measured at start."""

    name: str
    true: Callable[[int], float]
    told: Callable[[int], float]


@dataclass(frozen=True)
class Part:
    """The changes where a part is off."""

    name: str
    values: tuple[tuple[object, str, float], ...] = ()  # module, constant, value
    flat_rate: float | None = None
    reach: bool = True
    throttle: bool = True


class NoReach(Reach):
    """Probabilities multiplied along a draft, without a correction."""

    def shares(self, level: int) -> list[float]:
        return [1.0] * len(super().shares(level))


def linear(cost: float) -> Callable[[int], float]:
    """Return the time of a step in which each row more costs the same."""
    return lambda rows: 1 + cost * (rows - 1)


def staircase(rows: int) -> float:
    """Return the time that was measured on a processor, on the line between its neighbours."""
    low, high = max(n for n in MEASURED if n <= rows), min(n for n in MEASURED if n >= rows)
    share = (rows - low) / (high - low) if high > low else 0.0
    return MEASURED[low] + share * (MEASURED[high] - MEASURED[low])


COSTS = (
    *(Costs(str(cost), linear(cost), linear(cost)) for cost in (0.03, 0.12, 0.35)),
    Costs("1B on two cores", staircase, staircase),
    Costs("0.03 told, 0.35 true", linear(0.35), linear(0.03)),
)
TEXT = ngram_drafter, "TEXT_BIAS_RATE", 0.0
TOKEN = ngram_drafter, "TOKEN_BIAS_RATE", 0.0
CAUTION = ngram_drafter, "SAFETY_MARGIN", 1.0
ALL_ON = Part("all on")
PARTS = (
    Part("prior (one rate of 0.5)", flat_rate=0.5),
    Part("reach", reach=False),
    Part("habits", (TEXT, TOKEN)),
    Part("caution", (CAUTION,)),
    Part("throttle", throttle=False),
    Part("caution and throttle", (CAUTION,), throttle=False),
    Part("prior (one rate of 0.3)", flat_rate=0.3),
    Part("offsets", ((acceptance, "OFFSET_RATE", 0.0),)),
    Part("habit by text", (TEXT,)),
    Part("habit by token", (TOKEN,)),
)


@contextmanager
def constants_of(part: Part) -> Iterator[None]:
    """Set the constants of a part."""
    with ExitStack() as stack:
        for module, name, value in part.values:
            stack.enter_context(patch.object(module, name, value))
        yield


def make_drafter(part: Part, clock: StepClock) -> Drafter:
    """Return a new drafter without a part."""
    rates = Acceptance()
    if part.flat_rate is not None:
        rates._right = [PRIOR_STRENGTH * part.flat_rate] * len(rates._right)
    if not part.reach:
        rates.reach = NoReach()
    drafter = NgramDrafter(PastAnswers(), rates)
    return ThrottledDrafter(drafter, clock) if part.throttle else drafter


def speed(answers: Iterable[Answer], part: Part, costs: Costs) -> float:
    """Return the tokens in the time of a plain step, over all answers."""
    clock = StepClock(StepCosts(Measured(rows, 0, STEP_S * costs.told(rows)) for rows in TOLD_ROWS))
    tokens = seconds = 0.0
    standing = SimpleNamespace(perf_counter=float)  # a clock for the throttle
    with constants_of(part), patch.object(throttle, "time", standing):
        drafter = make_drafter(part, clock)
        for number, answer in enumerate(answers):
            took, count = _decode(answer, number, drafter, clock, costs)
            seconds += took
            tokens += count
    return tokens * STEP_S / seconds


def _decode(answer: Answer, number: int, drafter: Drafter, clock: StepClock, costs: Costs) -> tuple[float, int]:
    """Return the seconds and the tokens after the first one."""
    seq = Sequence(number, [*answer.prompt, *answer.after(answer.prompt, [])], len(answer.prompt), SamplingParams())
    drafter.begin(seq)
    _finish_work(drafter)
    seconds, first = 0.0, len(seq.tokens)
    while True:
        known = len(seq.tokens)
        draft = drafter.propose(seq, clock.marginal_cost(1, 0, 1, MAX_DRAFT))
        tokens = answer.after(seq.tokens, draft)
        if not tokens:
            break
        rows = 1 + len(draft)
        seq.tokens += tokens
        took = STEP_S * costs.true(rows)
        clock.observe(Step((Chunk(seq, 0, [0] * rows, rows, 0),)), took)
        if draft:
            drafter.observe(seq, len(draft), len(seq.tokens) - known - 1)
        seconds += took
    drafter.end(seq)
    _finish_work(drafter)
    return seconds, len(seq.tokens) - first


def _finish_work(drafter: Drafter) -> None:
    while drafter.work(WORK_S):
        pass


def recorded(path: Path) -> list[Answer]:
    """Return the answers of a file of traces."""
    return [
        Recorded(request.tokens[: request.prompt_len], request.tokens[request.prompt_len :])
        for request in read_requests(path)
        if len(request.tokens) > request.prompt_len + 1
    ]


def ahead_rules() -> dict[str, Callable[[NgramDrafter, Sequence, list[float]], float]]:
    """Return the rules by which a step may be launched ahead: the cost that is compared with the gap."""
    learnt = NgramDrafter.missed_draft_cost

    def unless_guessed(drafter: NgramDrafter, seq: Sequence, costs: list[float]) -> float:
        learnt(drafter, seq, costs)
        return math.inf if drafter._running[seq.id].guesses else 0.0

    return {"stakes": learnt, "never ahead": lambda *_: math.inf, "where nothing is guessed": unless_guessed}


def main() -> None:
    """Print three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="TRACE.npz")
    parser.add_argument("--only", nargs="+", default=[], help="parts whose names begin so; or: ahead")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures: Figures = {}
    if args.only != [AHEAD]:
        parts = [part for part in PARTS if not args.only or part.name.startswith(tuple(args.only))]
        drafts(args.files, parts, figures)
    if not args.only or AHEAD in args.only:
        figures[AHEAD] = ahead(args.files)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


def drafts(files: list[Path], parts: list[Part], figures: Figures) -> None:
    """Print the speeds with all parts and without each."""
    sets = {path.stem: recorded(path) for path in files}
    print("\nRecorded sets: with all parts, tokens in the time of a plain step; without one, relative to that\n")
    print("Misleading streams: speed relative to no drafts\n", flush=True)
    cells = {
        f"{name}, {costs.name}": (answers, costs)
        for costs in COSTS[:-1]
        for name, answers in sets.items()
        if costs.true is not staircase or name in STAIRCASE_SETS
    }
    misleading = {f"{name}, {costs.name}": (make, costs) for costs in COSTS for name, make in streams().items()}
    base: dict[str, float] = {}
    figures |= {"recorded": {}, "misleading": {}}
    for part in (ALL_ON, *parts):
        speeds = {cell: speed(answers, part, costs) for cell, (answers, costs) in cells.items()}
        base = base or speeds
        ratios = {cell: value / (base[cell] if part is not ALL_ON else 1.0) for cell, value in speeds.items()}
        figures["recorded"][part.name] = row(f"{part.name}, recorded", ratios)
        harm = {cell: speed(make(), part, costs) for cell, (make, costs) in misleading.items()}
        figures["misleading"][part.name] = row(f"{part.name}, misleading", harm)


def ahead(files: list[Path]) -> dict[str, dict[str, float]]:
    """Print the speeds by the rules for launching a step ahead."""
    print("\nSteps launched ahead (tests/bench/drafter.py, 0.05 steps a row): tokens in the time of a plain step\n")
    figures = {}
    for name, rule in ahead_rules().items():
        with patch.object(NgramDrafter, "missed_draft_cost", rule):
            speeds = {
                f"{path.stem}, gap {gap}": replay(read_requests(path), 0.05, gap=gap).whole.speedup(0.05, gap)
                for path in files
                for gap in GAPS
            }
        figures[name] = row(name, speeds)
    return figures


def row(name: str, speeds: dict[str, float]) -> dict[str, float]:
    """Print a part with all its cells, the least one first, and return them."""
    least = min(speeds, key=speeds.__getitem__)
    print(f"{name}: least {speeds[least]:.4f} ({least})")
    for cell, value in speeds.items():
        print(f"    {value:.4f}  {cell}")
    print(end="", flush=True)
    return speeds


if __name__ == "__main__":
    main()
