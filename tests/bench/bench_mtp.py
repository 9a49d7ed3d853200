"""Drafts from heads and from texts, alone and together: recorded answers at simulated costs and agreements.

    python -m tests.bench.bench_mtp TRACE.npz ... [--requests 40] [--json FILE]

The drafters, the throttle and the engine's clock are the product's. Steps and heads are not run: a step takes the time
that its rows cost, each token of the heads `cost` plain steps, and that time counts. The heads are right about a token
as often as they are sure of it, in the mean `agreement`; that of real heads depends on the model and the text. Prints
the tokens in the time of a plain step: 1 is the speed without drafts, below which the throttle lets it fall by 0.01.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from edgelm.engine.clock import Measured, StepClock, StepCosts
from edgelm.engine.core import Chunk, Drafter, SamplingParams, Step
from edgelm.engine.core import Sequence as Seq
from edgelm.engine.speculation import mtp_drafter, throttle
from edgelm.engine.speculation.acceptance import MAX_DRAFT
from edgelm.engine.speculation.mtp_drafter import MtpDrafter
from edgelm.engine.speculation.ngram_drafter import NgramDrafter
from edgelm.engine.speculation.past_answers import PastAnswers
from edgelm.engine.speculation.throttle import ChainDrafter, ThrottledDrafter
from tests.bench.adversarial import Answer
from tests.bench.bench_ablation import STEP_S, TOLD_ROWS, Costs, linear, recorded, staircase

AGREEMENTS = 0.0, 0.3, 0.6, 0.8
HEAD_COSTS = 0.05, 0.15, 0.4  # plain steps for a token of the heads
ROW_COSTS = (*(Costs(f"{cost} a row", linear(cost), linear(cost)) for cost in (0.03, 0.35)),)
STAIRCASE = Costs("1B on two cores", staircase, staircase)
WHO = ("ngram",), ("mtp",), ("ngram", "mtp")


class SimulatedHeads:
    """Heads that know the recorded answers; `spend` is told the time of each token."""

    def __init__(self, agreement: float, cost: float, seed: int = 0) -> None:
        self.now = 0.0  # seconds
        self.answer: Sequence[int] = ()
        self._agreement = agreement
        self._cost = cost
        self._rng = random.Random(seed)
        self._at = 0

    def begin(self, seq_id: int) -> None: ...

    def end(self, seq_id: int) -> None: ...

    def first(self, seq_id: int, tokens: list[int]) -> tuple[int, float]:
        self._at = len(tokens)
        return self._token()

    def next(self, seq_id: int, token: int) -> tuple[int, float]:
        self._at += 1
        return self._token()

    def _token(self) -> tuple[int, float]:
        self.now += STEP_S * self._cost
        sure = self._rng.betavariate(2 * self._agreement, 2 * (1 - self._agreement)) if self._agreement else 0.05
        right = self._agreement > 0 and self._rng.random() < sure and self._at < len(self.answer)
        return (self.answer[self._at] if right else -5), sure


def speed(answers: Iterable[Answer], who: Sequence[str], costs: Costs, heads: SimulatedHeads, most: int) -> float:
    """Return the tokens in the time of a plain step, over all answers; a draft has at most so many tokens."""
    clock = StepClock(StepCosts(Measured(rows, 0, STEP_S * costs.told(rows)) for rows in TOLD_ROWS))
    watch = SimpleNamespace(perf_counter=lambda: heads.now)
    drafters: dict[str, Drafter] = {"ngram": NgramDrafter(PastAnswers()), "mtp": MtpDrafter(heads, clock.plain_s)}
    with patch.object(throttle, "time", watch), patch.object(mtp_drafter, "time", watch):
        drafter = ChainDrafter([ThrottledDrafter(drafters[name], clock, name=name) for name in who])
        tokens = 0
        for number, answer in enumerate(answers):
            tokens += _decode(answer, number, drafter, clock, costs, heads, most)
        return tokens * STEP_S / heads.now


def _decode(
    answer: Answer, number: int, drafter: Drafter, clock: StepClock, costs: Costs, heads: SimulatedHeads, most: int
) -> int:
    """Decode an answer, and return the tokens after the first one."""
    seq = Seq(number, [*answer.prompt, *answer.after(answer.prompt, [])], len(answer.prompt), SamplingParams())
    heads.answer = _whole(answer, seq.tokens)
    drafter.begin(seq)
    first = len(seq.tokens)
    while True:
        known = len(seq.tokens)
        draft = drafter.propose(seq, clock.marginal_cost(1, 0, 1, most))
        tokens = answer.after(seq.tokens, draft)
        if not tokens:
            break
        rows = 1 + len(draft)
        seq.tokens += tokens
        took = STEP_S * costs.true(rows)
        heads.now += took
        clock.observe(Step((Chunk(seq, 0, [0] * rows, rows, 0),)), took)
        if draft:
            drafter.observe(seq, len(draft), len(seq.tokens) - known - 1)
    drafter.end(seq)
    while drafter.work(1.0):
        pass
    return len(seq.tokens) - first


def _whole(answer: Answer, tokens: list[int]) -> list[int]:
    """Return an answer to its end, where nothing is drafted."""
    tokens = list(tokens)
    while more := answer.after(tokens, []):
        tokens += more
    return tokens


def main() -> None:
    """Print a table for each recorded set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="TRACE.npz")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = {}
    for path in args.files:
        answers = recorded(path)[: args.requests]
        for costs in (*ROW_COSTS, STAIRCASE):
            for cost in HEAD_COSTS:
                for agreement in AGREEMENTS:
                    for who in WHO:
                        name = f"{path.stem}, {costs.name}, heads {cost}, agreement {agreement}, {'+'.join(who)}"
                        figures[name] = speed(answers, who, costs, SimulatedHeads(agreement, cost), min(MAX_DRAFT, 3))
                        print(f"{figures[name]:.4f}  {name}", flush=True)
    least = min(figures, key=figures.__getitem__)
    print(f"least {figures[least]:.4f} ({least})")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
