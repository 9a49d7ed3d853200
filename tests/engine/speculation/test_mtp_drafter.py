"""MtpDrafter: drafts of heads that pay, none where they do not, and no answer that fails because of them."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from edgelm.base.errors import EngineError, OutOfMemoryError
from edgelm.base.sampling import DraftChoice, SamplingParams
from edgelm.engine.core import NOT_A_TOKEN, Sequence
from edgelm.engine.speculation.confidence import RETRY_EVERY
from edgelm.engine.speculation.mtp_drafter import LONGEST_REST, MtpDrafter
from tests.bench.adversarial import Answer, Recorded
from tests.bench.bench_ablation import Costs, linear
from tests.bench.bench_mtp import SimulatedHeads, speed

CHEAP = [0.05] * 8
DEAR = [1.0] * 8


class Sure:
    """Heads that say 1, 2, 3, … until `end`; they fail in the call with the number `fails_at`."""

    error: EngineError = EngineError("no")

    def __init__(self, last: int = 100, fails_at: int = -1) -> None:
        self.followed: set[int] = set()
        self.last, self.fails_at, self.num_calls = last, fails_at, 0

    def begin(self, seq_id: int) -> None:
        self.followed.add(seq_id)

    def end(self, seq_id: int) -> None:
        self.followed.discard(seq_id)

    def first(self, seq_id: int, tokens: list[int]) -> tuple[int, float]:
        return self.next(seq_id, 0)

    def next(self, seq_id: int, token: int) -> tuple[int, float]:
        self.num_calls += 1
        if self.num_calls == self.fails_at:
            raise self.error
        return (token + 1, 0.99) if token < self.last else (NOT_A_TOKEN, 0.0)


def begun(drafter: MtpDrafter, draft: DraftChoice = "auto") -> Sequence:
    seq = Sequence(0, [5, 6], 2, SamplingParams(draft=draft))
    drafter.begin(seq)
    return seq


def test_sure_heads_draft_as_many_tokens_as_there_is_room_for() -> None:
    drafter = MtpDrafter(Sure(), lambda: 1.0)
    assert drafter.propose(begun(drafter), CHEAP[:3]) == [1, 2, 3]


def test_a_draft_ends_where_the_heads_do() -> None:
    drafter = MtpDrafter(Sure(last=2), lambda: 1.0)
    assert drafter.propose(begun(drafter), CHEAP) == [1, 2]


@pytest.mark.parametrize("draft", ["ngram", "off"])
def test_a_request_that_chooses_others_is_not_followed(draft: DraftChoice) -> None:
    heads = Sure()
    drafter = MtpDrafter(heads, lambda: 1.0)
    assert drafter.propose(begun(drafter, draft), CHEAP) == []
    assert not heads.followed


def test_nothing_is_drafted_behind_forced_tokens() -> None:
    drafter = MtpDrafter(Sure(), lambda: 1.0)
    seq = begun(drafter)
    assert drafter.propose(seq, CHEAP, [9]) == []
    assert drafter.propose(seq, CHEAP)


def test_heads_that_are_never_right_are_asked_now_and_then_only() -> None:
    heads = Sure()
    drafter = MtpDrafter(heads, lambda: 1.0)
    seq = begun(drafter)
    calls = []
    for _ in range(600):
        draft = drafter.propose(seq, CHEAP)
        if draft:
            drafter.observe(seq, len(draft), 0)
        seq.tokens.append(7)
        calls.append(heads.num_calls)
    assert calls[-1] - calls[300] < 50


def test_heads_that_fail_are_not_used_any_more_and_no_answer_fails() -> None:
    heads = Sure(fails_at=2)
    drafter = MtpDrafter(heads, lambda: 1.0)
    seq = begun(drafter)
    assert drafter.propose(seq, CHEAP) == []
    assert drafter.propose(seq, CHEAP) == []
    assert heads.num_calls == 2
    assert not heads.followed
    drafter.end(seq)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_heads_without_memory_draft_again_in_the_next_step(fails_at: int) -> None:
    heads = Sure(fails_at=fails_at)
    heads.error = OutOfMemoryError("the memory of the GPU is used up")
    drafter = MtpDrafter(heads, lambda: 1.0)
    seq = begun(drafter)
    assert drafter.propose(seq, CHEAP[:3]) == []
    drafter.observe(seq, 0, 0)
    assert drafter.propose(seq, CHEAP[:3]) == [1, 2, 3]
    drafter.end(seq)
    assert not heads.followed


def test_heads_that_lack_memory_again_and_again_rest_meanwhile_steps_run_ahead() -> None:
    heads = Sure()
    drafter = MtpDrafter(heads, lambda: 1.0)
    seq = begun(drafter)
    heads.error = OutOfMemoryError("the memory of the GPU is used up")
    held_back = 0
    for _ in range(10 * LONGEST_REST):
        heads.fails_at = heads.num_calls + 1
        if drafter.missed_draft_cost(seq, CHEAP):
            held_back += 1
            assert drafter.propose(seq, CHEAP[:3]) == []
        seq.tokens.append(7)
    assert held_back < 20
    heads.fails_at = -1
    waited = 0
    while not drafter.missed_draft_cost(seq, CHEAP):
        waited += 1
    assert waited < LONGEST_REST
    assert drafter.propose(seq, CHEAP[:3]) == [1, 2, 3]
    heads.fails_at = heads.num_calls + 1
    assert drafter.propose(seq, CHEAP[:3]) == []
    assert drafter.missed_draft_cost(seq, CHEAP) == math.inf, "they drafted since"


def test_the_end_of_a_sequence_forgets_it() -> None:
    heads = Sure()
    drafter = MtpDrafter(heads, lambda: 1.0)
    drafter.end(begun(drafter))
    assert not heads.followed


def test_a_missed_draft_costs_nothing_where_none_would_be_made() -> None:
    drafter = MtpDrafter(Sure(fails_at=1), lambda: 1.0)
    seq = begun(drafter)
    assert drafter.missed_draft_cost(seq, CHEAP) == math.inf
    assert drafter.missed_draft_cost(seq, DEAR) == 0, "it would not pay"
    assert drafter.missed_draft_cost(Sequence(1, [5], 1, SamplingParams()), CHEAP) == 0, "it is not followed"
    drafter.propose(seq, CHEAP)
    assert drafter.missed_draft_cost(seq, CHEAP) == 0, "the heads failed"


def test_a_draft_is_due_again_also_where_steps_are_launched_ahead() -> None:
    """Such a step is not proposed for. Asking for its cost changes nothing."""
    drafter = MtpDrafter(Sure(), lambda: 1.0)
    seq = begun(drafter)
    lengths = []
    for _ in range(3 * RETRY_EVERY + 9):
        costs = {drafter.missed_draft_cost(seq, DEAR) for _ in range(RETRY_EVERY + 2)}
        assert len(costs) == 1
        seq.tokens.append(7)
        if costs == {math.inf}:
            lengths.append(len(seq.tokens))
            drafter.propose(seq, DEAR)
    assert [length - lengths[0] for length in lengths] == [0, RETRY_EVERY + 1, 2 * RETRY_EVERY + 2]


def answers() -> list[Answer]:
    rng = random.Random(3)
    return [Recorded(*(rng.choices(range(9_000), k=length) for length in (50, 300))) for _ in range(8)]


@pytest.mark.parametrize("row_cost", [0.03, 0.35])
@pytest.mark.parametrize("head_cost", [0.01, 0.02, 0.05, 0.15, 0.4])
@pytest.mark.parametrize("agreement", [0.0, 0.3, 0.6, 0.9])
def test_heads_never_cost_more_than_a_hundredth(
    agreement: float, head_cost: float, row_cost: float, tmp_path: Path
) -> None:
    """Simulated: the time of a step and of the heads is given, so the figures are the same on every machine.

    In the first process with a model, from its first answer on. In later ones, heads that gained draft at once: where
    that was by chance, an answer may lose what three pauses allow.
    """
    costs, proof = Costs("", linear(row_cost), linear(row_cost)), tmp_path / "proof"
    gained = speed(answers(), ["mtp"], costs, SimulatedHeads(agreement, head_cost), 3, proof)
    first = speed(answers()[:1], ["mtp"], costs, SimulatedHeads(agreement, head_cost), 3, tmp_path / "first")
    later = speed(answers()[:1], ["mtp"], costs, SimulatedHeads(agreement, head_cost), 3, proof)
    assert min(first, gained) >= 0.99
    assert later >= (0.98 if proof.exists() else 0.99)
    if agreement == 0.9 and head_cost < 0.4 and row_cost < 0.1:
        assert gained > 1.5
        assert later > 1.5
    if agreement == 0.9 and head_cost < 0.1:
        assert gained > 1.4


@pytest.mark.parametrize("together", [4, 16])
@pytest.mark.parametrize("row_cost", [0.03, 0.35])
@pytest.mark.parametrize("head_cost", [0.01, 0.02, 0.05, 0.15])
@pytest.mark.parametrize("agreement", [0.0, 0.6, 0.9])
def test_heads_never_cost_more_than_a_hundredth_where_several_answers_are_decoded_together(
    agreement: float, head_cost: float, row_cost: float, together: int, tmp_path: Path
) -> None:
    """A step is a token of each, and the heads delay all: they earn and lose together, not each for itself."""
    costs, texts = Costs("", linear(row_cost), linear(row_cost)), answers() * 2
    first = speed(texts, ["mtp"], costs, SimulatedHeads(agreement, head_cost), 3, tmp_path / "proof", together)
    assert first >= 0.99 * together / costs.true(together)


@pytest.mark.parametrize("together", [4, 16])
@pytest.mark.parametrize("head_cost", [0.01, 0.05, 0.4])
def test_heads_that_gained_once_lose_as_little_in_many_answers_as_in_one(
    head_cost: float, together: int, tmp_path: Path
) -> None:
    costs, proof = Costs("", linear(0.03), linear(0.03)), tmp_path / "proof"
    proof.touch()
    later = speed(answers() * 2, ["mtp"], costs, SimulatedHeads(0.0, head_cost), 3, proof, together)
    assert later >= 0.98 * together / costs.true(together)
