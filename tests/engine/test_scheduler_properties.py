"""Whatever happens around a request, its answer is that of the request alone."""

from __future__ import annotations

import random

import pytest

from edgelm.engine.core import ExecutorInfo
from tests.counts import Count
from tests.engine.loop import Loop
from tests.engine.simulation import BOOKKEEPERS, SIMULATED, fresh_seed, run_workload

WORKLOADS = Count(test=150, soak=20_000)  # for each bookkeeper
CONVERSATIONS = Count(test=40, soak=1_000)
SHARD = 50  # workloads of one test

both = pytest.mark.parametrize("kind", BOOKKEEPERS)
all_kinds = pytest.mark.parametrize("kind", SIMULATED)


@all_kinds
@pytest.mark.parametrize("shard", range(WORKLOADS // SHARD))
def test_every_answer_is_the_one_given_alone(kind: str, shard: int) -> None:
    first = fresh_seed()
    for seed in range(first, first + SHARD):
        run_workload(seed, kind)


@all_kinds
def test_the_workloads_are_as_hard_as_they_should_be(kind: str) -> None:
    runs = [run_workload(seed, kind) for seed in range(100)]
    reasons = [event.finish_reason for run in runs for event in run.finished.values()]
    assert min(reasons.count(reason) for reason in ("stop", "length", "context", "abort", "error")) >= 20
    assert sum(run.num_preempted for run in runs) >= 20
    assert sum(run.num_overtaken for run in runs) >= 5
    assert sum(run.num_cached for run in runs) >= (1_000 if kind == "states" else 2_000)
    assert sum(run.drafter.accepted for run in runs if run.drafter) >= 1_000
    assert sum(run.drafter.drafted - run.drafter.accepted for run in runs if run.drafter) >= 500
    assert sum(seq.forced for run in runs for seq in run.sequences.values()) >= 100
    wrong = [request for run in runs for request in run.workload.requests if request.reason == "error"]
    assert len(wrong) >= 5, "grammars that cannot be followed to the end"
    if kind != "slots":
        assert sum(run.num_ahead for run in runs) >= 2_000
        assert sum(run.num_ahead_with_matcher for run in runs) >= 50
        assert sum(run.num_dropped for run in runs) >= 20


def _lost(kind: str, facts: ExecutorInfo, block_len: int, known: int) -> int:
    """Return how many of `known` cached tokens are computed again: a paged cache keeps only full blocks."""
    return known % block_len if kind == "paged" else 0


@both
def test_a_conversation_computes_only_what_is_new(kind: str) -> None:
    seed = fresh_seed()
    rng = random.Random(seed)
    for number in range(CONVERSATIONS):
        block_len = rng.choice([4, 16])
        loop = Loop(kind, block_len=block_len)
        tokens: list[int] = []
        while True:
            new = rng.choices(range(loop.info.num_vocab), k=rng.randint(1, 40))
            num_answers = rng.randint(1, 30)
            if len(tokens) + len(new) + num_answers > loop.info.context:
                break
            known, before = max(len(tokens) - 1, 0), loop.executor.num_computed
            seq = loop.ask(tokens + new, max_tokens=num_answers)
            kept = known - _lost(kind, loop.info, block_len, known)
            assert seq.cached == kept, f"conversation {number} of seed {seed}"
            assert loop.executor.num_computed - before == len(tokens) + len(new) - kept + num_answers - 1
            tokens = list(seq.tokens)


@both
def test_conversations_that_alternate_are_not_computed_again(kind: str) -> None:
    rng = random.Random(seed := fresh_seed())
    for _ in range(CONVERSATIONS // 4):
        loop = Loop(kind, capacity=2048)
        turns: list[list[int]] = [rng.choices(range(40), k=rng.randint(33, 60)) for _ in range(4)]
        for tokens in turns:
            tokens[:] = loop.ask(tokens).tokens
        for _ in range(8):
            tokens = rng.choice(turns)
            known = len(tokens) - 1
            seq = loop.ask(tokens + rng.choices(range(40), k=rng.randint(1, 10)))
            assert seq.cached == known - _lost(kind, loop.info, 16, known), f"seed {seed}"
            tokens[:] = seq.tokens


@both
def test_a_retry_computes_one_token_of_its_prompt(kind: str) -> None:
    rng = random.Random(fresh_seed())
    prompt = rng.choices(range(40), k=97)
    loop = Loop(kind)
    first = loop.ask(prompt)
    before = loop.executor.num_computed
    again = loop.ask(prompt)
    assert again.tokens == first.tokens
    assert again.cached == 96
    assert loop.executor.num_computed - before == 1 + 7


@both
def test_a_prefix_is_shared_with_a_sequence_that_still_runs(kind: str) -> None:
    rng = random.Random(fresh_seed())
    system = rng.choices(range(40), k=48)
    loop = Loop(kind)
    loop.add([*system, 1, 2, 3], max_tokens=40)
    loop.step()
    second = loop.add([*system, 3, 2, 1])
    loop.finish()
    assert second.cached == 48


@both
def test_the_prefix_of_a_preempted_sequence_is_reused(kind: str) -> None:
    """Two sequences grow until one is preempted; it resumes from a snapshot, or from blocks not yet taken."""
    loop = Loop(kind, capacity=256, context=200, snapshot_bytes=10_000, block_len=8)
    old = loop.add([1] * 30, max_tokens=150)
    young = loop.add([2] * 30, max_tokens=150)
    loop.finish()
    needed = len(old.tokens) + len(young.tokens) - 2
    assert loop.executor.num_computed > needed if kind == "paged" else loop.executor.num_computed == needed
    assert loop.executor.num_computed < needed + 120
