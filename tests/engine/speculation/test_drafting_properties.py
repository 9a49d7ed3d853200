"""The real drafters in random workloads: every answer is the one given alone, and nothing is left behind."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest

from edgelm.engine.clock import Measured, StepClock, StepCosts
from edgelm.engine.core import Sequence
from edgelm.engine.speculation import past_answers as answers
from edgelm.engine.speculation.model_drafter import ModelDrafter
from edgelm.engine.speculation.ngram_drafter import MAX_IDLE, NgramDrafter
from edgelm.engine.speculation.past_answers import AnswersFile, PastAnswers
from edgelm.engine.speculation.throttle import ChainDrafter, ThrottledDrafter
from tests.counts import Count
from tests.engine.fake import FakeExecutor, SlotMemory, info
from tests.engine.simulation import BOOKKEEPERS, Simulation, fresh_seed
from tests.engine.workloads import Workload, make_workload

WORKLOADS = Count(test=60, soak=2_000)  # for each bookkeeper


class Eager(StepClock):
    """A row costs a hundredth of a step, so that drafts are long and often wrong."""

    def marginal_cost(self, rows: int, depth: int, sequences: int, room: int) -> list[float]:
        return [0.01] * room


class Stack:
    """All drafters together, as `edgelm.backends.drafting` composes them, with counts of their tokens."""

    def __init__(self, workload: Workload, clock: StepClock, folder: Path) -> None:
        self._rng = random.Random(workload.seed)
        self._folder = folder
        facts = info(num_vocab=workload.info.num_vocab, context=workload.info.context, capacity=200)
        self.small = FakeExecutor(facts, SlotMemory(facts, 0))
        self.small._check = lambda step: None  # type: ignore[method-assign]  # a drafter trims without a step
        self.clears = 0
        self.memory = PastAnswers(AnswersFile(folder / "a.answers", max_bytes=4_000), max_tokens=400)
        self.ngrams = NgramDrafter(self.memory, max_tokens=400)
        self.model = ModelDrafter(self.small, lambda: 1.0)
        self.throttles = [ThrottledDrafter(self.ngrams, clock), ThrottledDrafter(self.model, clock)]
        self.chain = ChainDrafter(self.throttles)
        self.begun: set[int] = set()
        self.drafted = 0
        self.accepted = 0

    def begin(self, seq: Sequence) -> None:
        assert seq.id not in self.begun
        self.begun.add(seq.id)
        self.chain.begin(seq)

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        rng = self._rng
        if rng.random() < 0.02:
            self.clears += answers.clear(self._folder)
        draft = self.chain.propose(seq, marginal_cost)
        assert len(draft) <= len(marginal_cost)
        self.work(rng.choice([0.0, 0.0, 1.0]))
        return draft

    def missed_draft_cost(self, seq: Sequence, marginal_cost: Seq[float]) -> float:
        missed_draft_cost = self.chain.missed_draft_cost(seq, marginal_cost)
        assert missed_draft_cost >= 0
        return self._rng.choice([0.0, self.ngrams.missed_draft_cost(seq, marginal_cost), missed_draft_cost])

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted
        self.chain.observe(seq, drafted, accepted)

    def end(self, seq: Sequence) -> None:
        self.begun.remove(seq.id)
        self.chain.end(seq)

    def work(self, seconds: float) -> bool:
        return self.chain.work(seconds)

    def close(self) -> None:
        self.chain.close()


def run(seed: int, kind: str, folder: Path) -> Stack:
    simulation = Simulation(make_workload(seed), kind)
    simulation.clock = Eager(StepCosts([Measured(1, 0, 0.01), Measured(64, 0, 0.02)]))
    stack = Stack(simulation.workload, simulation.clock, folder)
    simulation.drafter = stack  # type: ignore[assignment]
    simulation.start()
    try:
        simulation.run()
        while stack.work(1.0):
            pass
        assert not stack.ngrams._running
        assert len(stack.ngrams._idle) <= MAX_IDLE
        assert not stack.chain._author
        assert not any(throttle._accounts for throttle in stack.throttles)
        assert not stack.model._mirrors
        assert len(stack.model._free_slots) == stack.small.info.max_sequences, "the draft model was disabled"
        assert not any(stack.small.memory.slots)  # type: ignore[union-attr]
        assert not stack.memory._unwritten
        assert sum(answers.num_tokens for answers in stack.memory._namespaces.values()) <= 400
        assert all(stack.memory._namespaces[cache_namespace] for cache_namespace in stack.memory._unread)
    except BaseException as error:
        error.add_note(f"seed {seed}, {kind}")
        raise
    stack.close()
    return stack


@pytest.mark.parametrize("kind", BOOKKEEPERS)
def test_every_answer_is_the_one_given_alone_whoever_drafts(kind: str, tmp_path: Path) -> None:
    first = fresh_seed()
    stacks = [run(first + number, kind, tmp_path / str(number)) for number in range(WORKLOADS)]
    assert sum(stack.accepted for stack in stacks) > 2 * WORKLOADS
    assert sum(stack.drafted - stack.accepted for stack in stacks) > 2 * WORKLOADS
    assert sum(stack.clears for stack in stacks) > WORKLOADS / 20
