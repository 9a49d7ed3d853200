"""ModelDrafter and ChainDrafter: right drafts are accepted, wrong ones only cost time, no slot is lost."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq

import pytest

from edgelm.engine.clock import Measured, StepClock, StepCosts
from edgelm.engine.core import Masks, Sampled, SamplingParams, Sequence, Step
from edgelm.engine.speculation.confidence import Confidence, Draft
from edgelm.engine.speculation.model_drafter import ModelDrafter
from edgelm.engine.speculation.throttle import ChainDrafter
from tests.engine.fake import FakeExecutor, FakePendingSamples, Fault, PagedMemory, SimpleDrafter, SlotMemory, info
from tests.engine.loop import Loop


class Confident(FakeExecutor):
    """A model with a fixed confidence; the share `wrong` of its tokens is off by one."""

    confidence = 0.95
    wrong = 0.0
    rng = random.Random(0)

    def _check(self, step: Step) -> None:
        if step.chunks:  # unlike the scheduler, a drafter trims without a step
            super()._check(step)

    def sample(self, step: Step, masks: Masks | None) -> FakePendingSamples:
        def off(token: int) -> int:
            return (token + 1) % self.info.num_vocab if self.rng.random() < self.wrong else token

        logprob = math.log(self.confidence)
        samples = super().sample(step, masks)
        samples.rows = [[Sampled(off(each.id), logprob) for each in rows] for rows in samples.rows]
        return samples


def draft_model(**facts: object) -> Confident:
    small = info(**facts)
    return Confident(small, SlotMemory(small, 0))


def run(loop: Loop, executor: Confident, requests: int = 6, seed: int = 1) -> list[Sequence]:
    rng = random.Random(seed)
    seqs = [loop.add(rng.choices(range(40), k=rng.randint(1, 60)), max_tokens=30) for _ in range(requests)]
    loop.finish()
    return seqs


def drafting(executor: Confident, step_s: float = 1.0) -> ModelDrafter:
    return ModelDrafter(executor, lambda: step_s)


def loop_with(drafter: ModelDrafter, **facts: object) -> Loop:
    """Return a loop in which each extra row costs a tenth of a step."""
    clock = StepClock(StepCosts([Measured(1, 0, 1.0), Measured(11, 0, 2.0)]))
    return Loop(drafter=drafter, clock=clock, **facts)


def test_the_same_model_drafts_what_is_accepted() -> None:
    executor = draft_model()
    seqs = run(loop_with(drafting(executor)), executor)  # Loop compares every answer with that of a request alone
    drafted, accepted = sum(seq.drafted for seq in seqs), sum(seq.accepted for seq in seqs)
    assert accepted == drafted > 60


def test_a_model_that_is_often_wrong_drafts_less() -> None:
    def drafted_a_step(wrong: float) -> float:
        executor = draft_model()
        executor.wrong = wrong
        seqs = run(loop_with(drafting(executor)), executor)
        return sum(seq.drafted for seq in seqs) / sum(seq.completion_len - seq.accepted for seq in seqs)

    assert drafted_a_step(wrong=0.9) < drafted_a_step(wrong=0.0) / 3


def test_the_draft_model_s_cache_is_empty_when_nothing_runs() -> None:
    executor = draft_model()
    executor.wrong = 0.5
    run(loop_with(drafting(executor)), executor, requests=12)
    assert isinstance(executor.memory, SlotMemory)
    assert executor.memory.num_used == 0


def test_more_sequences_than_the_draft_model_has_slots_are_answered() -> None:
    executor = draft_model(max_sequences=1)
    seqs = run(loop_with(drafting(executor), max_sequences=4), executor)
    assert sum(seq.accepted for seq in seqs) > 0


def test_a_sequence_longer_than_the_draft_model_s_context_gets_no_drafts() -> None:
    executor = draft_model(context=20, capacity=20, max_tokens=16)
    loop = loop_with(drafting(executor))
    seq = loop.ask(list(range(30)), max_tokens=20)
    assert seq.drafted == 0
    assert seq.completion_len == 20


@pytest.mark.parametrize(("block_len", "capacity"), [(4, 1024), (16, 1024), (16, 272)])
def test_a_draft_model_with_block_tables_drafts_and_frees_its_blocks(block_len: int, capacity: int) -> None:
    small = info(block_len=block_len, capacity=capacity)
    executor = Confident(small, PagedMemory(small, block_len))
    executor.wrong = 0.2
    drafter = drafting(executor)
    seqs = run(loop_with(drafter), executor, requests=12)
    assert sum(seq.accepted for seq in seqs) > 60
    assert sorted(drafter._free_blocks) == list(range(capacity // block_len))


def test_sequences_that_together_exceed_the_draft_model_s_cache_do_not_disable_it() -> None:
    executor = draft_model(context=100, capacity=100, max_sequences=4)
    drafter = drafting(executor)
    loop = loop_with(drafter, max_sequences=4)
    seqs = run(loop, executor, requests=12)
    assert sum(seq.accepted for seq in seqs) > 0
    before = executor.num_steps
    assert loop.ask([1, 2, 3], max_tokens=30).accepted > 10, "the draft model was not disabled"
    assert executor.num_steps > before


def test_tokens_outside_the_draft_model_s_vocabulary_are_not_run() -> None:
    executor = draft_model(num_vocab=10)
    run(loop_with(drafting(executor)), executor)  # the fake asserts that ids are in range


@pytest.mark.parametrize("where", ["ops", "chunks", "sample"])
def test_a_failing_draft_model_fails_no_answer(where: str) -> None:
    executor = draft_model()
    executor.faults = {5: Fault(where)}  # type: ignore[arg-type]
    seqs = run(loop_with(drafting(executor)), executor)
    assert all(seq.completion_len == 30 for seq in seqs)


def test_a_draft_model_as_slow_as_the_target_is_rarely_run() -> None:
    executor = draft_model()
    drafter = drafting(executor, step_s=1e-9)  # a step of the target takes no time
    run(loop_with(drafter), executor, requests=1)
    before = executor.num_steps
    run(loop_with(drafter), executor, requests=1)
    assert executor.num_steps - before < 15


@pytest.mark.parametrize(("row_cost", "step_cost"), [(0.03, 0.25), (0.35, 0.25), (0.6, 0.15)])
def test_confidence_that_an_odd_request_spoilt_comes_back(row_cost: float, step_cost: float) -> None:
    """Only verified drafts teach: where none is expected to pay, one is verified now and then."""
    confidence = Confidence()

    def answer(num_tokens: int, right: bool) -> int:
        """Return the draft tokens of an answer in which each draft is right, or none is."""
        draft, length, drafted = Draft(0), 0, 0
        while length < num_tokens:
            tokens: list[int] = []
            if confidence.may_pay(draft, length, row_cost, step_cost):
                is_due, draft.last_try = confidence.is_due(draft, length), length
                tokens = confidence.propose(draft, lambda: (7, 0.95), [row_cost] * 8, step_cost, is_due)
            if tokens:
                confidence.observe(draft, len(tokens), len(tokens) if right else 0)
                drafted += len(tokens)
            length += 1 + len(tokens) * right
        return drafted

    assert answer(400, right=True) > 300
    answer(400, right=False)
    assert answer(400, right=False) < 5, "retries of drafts that are always wrong get rare"
    assert sum(answer(400, right=True) for _ in range(10)) > 2_000
    assert answer(400, right=True) > 300


def test_a_missed_draft_costs_nothing_where_none_would_be_made() -> None:
    executor = draft_model()
    executor.faults = {1: Fault("chunks")}
    drafter, seq = drafting(executor), Sequence(0, [5, 6], 2, SamplingParams())
    assert drafter.missed_draft_cost(seq, [0.05]) == 0, "it is not followed"
    drafter.begin(seq)
    assert drafter.missed_draft_cost(seq, [0.05]) == math.inf
    assert drafter.missed_draft_cost(seq, [1.0]) == 0, "it would not pay"
    drafter.propose(seq, [0.05])
    assert drafter.missed_draft_cost(seq, [0.05]) == 0, "the draft model failed"


def test_a_long_prompt_is_computed_in_parts() -> None:
    executor = draft_model(context=5000, capacity=5000, max_tokens=64)
    drafter = drafting(executor)
    seq = Sequence(0, [index % 40 for index in range(3000)], 3000, SamplingParams())
    drafter.begin(seq)
    drafter._prefill_s = 0.25 / 500
    assert drafter.propose(seq, [0.1] * 4) == []
    assert 0 < executor.num_computed <= 500
    drafter._prefill_s = 0.25 / 5000
    assert drafter.propose(seq, [0.1] * 4)
    assert executor.num_computed >= 2999


class Fixed(SimpleDrafter):
    def __init__(self, draft: list[int]) -> None:
        self.draft = draft
        self.seen: list[tuple[int, int]] = []
        self.calls: list[str] = []

    def begin(self, seq: Sequence) -> None:
        self.calls.append("begin")

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        return self.draft

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        self.seen.append((drafted, accepted))

    def end(self, seq: Sequence) -> None:
        self.calls.append("end")

    def close(self) -> None:
        self.calls.append("close")


def test_a_chain_asks_in_order_and_the_author_observes() -> None:
    none, first, second = Fixed([]), Fixed([1]), Fixed([2, 3])
    chain = ChainDrafter([none, first, second])
    seq = Sequence(0, [1], 1, SamplingParams())
    chain.begin(seq)
    assert chain.propose(seq, [0.1]) == [1]
    chain.observe(seq, 1, 0)
    assert (none.seen, first.seen, second.seen) == ([], [(1, 0)], [])
    chain.end(seq)
    chain.close()
    assert all(each.calls == ["begin", "end", "close"] for each in (none, first, second))
