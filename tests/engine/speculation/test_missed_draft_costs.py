"""The expected cost of a step without a draft, estimated before its first token is known."""

from __future__ import annotations

import random

import pytest

from edgelm.engine.clock import GAP_EVERY, Measured, StepClock, StepCosts
from edgelm.engine.core import Chunk, SamplingParams, Sequence, Step
from edgelm.engine.speculation.ngram_drafter import (
    DRAFTED,
    EDGES,
    FIRST_COST,
    MAX_COST,
    NO_GUESS,
    MissedDraftCosts,
    NgramDrafter,
)
from edgelm.engine.speculation.throttle import ThrottledDrafter

COSTS = [0.05] * 16


def decode(drafter: NgramDrafter, seq: Sequence, tokens: list[int]) -> list[float]:
    """Append tokens one by one; return the missed draft cost before each."""
    costs = []
    for token in tokens:
        costs.append(drafter.missed_draft_cost(seq, COSTS))
        seq.tokens.append(token)
        drafter.propose(seq, COSTS)
    return costs


def begin(drafter: NgramDrafter, prompt: list[int], number: int = 0) -> Sequence:
    seq = Sequence(number, prompt, len(prompt), SamplingParams())
    drafter.begin(seq)
    drafter.work(1.0)
    return seq


def test_a_missed_draft_costs_nothing_in_a_text_that_never_repeats() -> None:
    drafter = NgramDrafter()
    costs = decode(drafter, begin(drafter, [0]), list(range(1, 600)))
    assert costs[0] == FIRST_COST
    assert costs[-1] < 0.01


def test_a_missed_draft_costs_a_step_in_a_text_that_repeats() -> None:
    drafter = NgramDrafter()
    rng = random.Random(3)
    passage = [rng.randrange(1000) for _ in range(40)]
    costs = decode(drafter, begin(drafter, passage * 2), passage * 12)
    assert costs[-1] > 0.8
    assert max(costs) <= MAX_COST


def test_asking_for_the_cost_changes_no_draft() -> None:
    """The step under way has no draft, whatever the drafter would have proposed."""
    rng = random.Random(5)
    passage = [rng.randrange(50) for _ in range(60)]
    text = [token if rng.random() < 0.9 else rng.randrange(50) for token in passage * 8]
    asked, silent = NgramDrafter(), NgramDrafter()
    one, other = begin(asked, [1, 2]), begin(silent, [1, 2])
    for token in text:
        asked.missed_draft_cost(one, COSTS)
        one.tokens.append(token)
        other.tokens.append(token)
        assert asked.propose(one, COSTS) == silent.propose(other, COSTS)
        asked._running[0].step_cost = silent._running[0].step_cost = 1.0  # no draft is run


def test_the_cost_is_learnt_only_from_the_token_after_the_question() -> None:
    drafter = NgramDrafter()
    seq = begin(drafter, [1])
    decode(drafter, seq, list(range(2, 40)))
    before = [drafter._missed_draft_costs.of(kind) for kind in range(DRAFTED + 1)]
    for token in range(40, 60):  # without asking for the cost
        seq.tokens.append(token)
        drafter.propose(seq, COSTS)
    assert [drafter._missed_draft_costs.of(kind) for kind in range(DRAFTED + 1)] == before


@pytest.mark.parametrize(("chance", "kind"), [(None, NO_GUESS), (0.0, 1), (EDGES[0], 2), (0.99, DRAFTED - 1)])
def test_the_kind_depends_on_the_first_guess(chance: float | None, kind: int) -> None:
    assert MissedDraftCosts().kind(chance, drafted=False) == kind
    assert MissedDraftCosts().kind(chance, drafted=True) == DRAFTED


def test_the_cost_is_a_mean_that_forgets() -> None:
    costs = MissedDraftCosts()
    for gain in (0.0, 0.2, 0.4):
        costs.learn(3, gain)
    assert costs.of(3) == pytest.approx((FIRST_COST + 0.0 + 0.2 + 0.4) / 4)
    assert costs.of(2) == FIRST_COST
    for _ in range(1000):
        costs.learn(3, 0.0)
    for _ in range(250):
        costs.learn(3, 30.0)
    assert 0.99 < costs.of(3) <= MAX_COST


def test_a_paused_drafter_has_no_missed_drafts() -> None:
    clock = StepClock(StepCosts([Measured(1, 0, 1.0), Measured(16, 0, 1.2)]))
    throttle = ThrottledDrafter(NgramDrafter(), clock)
    seq = Sequence(0, [1, 2, 3] * 20, 3, SamplingParams())
    throttle.begin(seq)
    assert throttle.missed_draft_cost(seq, COSTS) > 0
    clock.plain_due = True  # the step under way is the plain one
    assert throttle.missed_draft_cost(seq, COSTS) > 0
    throttle._accounts[seq].resume_at = len(seq.tokens) + 1
    assert throttle.missed_draft_cost(seq, COSTS) > 0
    throttle._accounts[seq].resume_at = len(seq.tokens) + 2
    assert throttle.missed_draft_cost(seq, COSTS) == 0


def test_the_gap_is_in_steps_and_follows_the_machine() -> None:
    clock = StepClock()
    assert clock.gap(1, 0) == 0
    clock = StepClock(StepCosts([Measured(1, 0, 0.010), Measured(16, 0, 0.020)]))
    for _ in range(100):
        clock.observe_gap(0.002)
    assert clock.gap(1, 0) == pytest.approx(0.2, rel=0.01)
    assert clock.gap(16, 0) == pytest.approx(0.1, rel=0.01)
    clock.observe_gap(60.0)  # a machine that slept
    assert clock.gap(1, 0) == pytest.approx(0.2, rel=0.01)


def test_a_gap_that_is_not_seen_any_more_expires() -> None:
    """Otherwise one long gap would keep every step ahead, and none would be measured again."""
    clock = StepClock(StepCosts([Measured(1, 0, 0.010), Measured(16, 0, 0.020)]))
    step = Step((Chunk(Sequence(0, [1], 1, SamplingParams()), 0, [1], 1, 0),))
    clock.observe_gap(0.2)
    for _ in range(GAP_EVERY):
        clock.observe(step, 0.010)
        assert clock.gap(1, 0) > 1
    clock.observe(step, 0.010)
    assert clock.gap(1, 0) == 0


def test_nothing_is_learnt_across_messages() -> None:
    drafter = NgramDrafter()
    seq = begin(drafter, [1, 2])
    drafter.missed_draft_cost(seq, COSTS)
    drafter.end(seq)
    again = begin(drafter, [1, 2, 5], 1)
    before = [drafter._missed_draft_costs.of(kind) for kind in range(DRAFTED + 1)]
    again.tokens.append(6)
    drafter.propose(again, COSTS)
    assert [drafter._missed_draft_costs.of(kind) for kind in range(DRAFTED + 1)] == before
