"""What a step without a draft is expected to lose, before the token before it is known."""

from __future__ import annotations

import random

import pytest

from edgelm.core import Chunk, SamplingParams, Sequence, Step
from edgelm.engine.clock import GAP_EVERY, StepClock
from edgelm.engine.costs import Measured, StepCosts
from edgelm.engine.drafter import NgramDrafter
from edgelm.engine.guard import GuardedDrafter
from edgelm.engine.stakes import DRAFTED, EDGES, FIRST, MOST, NO_GUESS, Stakes

COSTS = [0.05] * 16


def say(drafter: NgramDrafter, seq: Sequence, tokens: list[int]) -> list[float]:
    """Let tokens come one by one; return the stake before each."""
    stakes = []
    for token in tokens:
        stakes.append(drafter.stake(seq, COSTS))
        seq.tokens.append(token)
        drafter.propose(seq, COSTS)
    return stakes


def begin(drafter: NgramDrafter, prompt: list[int], number: int = 0) -> Sequence:
    seq = Sequence(number, prompt, len(prompt), SamplingParams())
    drafter.begin(seq)
    drafter.work(1.0)
    return seq


def test_text_that_never_repeats_stakes_nothing() -> None:
    drafter = NgramDrafter()
    stakes = say(drafter, begin(drafter, [0]), list(range(1, 600)))
    assert stakes[0] == FIRST
    assert stakes[-1] < 0.01


def test_text_that_repeats_stakes_a_step() -> None:
    drafter = NgramDrafter()
    rng = random.Random(3)
    passage = [rng.randrange(1000) for _ in range(40)]
    stakes = say(drafter, begin(drafter, passage * 2), passage * 12)
    assert stakes[-1] > 0.8
    assert max(stakes) <= MOST


def test_asking_for_a_stake_changes_no_draft() -> None:
    """The step under way has no draft, whatever would have been drafted."""
    rng = random.Random(5)
    passage = [rng.randrange(50) for _ in range(60)]
    text = [token if rng.random() < 0.9 else rng.randrange(50) for token in passage * 8]
    asked, silent = NgramDrafter(), NgramDrafter()
    one, other = begin(asked, [1, 2]), begin(silent, [1, 2])
    for token in text:
        asked.stake(one, COSTS)
        one.tokens.append(token)
        other.tokens.append(token)
        assert asked.propose(one, COSTS) == silent.propose(other, COSTS)
        asked._running[0].step = silent._running[0].step = 1.0  # none of the drafts is run


def test_a_stake_is_settled_by_the_next_token_alone() -> None:
    drafter = NgramDrafter()
    seq = begin(drafter, [1])
    say(drafter, seq, list(range(2, 40)))
    before = [drafter._stakes.of(kind) for kind in range(DRAFTED + 1)]
    for token in range(40, 60):  # nobody asks
        seq.tokens.append(token)
        drafter.propose(seq, COSTS)
    assert [drafter._stakes.of(kind) for kind in range(DRAFTED + 1)] == before


@pytest.mark.parametrize(("chance", "kind"), [(None, NO_GUESS), (0.0, 1), (EDGES[0], 2), (0.99, DRAFTED - 1)])
def test_kinds_are_told_apart_by_the_first_guess(chance: float | None, kind: int) -> None:
    assert Stakes().kind(chance, drafted=False) == kind
    assert Stakes().kind(chance, drafted=True) == DRAFTED


def test_a_stake_is_the_mean_of_what_was_seen_and_forgets() -> None:
    stakes = Stakes()
    for gain in (0.0, 0.2, 0.4):
        stakes.learn(3, gain)
    assert stakes.of(3) == pytest.approx((FIRST + 0.0 + 0.2 + 0.4) / 4)
    assert stakes.of(2) == FIRST
    for _ in range(1000):
        stakes.learn(3, 0.0)
    for _ in range(250):
        stakes.learn(3, 30.0)
    assert 0.99 < stakes.of(3) <= MOST


def test_a_drafter_that_is_stopped_stakes_nothing() -> None:
    clock = StepClock(StepCosts([Measured(1, 0, 1.0), Measured(16, 0, 1.2)]))
    guard = GuardedDrafter(NgramDrafter(), clock)
    seq = Sequence(0, [1, 2, 3] * 20, 3, SamplingParams())
    guard.begin(seq)
    assert guard.stake(seq, COSTS) > 0
    clock.plain_due = True  # which is the step under way
    assert guard.stake(seq, COSTS) > 0
    guard._accounts[seq].resume_at = len(seq.tokens) + 1
    assert guard.stake(seq, COSTS) > 0
    guard._accounts[seq].resume_at = len(seq.tokens) + 2
    assert guard.stake(seq, COSTS) == 0


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


def test_a_gap_that_is_not_seen_any_more_is_none() -> None:
    """Otherwise one long gap would keep every step ahead, and none would be measured again."""
    clock = StepClock(StepCosts([Measured(1, 0, 0.010), Measured(16, 0, 0.020)]))
    step = Step((Chunk(Sequence(0, [1], 1, SamplingParams()), 0, [1], 1, 0),))
    clock.observe_gap(0.2)
    for _ in range(GAP_EVERY):
        clock.observe(step, 0.010)
        assert clock.gap(1, 0) > 1
    clock.observe(step, 0.010)
    assert clock.gap(1, 0) == 0


def test_what_is_expected_of_a_message_ends_with_it() -> None:
    drafter = NgramDrafter()
    seq = begin(drafter, [1, 2])
    drafter.stake(seq, COSTS)
    drafter.end(seq)
    again = begin(drafter, [1, 2, 5], 1)
    before = [drafter._stakes.of(kind) for kind in range(DRAFTED + 1)]
    again.tokens.append(6)
    drafter.propose(again, COSTS)
    assert [drafter._stakes.of(kind) for kind in range(DRAFTED + 1)] == before
