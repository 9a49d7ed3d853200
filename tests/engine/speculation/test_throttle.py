"""ThrottledDrafter: drafts that lose time are paused, and tried again with the next request."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgelm.engine.clock import PLAIN_EVERY, Measured, StepClock, StepCosts
from edgelm.engine.core import Chunk, SamplingParams, Sequence, Step
from edgelm.engine.speculation import throttle
from edgelm.engine.speculation.throttle import PAUSE, ThrottledDrafter
from tests.engine.fake import SimpleDrafter

PLAIN_S = 0.010


@pytest.fixture(autouse=True)
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drafting take no time, however busy this machine is."""
    monkeypatch.setattr(throttle, "time", SimpleNamespace(perf_counter=lambda: 0.0))


class Always(SimpleDrafter):
    def __init__(self) -> None:
        self.asked: list[int] = []
        self.ended = 0

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        self.asked.append(len(marginal_cost))
        return [7] * min(len(marginal_cost), 4)

    def end(self, seq: Sequence) -> None:
        self.ended += 1


class Run:
    """One or more sequences that decode; the test sets the time and the outcome of each step."""

    def __init__(self, sequences: int = 1, max_draft: int | None = None, proof: Path | None = None) -> None:
        self.clock = StepClock(StepCosts([Measured(sequences, 0, PLAIN_S), Measured(64, 0, 40 * PLAIN_S)]))
        self.inner = Always()
        self.drafter = ThrottledDrafter(self.inner, self.clock, max_draft, "mtp", proof)
        self.seqs = [Sequence(i, [1], 1, SamplingParams()) for i in range(sequences)]
        for seq in self.seqs:
            self.drafter.begin(seq)
        for _ in range(PLAIN_EVERY):
            self.clock.observe(Step(tuple(Chunk(seq, 0, [1], 1, i) for i, seq in enumerate(self.seqs))), PLAIN_S)

    def step(self, drafted_s: float, accepted: int) -> list[int]:
        """Run one step of all sequences; return the lengths of their drafts."""
        drafts = [self.drafter.propose(seq, [0.1] * 8) for seq in self.seqs]
        chunks = [
            Chunk(seq, 0, [1, *draft], 1 + len(draft), i)
            for i, (seq, draft) in enumerate(zip(self.seqs, drafts, strict=True))
        ]
        self.clock.observe(Step(tuple(chunks)), drafted_s if any(drafts) else PLAIN_S)
        for seq, draft in zip(self.seqs, drafts, strict=True):
            taken = min(accepted, len(draft))
            seq.tokens += [7] * (1 + taken)
            if draft:
                self.drafter.observe(seq, len(draft), taken)
        return [len(draft) for draft in drafts]


def test_drafts_that_lose_time_stop_after_a_few_steps() -> None:
    run = Run()
    drafted = [run.step(drafted_s=2 * PLAIN_S, accepted=0)[0] for _ in range(20)]
    assert 1 <= sum(map(bool, drafted)) <= 5
    assert not any(drafted[5:])


def test_drafts_that_win_go_on() -> None:
    run = Run()
    drafted = [run.step(drafted_s=2 * PLAIN_S, accepted=3)[0] for _ in range(60)]
    assert all(drafted)


def test_a_draft_that_gains_less_than_it_costs_stops_even_if_most_of_it_is_accepted() -> None:
    run = Run()
    drafted = [run.step(drafted_s=5 * PLAIN_S, accepted=3)[0] for _ in range(20)]
    assert not any(drafted[6:])


def test_old_gains_do_not_pay_for_losses() -> None:
    run = Run()
    for _ in range(50):
        run.step(drafted_s=1.2 * PLAIN_S, accepted=4)
    lost = [run.step(drafted_s=2 * PLAIN_S, accepted=0)[0] for _ in range(20)]
    assert sum(map(bool, lost)) <= 8


def test_drafting_is_retried_at_growing_intervals() -> None:
    run = Run()
    drafted = [run.step(drafted_s=2 * PLAIN_S, accepted=0)[0] for _ in range(8 * PAUSE)]
    starts = [i for i in range(1, len(drafted)) if drafted[i] and not drafted[i - 1]]
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    assert starts
    assert gaps == sorted(gaps)
    assert gaps[-1] > gaps[0] > PAUSE


def test_a_new_request_drafts_again() -> None:
    run = Run()
    for _ in range(20):
        run.step(drafted_s=2 * PLAIN_S, accepted=0)
    run.drafter.end(run.seqs[0])
    run.seqs = [Sequence(9, [1], 1, SamplingParams())]
    run.drafter.begin(run.seqs[0])
    assert run.step(drafted_s=PLAIN_S, accepted=4) == [4]


def test_a_long_copy_is_compared_with_a_plain_step_now_and_then() -> None:
    run = Run()
    drafted = [run.step(drafted_s=1.1 * PLAIN_S, accepted=4)[0] for _ in range(3 * PLAIN_EVERY)]
    assert 2 <= drafted.count(0) <= 3


def test_one_sequence_that_loses_does_not_stop_another() -> None:
    run = Run(sequences=2)
    run.drafter.observe(run.seqs[0], 0, 0)
    run.clock.observe(Step((Chunk(run.seqs[0], 0, [1] * 5, 5, 0), Chunk(run.seqs[1], 0, [1] * 5, 5, 1))), 2 * PLAIN_S)
    for _ in range(6):
        run.drafter.observe(run.seqs[0], 4, 0)
        run.drafter.observe(run.seqs[1], 4, 4)
    assert run.drafter.propose(run.seqs[0], [0.1] * 8) == []
    assert run.drafter.propose(run.seqs[1], [0.1] * 8) == [7] * 4


def test_many_sequences_together_lose_no_more_than_one() -> None:
    run = Run(sequences=8)
    drafted = [any(run.step(drafted_s=1.5 * PLAIN_S, accepted=0)) for _ in range(20)]
    assert sum(drafted) * 0.5 <= throttle.MAX_LOSS + 0.5


def test_a_stall_that_all_lose_by_is_no_debt_of_the_next_request() -> None:
    run = Run(sequences=16)
    run.step(drafted_s=11 * PLAIN_S, accepted=0)
    assert not any(run.step(drafted_s=PLAIN_S, accepted=0)), "all rest"
    run.seqs = [Sequence(99, [1], 1, SamplingParams())]
    run.drafter.begin(run.seqs[0])
    drafted = [run.step(drafted_s=1.02 * PLAIN_S, accepted=0)[0] for _ in range(12)]
    assert sum(map(bool, drafted)) > 6, "all but plain steps to compare with"


def test_a_request_without_drafts_does_not_rest_with_those_that_lose(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    proof.touch()
    run = Run(proof=proof)
    for number in range(1, 6):
        beside = [Sequence(100 + number, [1], 1, SamplingParams(draft=draft)) for draft in ("off", "ngram")]
        for seq in beside:
            run.drafter.begin(seq)
        drafted = [run.step(drafted_s=3 * PLAIN_S, accepted=0)[0] for _ in range(10)]
        assert drafted[0]
        assert not drafted[-1]
        for seq in (*run.seqs, *beside):  # the last ones have lost nothing
            run.drafter.end(seq)
        assert proof.exists()
        run.seqs = [Sequence(number, [1], 1, SamplingParams())]
        run.drafter.begin(run.seqs[0])


def test_the_time_of_drafts_is_free_once_for_all_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes the free time of a step, and all wait for each."""
    run, now = Run(sequences=8), [0.0]
    monkeypatch.setattr(throttle.time, "perf_counter", lambda: now[0])

    def propose(seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        now[0] += throttle.FREE_TIME * PLAIN_S
        return []

    monkeypatch.setattr(run.inner, "propose", propose)
    for _ in range(100):
        run.step(drafted_s=PLAIN_S, accepted=0)
    assert now[0] <= 0.04 * 100 * PLAIN_S


def test_one_step_that_hangs_does_not_stop_a_draft_that_wins() -> None:
    run = Run()
    drafted = [run.step(drafted_s=(30 if i == 20 else 2) * PLAIN_S, accepted=3)[0] for i in range(60)]
    assert all(drafted)


def test_the_time_of_a_drafter_without_a_draft_is_a_loss_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model may take half a step to find no draft."""
    run = Run()
    now = itertools.count(0.0, PLAIN_S / 2)
    monkeypatch.setattr(throttle.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(run.inner, "propose", lambda *_: run.inner.asked.append(0) or [])
    for _ in range(30):
        run.step(drafted_s=PLAIN_S, accepted=0)
    assert 3 <= len(run.inner.asked) <= 6


def test_a_draft_that_wins_may_take_more_time_than_a_request_may_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifteen tokens of a draft model take 2.5 steps; booked before their gain, they made each request pause."""
    run, now = Run(), [0.0]
    monkeypatch.setattr(throttle.time, "perf_counter", lambda: now[0])

    def propose(seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        now[0] += 2.5 * PLAIN_S
        return [7] * 4

    monkeypatch.setattr(run.inner, "propose", propose)
    drafted = [run.step(drafted_s=1.1 * PLAIN_S, accepted=4)[0] for _ in range(60)]
    assert all(drafted)


def test_the_time_of_a_draft_that_no_step_verifies_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar may refuse each draft."""
    run, now = Run(), [0.0]
    monkeypatch.setattr(throttle.time, "perf_counter", lambda: now[0])

    def propose(seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        now[0] += 0.5 * PLAIN_S
        return [7]

    monkeypatch.setattr(run.inner, "propose", propose)
    [seq] = run.seqs
    assert sum(bool(run.drafter.propose(seq, [0.1] * 8)) for _ in range(20)) <= 5


def test_requests_of_one_step_draft_no_longer_than_all_may_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draft takes time that all wait for, before the outcome of any is known."""
    run, now = Run(sequences=16), [0.0]
    monkeypatch.setattr(throttle.time, "perf_counter", lambda: now[0])

    def propose(seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        now[0] += 0.5 * PLAIN_S
        return [7]

    monkeypatch.setattr(run.inner, "propose", propose)
    assert sum(run.step(drafted_s=1.1 * PLAIN_S, accepted=0)) <= 5
    assert sum(map(sum, (run.step(drafted_s=1.1 * PLAIN_S, accepted=0) for _ in range(20)))) == 0


def test_what_others_have_lost_refuses_no_request() -> None:
    """A request that gained ends, and two that lost live on without drafts: nobody is booked, so nobody ever pauses."""
    run = Run(sequences=3)
    accounts = [run.drafter._accounts[seq] for seq in run.seqs]
    for account, balance in zip(accounts, (2.0, -1.6, -1.6), strict=True):
        account.balance = balance
    run.drafter._balance = -1.2
    run.drafter.end(run.seqs.pop(0))
    assert run.step(drafted_s=PLAIN_S, accepted=4) == [4, 4]


def test_a_draft_of_a_request_that_is_set_aside_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    run, now = Run(sequences=2), [0.0]
    monkeypatch.setattr(throttle.time, "perf_counter", lambda: now[0])

    def propose(seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        now[0] += 2.5 * PLAIN_S
        return [7] * 4

    monkeypatch.setattr(run.inner, "propose", propose)
    assert run.drafter.propose(run.seqs[1], [0.1] * 8)
    run.seqs.pop()  # preempted: no step verifies its draft
    assert [run.step(drafted_s=1.1 * PLAIN_S, accepted=4) for _ in range(4)] == [[0], [4], [4], [4]]


def test_reading_prompts_for_drafts_that_are_never_right_is_paid_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt takes 40 steps to read, a fifth of a second at a time."""
    run, now, read = Run(), [0.0], [0.0]
    monkeypatch.setattr(throttle.time, "perf_counter", lambda: now[0])
    run.drafter = ThrottledDrafter(run.inner, run.clock, read_s=lambda: read[0])
    run.drafter.begin(run.seqs[0])
    left = [0]

    def propose(seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        if left[0]:
            left[0] -= 1
            now[0] += 2 * PLAIN_S
            read[0] += 2 * PLAIN_S
            return []
        return [7] * 4

    monkeypatch.setattr(run.inner, "propose", propose)
    taken = []
    for number in range(1, 12):
        began, left[0] = read[0], 20
        for _ in range(150):
            run.step(drafted_s=1.5 * PLAIN_S, accepted=0)
        taken.append((read[0] - began) / PLAIN_S)
        next_request(run, number)
    assert taken[0] >= throttle.READ_CREDIT
    assert sum(taken[1:]) / 10 < 0.04 * 150


RIGHT = {rows: PLAIN_S * (1 + 0.3 * (rows - 1)) for rows in (1, 2, 3, 4, 5, 6, 8, 16)}
SURFACES = {
    "right": RIGHT,
    "one row measured while the machine was busy": RIGHT | {1: 2.2 * PLAIN_S},
    "rows cost nothing": dict.fromkeys(RIGHT, PLAIN_S),
    "nothing is known": {},
}


class Gullible(Always):
    """Drafts where a chance of 0.3 per token exceeds the cost; all its tokens are wrong."""

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        worth = [0.3 ** (depth + 1) > cost for depth, cost in enumerate(marginal_cost[:4])]
        return [7] * (worth.index(False) if False in worth else len(worth))


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("inner", [Always, Gullible])
@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("load", [lambda _: 1.0, lambda step: 3.0 if step // 50 % 2 else 1.0])
def test_drafts_that_are_always_wrong_lose_little_whatever_the_surface_says(
    surface: str, inner: type[Always], sequences: int, load: Callable[[int], float]
) -> None:
    """Every draft of 3,000 tokens is rejected: the loss is a few plain steps, not a share of all steps."""
    rng = random.Random(1)
    clock = StepClock(StepCosts(Measured(rows, 0, seconds) for rows, seconds in SURFACES[surface].items()))
    drafter = ThrottledDrafter(inner(), clock)
    seqs = [Sequence(i, [1], 1, SamplingParams()) for i in range(sequences)]
    for seq in seqs:
        drafter.begin(seq)
    lost = 0.0  # plain steps
    for number in range(3_000):
        rows, chunks = sequences, []
        for seq in seqs:
            draft = drafter.propose(seq, clock.marginal_cost(rows, 0, sequences, 8))
            chunks.append(Chunk(seq, 0, [1, *draft], 1 + len(draft), seq.id))
            rows += len(draft)
        step = Step(tuple(chunks))
        clock.observe(step, PLAIN_S * (1 + 0.3 * (rows - 1)) * load(number) * rng.uniform(0.9, 1.1))
        lost += 0.3 * (rows - sequences) / (1 + 0.3 * (sequences - 1))
        for chunk in chunks:
            chunk.seq.tokens.append(7)
            if chunk.draft:
                drafter.observe(chunk.seq, len(chunk.draft), 0)
    assert lost < 0.04 * 3_000


def test_the_user_s_limit_holds() -> None:
    run = Run(max_draft=3)
    assert run.step(drafted_s=PLAIN_S, accepted=0) == [3]
    assert run.inner.asked == [3]


def test_a_step_with_prefill_is_ignored() -> None:
    run = Run()
    seq = run.seqs[0]
    for _ in range(20):
        run.clock.observe(Step((Chunk(seq, 0, [1] * 5, 5, 0), Chunk(seq, 0, [1] * 50, 0, 1))), 1.0)
        run.drafter.observe(seq, 4, 0)
    assert run.drafter.propose(seq, [0.1] * 8)


def test_the_wrapped_drafter_gets_the_end() -> None:
    run = Run()
    run.drafter.end(run.seqs[0])
    assert run.inner.ended == 1


def test_each_losing_request_in_a_row_loses_less() -> None:
    run = Run()
    lost = []
    for number in range(8):
        run.seqs = [Sequence(number, [1], 1, SamplingParams())]
        run.drafter.begin(run.seqs[0])
        lost.append(sum(map(bool, (run.step(drafted_s=1.5 * PLAIN_S, accepted=0)[0] for _ in range(50)))))
        run.drafter.end(run.seqs[0])
    assert lost[-1] == 1
    assert lost[0] > 2


def test_a_request_that_was_not_paused_resets_the_limit() -> None:
    run = Run()
    drafted = []
    for number, accepted in enumerate([0, 0, 0, 4, 0]):
        run.seqs = [Sequence(number, [1], 1, SamplingParams())]
        run.drafter.begin(run.seqs[0])
        drafted.append(sum(map(bool, (run.step(drafted_s=1.5 * PLAIN_S, accepted=accepted)[0] for _ in range(40)))))
        run.drafter.end(run.seqs[0])
    assert drafted[4] >= drafted[0] > drafted[2]


def next_request(run: Run, number: int) -> None:
    run.drafter.end(run.seqs[0])
    run.seqs = [Sequence(number, [1], 1, SamplingParams())]
    run.drafter.begin(run.seqs[0])


def test_drafts_of_which_nothing_is_accepted_get_shorter_until_a_token_is() -> None:
    """A step of 24 rows can lose eight plain steps, and each new request would begin with one."""
    run = Run()
    first = []
    for number in range(1, 5):
        drafted = [run.step(drafted_s=6 * PLAIN_S, accepted=0)[0] for _ in range(10)]
        first.append(drafted[0])
        next_request(run, number)
    assert first == [4, 2, 1, 1]
    assert [run.step(drafted_s=1.1 * PLAIN_S, accepted=1)[0] for _ in range(2)] == [1, 4]


class LongOnly(Always):
    """Drafts where four rows are allowed: one alone does not pay, as on a staircase of costs."""

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        return [7] * 4 if len(marginal_cost) >= 4 else []


def test_a_short_limit_ends_though_no_draft_is_short_enough_to_lift_it() -> None:
    """Two steps that hang while their drafts are wrong ended drafts for the life of a process."""
    run = Run()
    run.drafter = ThrottledDrafter(LongOnly(), run.clock)
    run.drafter.begin(run.seqs[0])
    again, hangs = [], []
    for number in range(1, 3):
        hangs.append([run.step(drafted_s=9 * PLAIN_S, accepted=0)[0] for _ in range(4)])
        next_request(run, number)
        drafted = [run.step(drafted_s=PLAIN_S, accepted=0)[0] for _ in range(4 * throttle.CUT)]
        again.append(drafted.index(4))
        next_request(run, 9 + number)
    assert hangs == [[4, 4, 0, 0]] * 2
    assert PAUSE < again[0] < 2 * throttle.CUT
    assert 1.8 * again[0] < again[1] < 3 * throttle.CUT, "each limit lasts longer while nothing is accepted"


def test_a_pause_after_accepted_tokens_leaves_drafts_long() -> None:
    run = Run()
    first = []
    for number, accepted in enumerate([4, 4, 0, 0], 1):
        drafted = [run.step(drafted_s=6 * PLAIN_S, accepted=accepted * (step == 0))[0] for step in range(10)]
        assert 0 in drafted
        first.append(drafted[0])
        next_request(run, number)
    assert first == [4, 4, 4, 2]


def test_short_steps_that_lose_leave_drafts_long() -> None:
    run = Run()
    for number in range(1, 4):
        drafted = [run.step(drafted_s=1.5 * PLAIN_S, accepted=0)[0] for _ in range(20)]
        assert drafted[0] == 4
        assert 0 in drafted
        next_request(run, number)


def test_one_on_trial_first_saves_what_it_may_lose(tmp_path: Path) -> None:
    run = Run(proof=tmp_path / "proof")
    drafted = [run.step(drafted_s=1.2 * PLAIN_S, accepted=0)[0] for _ in range(400)]
    assert not any(drafted[:40])
    assert set(drafted) == {0, 1}, "a trial is one token"
    assert 0.2 * sum(drafted) <= 0.005 * 400


def test_a_stall_of_one_on_trial_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, now = Run(proof=tmp_path / "proof"), [0.0]
    monkeypatch.setattr(throttle.time, "perf_counter", lambda: now[0])
    stalls = iter([100 * PLAIN_S])

    def propose(seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        now[0] += next(stalls, 0.0)
        return [7]

    monkeypatch.setattr(run.inner, "propose", propose)
    drafted = [run.step(drafted_s=1.2 * PLAIN_S, accepted=1)[0] for _ in range(600)]
    assert sum(drafted) > 50


def test_credit_of_one_on_trial_does_not_pile_up(tmp_path: Path) -> None:
    run = Run(proof=tmp_path / "proof")
    run.seqs[0].tokens += [7] * 20_000
    drafted = [run.step(drafted_s=1.5 * PLAIN_S, accepted=0)[0] for _ in range(100)]
    assert sum(drafted) <= 5


def test_one_that_gains_is_proved_for_later_processes(tmp_path: Path) -> None:
    proof = tmp_path / "acceptance" / "proof"
    run = Run(proof=proof)
    drafted = [run.step(drafted_s=1.2 * PLAIN_S, accepted=4)[0] for _ in range(200)]
    assert drafted[-1] == 4
    assert proof.exists()
    assert Run(proof=proof).step(drafted_s=PLAIN_S, accepted=4) == [4]


def test_one_that_loses_request_after_request_is_on_trial_again(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    proof.touch()
    run = Run(proof=proof)
    for number in range(4):
        for _ in range(20):
            run.step(drafted_s=2 * PLAIN_S, accepted=0)
        run.drafter.end(run.seqs[0])
        run.seqs = [Sequence(9 + number, [1], 1, SamplingParams())]
        run.drafter.begin(run.seqs[0])
    assert not proof.exists()
    assert run.step(drafted_s=PLAIN_S, accepted=4) == [0]


def test_a_request_that_chooses_the_drafter_needs_no_proof(tmp_path: Path) -> None:
    run = Run(proof=tmp_path / "proof")
    run.seqs[0].params = replace(run.seqs[0].params, draft="mtp")
    assert run.step(drafted_s=PLAIN_S, accepted=4) == [4]


@pytest.mark.parametrize("name", ["file/proof", "x" * 300], ids=["no folder", "too long"])
def test_a_disk_that_keeps_no_proof_stops_no_answer(name: str, tmp_path: Path) -> None:
    """Of a name that is too long, `Path.exists` raises OSError, as of one in a folder that cannot be entered."""
    tmp_path.joinpath("file").touch()
    run = Run(proof=tmp_path / name)
    drafted = [run.step(drafted_s=1.2 * PLAIN_S, accepted=4)[0] for _ in range(200)]
    assert drafted[-1] == 4
