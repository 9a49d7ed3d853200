"""The real drafters in random workloads: every answer is the one given alone, and nothing is left behind."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest

from edgelm.core import Sequence
from edgelm.engine import answers
from edgelm.engine.answers import AnswersFile
from edgelm.engine.chain import ChainDrafter
from edgelm.engine.clock import StepClock
from edgelm.engine.costs import Measured, StepCosts
from edgelm.engine.drafter import MAX_IDLE, NgramDrafter
from edgelm.engine.guard import GuardedDrafter
from edgelm.engine.memory import Memory
from edgelm.engine.model_drafter import ModelDrafter
from tests.counts import Count
from tests.engine.fake import FakeExecutor, SlotMemory, info
from tests.engine.simulation import BOOKKEEPERS, Simulation, fresh_seed
from tests.engine.workloads import Workload, make_workload

WORKLOADS = Count(test=60, soak=2_000)  # for each bookkeeper


class Eager(StepClock):
    """Says that a row costs a hundredth of a step, so that drafts are long and often wrong."""

    def marginal_cost(self, rows: int, depth: int, sequences: int, room: int) -> list[float]:
        return [0.01] * room


class Stack:
    """All drafters together, as `edgelm.drafting` builds them, and how many tokens they brought."""

    def __init__(self, workload: Workload, clock: StepClock, folder: Path) -> None:
        self._rng = random.Random(workload.seed)
        self._folder = folder
        facts = info(num_vocab=workload.info.num_vocab, context=workload.info.context, capacity=200)
        self.small = FakeExecutor(facts, SlotMemory(facts, 0))
        self.small._check = lambda step: None  # type: ignore[method-assign]  # its trims need not wait for a step
        self.clears = 0
        self.memory = Memory(AnswersFile(folder / "a.answers", most_bytes=4_000), most_tokens=400)
        self.ngrams = NgramDrafter(self.memory, max_tokens=400)
        self.model = ModelDrafter(self.small, lambda: 1.0)
        self.guards = [GuardedDrafter(self.ngrams, clock), GuardedDrafter(self.model, clock)]
        self.chain = ChainDrafter(self.guards)
        self.begun: set[int] = set()
        self.drafted = 0
        self.accepted = 0

    def begin(self, seq: Sequence) -> None:
        assert seq.id not in self.begun
        self.begun.add(seq.id)
        self.chain.begin(seq)

    def propose(self, seq: Sequence, marginal_cost: Seq[float]) -> list[int]:
        rng = self._rng
        if rng.random() < 0.02:
            self.clears += answers.clear(self._folder)
        draft = self.chain.propose(seq, marginal_cost)
        assert len(draft) <= len(marginal_cost)
        self.work(rng.choice([0.0, 0.0, 1.0]))
        return draft

    def stake(self, seq: Sequence, marginal_cost: Seq[float]) -> float:
        stake = self.chain.stake(seq, marginal_cost)
        assert stake >= 0
        return self._rng.choice([0.0, self.ngrams.stake(seq, marginal_cost), stake])

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
        assert not any(guard._accounts for guard in stack.guards)
        assert not stack.model._followers
        assert len(stack.model._free) == stack.small.info.max_sequences, "the small model was given up"
        assert not any(stack.small.memory.slots)  # type: ignore[union-attr]
        assert not stack.memory._unwritten
        assert sum(each.num_tokens for each in stack.memory._owners.values()) <= 400
        assert all(stack.memory._owners[owner] for owner in stack.memory._unread)
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
