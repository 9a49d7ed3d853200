"""The scheduler's decisions, one at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import numpy as np
import pytest

from edgelm.base.errors import EngineError, RequestError
from edgelm.engine.clock import MIN_PREFILL, Measured, StepClock, StepCosts
from edgelm.engine.core import LAST, Masks, Sampled, SamplingParams, Sequence, Step
from tests.engine.fake import FakeMatcher, Fault, SimpleDrafter, complete_alone, info
from tests.engine.loop import Loop
from tests.engine.simulation import BOOKKEEPERS

both = pytest.mark.parametrize("kind", BOOKKEEPERS)
GREEDY = SamplingParams(temperature=0)


class FixedCost(SimpleDrafter):
    """A drafter with a fixed cost of a missed draft."""

    def __init__(self, missed_draft_cost: float) -> None:
        self._missed_draft_cost = missed_draft_cost
        self.costs: list[list[float]] = []

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        return []

    def missed_draft_cost(self, seq: Sequence, marginal_cost: Seq[float]) -> float:
        self.costs.append(list(marginal_cost))
        return self._missed_draft_cost


def ahead_loop(missed_draft_cost: float | None = None, gap_s: float = 0.0, **facts: object) -> tuple[Loop, Step]:
    """Return a loop with two decoding sequences, and its planned step."""
    clock = StepClock(StepCosts([Measured(1, 0, 0.01), Measured(2, 0, 0.011)]))
    for _ in range(100):
        clock.observe_gap(gap_s)
    drafter = None if missed_draft_cost is None else FixedCost(missed_draft_cost)
    loop = Loop("paged", clock=clock, drafter=drafter, **({"runs_ahead": True} | facts))
    loop.add([1, 2, 3])
    loop.add([4, 5])
    loop.step()
    step = loop.scheduler.plan()
    assert step
    assert len(step.chunks) == 2
    return loop, step


def test_a_step_ahead_continues_where_the_step_before_ends() -> None:
    loop, step = ahead_loop()
    ahead = loop.scheduler.plan_ahead(step)
    assert ahead
    assert [(chunk.tokens, chunk.rows) for chunk in ahead.chunks] == [([LAST], 1)] * 2
    assert [chunk.start for chunk in ahead.chunks] == [chunk.end for chunk in step.chunks]


@pytest.mark.parametrize(
    ("missed_draft_cost", "gap_s", "expected"), [(0.3, 0.004, True), (0.3, 0.002, False), (0.0, 0.0, True)]
)
def test_a_missed_draft_is_weighed_against_the_gap(missed_draft_cost: float, gap_s: float, expected: bool) -> None:
    loop, step = ahead_loop(missed_draft_cost, gap_s)
    assert (loop.scheduler.plan_ahead(step) is not None) == expected
    drafter = loop.scheduler._drafter
    assert isinstance(drafter, FixedCost)
    assert [len(costs) for costs in drafter.costs] == [6, 6]  # of eight tokens, one is known and one is being computed


@pytest.mark.parametrize(
    "params", [{"repetition_penalty": 1.1}, {"frequency_penalty": 0.5}, {"presence_penalty": 0.5}, {"max_tokens": 3}]
)
def test_no_step_runs_ahead_of_a_token_that_the_host_needs(params: dict[str, object]) -> None:
    """Penalties count the token. If it is the last of a sequence, only the other sequence needs a step."""
    loop = Loop("paged", runs_ahead=True)
    loop.add([1, 2, 3], **params)
    other = loop.add([4, 5])
    loop.step()
    loop.step()
    step = loop.scheduler.plan()
    assert step
    ahead = loop.scheduler.plan_ahead(step)
    if "max_tokens" in params:
        assert ahead
        assert [chunk.seq for chunk in ahead.chunks] == [other]
    else:
        assert ahead is None


def test_a_sequence_blocked_on_memory_delays_no_other() -> None:
    """Its admission is tried again after another sequence ended."""
    loop = Loop("paged", runs_ahead=True, context=64, capacity=128)
    first = loop.add([1] * 40, max_tokens=20)
    loop.add([2] * 40, max_tokens=20)
    waits = loop.add([3] * 40)
    for _ in range(8):
        loop.step()
    step = loop.scheduler.plan()
    assert step
    assert list(loop.scheduler.waiting) == [waits]
    assert loop.scheduler.plan_ahead(step) is not None
    loop.scheduler.abort(first.id)
    assert loop.scheduler.plan_ahead(step) is None


class Drafts(SimpleDrafter):
    """Proposes always the same draft, or the true answer."""

    def __init__(self, draft: list[int] | None = None) -> None:
        self.draft = draft
        self.costs: list[list[float]] = []
        self.seen: list[tuple[int, int]] = []

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        self.costs.append(list(marginal_cost))
        if self.draft is not None:
            return self.draft
        answer, _ = complete_alone(seq.tokens[: seq.prompt_len], seq.params, info(context=10_000))
        return answer[seq.completion_len :]

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        self.seen.append((drafted, accepted))


def shape(step: Step | None) -> list[tuple[int, int, int]]:
    """Return (sequence, tokens, rows) of each chunk."""
    return [(chunk.seq.id, len(chunk.tokens), chunk.rows) for chunk in step.chunks] if step else []


# -- requests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "params", "says"),
    [
        ([], GREEDY, "empty"),
        ([1] * 256, GREEDY, "256"),
        ([1] * 12_345, GREEDY, "12,345 tokens, the context holds 256"),
        ([1, 40], GREEDY, "vocabulary of 40"),
        ([-1, 1], GREEDY, "vocabulary of 40"),
        ([1], SamplingParams(logit_bias=((40, 1.0),)), "vocabulary of 40"),
    ],
)
def test_a_request_that_can_never_run_is_refused(tokens: list[int], params: SamplingParams, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        Loop().scheduler.check(tokens, params)


def test_the_longest_prompt_gives_one_token() -> None:
    loop = Loop()
    seq = loop.add([1] * 255, max_tokens=None)
    (*_, event) = loop.finish()
    assert event.finish_reason == "context"
    assert seq.completion_len == 1


@both
def test_finish_reasons(kind: str) -> None:
    loop = Loop(kind, context=100)
    answer, _ = complete_alone([1, 2, 3], GREEDY, loop.info)
    stop = loop.add([1, 2, 3], max_tokens=None, stop_ids=frozenset({answer[9]}))
    length = loop.add([1, 2, 3], max_tokens=7)
    context = loop.add([1, 2, 3], max_tokens=None)
    reasons = {event.seq_id: event.finish_reason for event in loop.finish()}
    assert reasons == {stop.id: "stop", length.id: "length", context.id: "context"}
    assert stop.tokens[-1] == answer[9], "the stop token is the last"
    assert len(context.tokens) == 100


@both
def test_aborting_ends_a_sequence_between_steps(kind: str) -> None:
    loop = Loop(kind, max_sequences=1)
    running, waiting = loop.add([1] * 9), loop.add([2] * 9)
    loop.step()
    for seq in (waiting, running):
        event = loop.scheduler.abort(seq.id)
        assert event
        assert event.finish_reason == "abort"
        assert loop.scheduler.abort(seq.id) is None
    assert loop.scheduler.num_unfinished == 0
    assert loop.scheduler.plan() is None


# -- the budget --------------------------------------------------------------------------------------------------------


@both
def test_a_long_prompt_is_computed_in_chunks_and_sampled_once(kind: str) -> None:
    loop = Loop(kind, max_tokens=64)
    loop.add([1] * 150, max_tokens=1)
    steps = []
    while loop.scheduler.num_unfinished:
        loop.step()
        steps += shape(loop.last)
    assert steps == [(0, 64, 0), (0, 64, 0), (0, 22, 1)]


@both
def test_decoding_comes_first_and_limits_prefill(kind: str) -> None:
    loop = Loop(kind, max_tokens=200, capacity=1024)
    loop.add([1] * 10, max_tokens=50)
    loop.step()
    loop.add([2] * (3 * MIN_PREFILL + 1), max_tokens=50)
    loop.add([3] * 3, max_tokens=50)
    for _ in range(3):
        loop.step()
        assert shape(loop.last) == [(0, 1, 1), (1, MIN_PREFILL, 0)]
    loop.step()
    assert shape(loop.last) == [(0, 1, 1), (1, 1, 1), (2, 3, 1)]
    loop.step()
    assert shape(loop.last) == [(0, 1, 1), (1, 1, 1), (2, 1, 1)]


@both
def test_if_nothing_decodes_prompts_fill_the_batch(kind: str) -> None:
    loop = Loop(kind, max_tokens=200)
    for token in range(3):
        loop.add([token] * 90)
    loop.step()
    assert shape(loop.last) == [(0, 90, 1), (1, 90, 1), (2, 20, 0)]


@both
def test_sequences_beyond_the_slots_wait(kind: str) -> None:
    loop = Loop(kind, max_sequences=2)
    for token in range(4):
        loop.add([token] * 5, max_tokens=3 + token)
    loop.step()
    assert [seq.id for seq in loop.scheduler.waiting] == [2, 3]
    loop.finish()


@both
def test_drafts_leave_a_token_to_each_running_sequence(kind: str) -> None:
    loop = Loop(kind, drafter=Drafts([1] * 50), max_tokens=10, max_rows=10, max_sequences=4)
    for token in range(4):
        loop.add([token], max_tokens=100)
    loop.step()
    assert shape(loop.last) == [(0, 7, 7), (1, 1, 1), (2, 1, 1), (3, 1, 1)], "waiting sequences are admitted"
    loop.step()
    assert shape(loop.last) == [(0, 7, 7), (1, 1, 1), (2, 1, 1), (3, 1, 1)]


@both
def test_no_draft_is_longer_than_the_executor_verifies(kind: str) -> None:
    """A longer one would be verified by kernels with other rounding than those that decode."""
    loop = Loop(kind, drafter=Drafts([1] * 50), max_tokens=64, max_rows=64, max_sequences=4, max_draft=15)
    for token in range(3):
        loop.add([token], max_tokens=100)
    loop.step()
    assert shape(loop.last) == [(0, 16, 16), (1, 16, 16), (2, 16, 16)]
    loop.step()
    assert max(len(chunk.tokens) for chunk in loop.last.chunks) == 16


@both
def test_an_unfinished_prompt_shares_its_prefix(kind: str) -> None:
    loop = Loop(kind, max_tokens=40, block_len=8)
    first = loop.add([1] * 100, max_tokens=2)
    loop.step()
    loop.step()
    assert first.computed == 80
    second = loop.add([1] * 60, max_tokens=2)
    loop.step()  # the last 20 of the first, and the second
    assert second in loop.scheduler.running
    assert second.cached == (59 if kind == "slots" else 56)
    loop.finish()


# -- memory ------------------------------------------------------------------------------------------------------------


@both
def test_the_youngest_sequence_is_preempted_first(kind: str) -> None:
    loop = Loop(kind, context=160, capacity=160, block_len=4)
    sequences = [loop.add([token] * 20, max_tokens=100) for token in range(3)]
    left: list[int] = []
    while loop.scheduler.num_unfinished:
        before = list(loop.scheduler.running)
        loop.step()
        left += [seq.id for seq in before if seq in loop.scheduler.waiting]
    assert left[0] == 2, left
    assert 1 in left
    assert 0 not in left
    assert all(seq.completion_len == 100 for seq in sequences)


@both
def test_a_preempted_sequence_repeats_no_token(kind: str) -> None:
    loop = Loop(kind, context=160, capacity=160, block_len=4)
    sequences = [loop.add([token] * 20, max_tokens=100) for token in range(3)]
    events = loop.finish()
    for seq in sequences:
        answer = [sample.id for event in events if event.seq_id == seq.id for sample in event.sampled]
        assert answer == seq.tokens[seq.prompt_len :]


@both
def test_a_draft_is_dropped_before_a_sequence_is_preempted(kind: str) -> None:
    facts = {"context": 48, "capacity": 48, "max_rows": 64, "max_tokens": 64}
    loop = Loop(kind, drafter=Drafts([1] * 40), block_len=1, **facts)
    sequences = [loop.add([token] * 8, max_tokens=None) for token in (1, 2)]
    for _ in range(14):  # 32 cells are left, then 30, 28, ...; a draft would need more than there are
        loop.step()
    assert loop.scheduler.running == sequences
    loop.finish()


# -- drafts ------------------------------------------------------------------------------------------------------------


@both
def test_a_right_draft_is_accepted_whole(kind: str) -> None:
    loop = Loop(kind, drafter=(drafts := Drafts()), max_rows=8, max_sequences=2)
    seq = loop.ask([1, 2, 3], max_tokens=17)
    assert [rows for rows, _ in drafts.seen] == [7, 7]
    assert seq.drafted == seq.accepted == 14
    assert seq.completion_len == 17


@both
def test_a_draft_never_outgrows_the_answer_or_the_context(kind: str) -> None:
    for facts, params in (({}, {"max_tokens": 4}), ({"context": 8, "capacity": 16}, {"max_tokens": None})):
        loop = Loop(kind, drafter=(drafts := Drafts()), **facts)
        seq = loop.ask([1, 2, 3, 0], **params)
        assert seq.completion_len == 4
        assert [len(costs) for costs in drafts.costs] == [2], "the last token of the answer is never drafted"


@both
def test_a_wrong_draft_costs_nothing_but_rows(kind: str) -> None:
    loop = Loop(kind, drafter=(drafts := Drafts([0, 0, 0])))
    answer, _ = complete_alone([1, 2, 3], SamplingParams(temperature=0, max_tokens=20), loop.info)
    seq = loop.ask([1, 2, 3], max_tokens=20)
    assert seq.tokens[3:] == answer
    assert seq.accepted == sum(accepted for _, accepted in drafts.seen)


def test_a_cache_that_cannot_be_trimmed_takes_no_drafts() -> None:
    loop = Loop(drafter=(drafts := Drafts()), can_trim=False)
    loop.ask([1, 2, 3])
    assert not drafts.costs


def test_a_state_that_goes_back_a_few_tokens_takes_drafts_of_so_many() -> None:
    loop = Loop(drafter=(drafts := Drafts()), can_trim=False, rollback_len=2)
    answer, _ = complete_alone([1, 2, 3], SamplingParams(temperature=0, max_tokens=30), loop.info)
    seq = loop.ask([1, 2, 3], max_tokens=30)
    assert seq.tokens[3:] == answer
    assert max(len(costs) for costs in drafts.costs) == 2
    assert seq.accepted


class Lengths(Drafts):
    """Drafts of as many tokens as the first token of a sequence says."""

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        return super().propose(seq, marginal_cost, forced)[: seq.tokens[0]]


def test_states_that_go_back_take_drafts_of_one_length_in_a_step() -> None:
    """The first draft of a step sets the length: a longer one is cut, a shorter one is dropped."""
    loop = Loop(drafter=Lengths(), can_trim=False, rollback_len=3, max_sequences=3, max_rows=16)
    for token in (2, 3, 1):
        loop.add([token] * 4, max_tokens=20)
    shapes = set()
    while loop.scheduler.num_unfinished:
        loop.step()
        shapes.add(tuple(rows for _, _, rows in shape(loop.last)))
    assert (3, 3, 1) in shapes


def test_longer_drafts_of_one_sequence_do_not_stop_those_of_others() -> None:
    """The drafts that are planned are cut to a shorter one, if more tokens are drafted then."""
    loop = Loop(drafter=Lengths(), can_trim=False, rollback_len=3, max_sequences=3, max_rows=16)
    seqs = [loop.add([token] * 4, max_tokens=60) for token in (3, 2, 2)]
    for _ in range(15):
        loop.step()
    assert shape(loop.last) == [(seq.id, 3, 3) for seq in seqs]
    assert min(seq.drafted for seq in seqs) >= 20
    assert all(seq.accepted == seq.drafted for seq in seqs)


@both
def test_a_stop_token_inside_a_draft_ends_the_answer(kind: str) -> None:
    loop = Loop(kind, drafter=Drafts())
    answer, _ = complete_alone([1, 2, 3], GREEDY, loop.info)
    first = answer.index(answer[5])
    seq = loop.ask([1, 2, 3], max_tokens=None, stop_ids=frozenset({answer[5]}))
    assert seq.tokens[3:] == answer[: first + 1]


@both
def test_a_grammar_holds_with_drafts_that_break_it(kind: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    loop = Loop(kind, drafter=Drafts([1, 2, 3]))
    answer, _ = complete_alone([4, 5], params, loop.info, grammar=7)
    free, _ = complete_alone([4, 5], params, loop.info)
    seq = loop.add([4, 5], max_tokens=30, matcher=FakeMatcher(7, 40))
    other = loop.add([4, 5], max_tokens=30)
    loop.finish()
    assert seq.tokens[2:] == answer != free
    assert other.tokens[2:] == free


# -- failures ----------------------------------------------------------------------------------------------------------


@both
def test_a_failed_step_ends_only_its_own_sequences(kind: str) -> None:
    loop = Loop(kind, max_tokens=40, max_sequences=3)
    first, second = loop.add([1] * 10, max_tokens=30), loop.add([2] * 50, max_tokens=30)
    third = loop.add([3] * 10, max_tokens=30)
    loop.step()  # the first, and 30 of the second
    loop.clock.observe(Step(loop.last.chunks if loop.last else ()), 100.0)
    third_was_waiting = third in loop.scheduler.waiting
    loop.executor.faults = {1: Fault("chunks", 5)}
    events = loop.step()
    failed = {event.seq_id for event in events if event.error}
    assert third_was_waiting
    assert failed == {chunk.seq.id for chunk in loop.last.chunks} if loop.last else set()
    loop.finish()
    for seq in (first, second, third):
        assert (seq.completion_len == 30) != (seq.id in failed)
    assert loop.ask([1] * 10).completion_len == 8


@both
def test_a_failed_plan_ends_the_running_sequences_or_else_the_next_in_the_queue(kind: str) -> None:
    """Otherwise a request that cannot be planned would block all others for ever."""
    loop = Loop(kind, max_sequences=1)
    first, second = loop.add([1] * 5), loop.add([2] * 5)
    (event,) = loop.scheduler.fail(None, EngineError("it broke"))
    assert event.seq_id == first.id
    loop.step()
    third = loop.add([3] * 5)
    (event,) = loop.scheduler.fail(None, EngineError("it broke"))
    assert event.seq_id == second.id
    loop.finish()
    assert third.completion_len == 8
    assert loop.scheduler.fail(None, EngineError("it broke")) == []


@both
def test_nan_ends_only_its_own_sequence(kind: str) -> None:
    loop = Loop(kind)
    loop.executor.spoiled = {0: 3}
    bad, good = loop.add([1] * 5), loop.add([2] * 5)
    events = [event for event in loop.finish() if event.finish_reason]
    errors = {event.seq_id: event.error for event in events}
    assert "not numbers" in str(errors[bad.id])
    assert errors[good.id] is None
    assert bad.completion_len == 3
    assert loop.ask([1] * 5 + bad.tokens[5:] + [1]).cached == 0, "invalid KV is not reused"


@both
def test_samples_after_a_rejected_draft_token_are_ignored(kind: str) -> None:
    loop = Loop(kind, drafter=Drafts([5, 6]))
    seq = loop.add([1] * 5, max_tokens=30)
    loop.step()
    step = loop.scheduler.plan()
    assert step
    (event,) = loop.scheduler.commit(step, [[Sampled(4), Sampled(7), Sampled(8)]])
    assert event.sampled == (Sampled(4),)
    assert seq.computed == len(seq.tokens) - 1 == 6


# -- grammars ----------------------------------------------------------------------------------------------------------


class Script:
    """A grammar of one text: tokens, or sets of tokens of which one is chosen."""

    unrestricted = False
    error: str | None = None

    def __init__(self, *places: int | set[int]) -> None:
        self.places = [{place} if isinstance(place, int) else place for place in places]

    @property
    def done(self) -> bool:
        return not self.places

    def allowed(self, draft: list[int]) -> int:
        pairs = zip(draft, self.places, strict=False)
        return next(
            (i for i, (token, place) in enumerate(pairs) if token not in place), min(len(draft), len(self.places))
        )

    def forced(self, most: int) -> list[int]:
        free = next((i for i, place in enumerate(self.places) if len(place) > 1), len(self.places))
        return [min(place) for place in self.places[: min(free, most)]]

    def fill(self, draft: list[int], rows: Masks) -> None:
        rows[:] = 0
        for row, place in zip(rows, self.places, strict=False):
            for token in place:
                row.view(np.uint32)[token // 32] |= 1 << token % 32

    def accept(self, token: int) -> None:
        assert token in self.places.pop(0)


def test_forced_tokens_are_drafted_and_the_drafter_continues_behind_them() -> None:
    drafts = Drafts([8, 9])
    loop = Loop(drafter=drafts)
    seq = loop.add([1, 2], max_tokens=30, matcher=Script({3, 4}, 5, 6, 7, {8, 11}, {9, 10}, {1, 2}, 3))
    loop.step()
    loop.step()
    assert loop.last
    assert loop.last.chunks[0].draft == [5, 6, 7, 8, 9]
    (event,) = loop.finish()[-1:]
    assert event.finish_reason == "stop"
    assert (seq.forced, seq.drafted) == (4, 2), "5, 6, 7 and the 3 at the end"
    assert sum(drafted for drafted, _ in drafts.seen) == seq.drafted
    assert sum(accepted for _, accepted in drafts.seen) == seq.accepted


def test_forced_tokens_need_no_consent_of_a_drafter() -> None:
    drafts = Drafts([])
    loop = Loop(drafter=drafts)
    seq = loop.ask([1, 2], max_tokens=30, matcher=Script({3, 4}, *range(10, 20)))
    assert seq.tokens[3:] == list(range(10, 20))
    assert seq.forced == 10
    assert loop.executor.num_steps == 2
    assert drafts.seen == []


@pytest.mark.parametrize("facts", [{"can_trim": False}, {}])
def test_without_speculation_no_token_is_drafted(facts: dict[str, bool]) -> None:
    """Also where a draft could not be cut off."""
    loop = Loop(drafter=Drafts([]) if facts else None, **facts)
    seq = loop.ask([1, 2], max_tokens=30, matcher=Script({3, 4}, *range(10, 20)))
    assert seq.forced == 0
    assert loop.executor.num_steps == 11


def test_a_request_may_go_without_drafts() -> None:
    loop = Loop(drafter=Drafts())
    seq, other = loop.add([1, 2], max_tokens=9, draft="off"), loop.add([1, 3], max_tokens=9)
    forced = loop.add([1, 2], max_tokens=30, draft="off", matcher=Script({3, 4}, *range(10, 15)))
    loop.finish()
    assert seq.drafted == forced.forced == 0
    assert other.accepted > 0


def test_a_draft_ends_before_a_token_that_the_grammar_forbids() -> None:
    loop = Loop(drafter=Drafts([9, 5, 9]))
    seq = loop.add([1, 2], max_tokens=30, matcher=Script({3, 4}, {8, 9}, {5, 6}, {7, 8}, {7, 8}))
    loop.step()
    loop.step()
    assert loop.last
    assert loop.last.chunks[0].draft == [9, 5]
    loop.finish()
    assert seq.drafted == 2


def test_a_finished_grammar_ends_the_answer_without_a_stop_token() -> None:
    loop = Loop()
    loop.add([1, 2], max_tokens=30, matcher=Script(5, 6))
    events = loop.finish()
    assert [sample.id for event in events for sample in event.sampled] == [5, 6]
    assert events[-1].finish_reason == "stop"


def test_a_mask_that_fails_behind_a_draft_token_costs_only_the_rest_of_the_draft() -> None:
    """A grammar may be too complex where a draft leads, and go on elsewhere (`GrammarMatcher.fill`)."""

    class Shortsighted(Script):
        def fill(self, draft: list[int], rows: Masks) -> None:
            super().fill(draft, rows)
            rows[1:] = 0

    loop = Loop(drafter=Drafts([]))
    seq = loop.add([1, 2], max_tokens=30, matcher=Shortsighted({3, 4}, *range(10, 15)))
    events = loop.finish()
    assert seq.tokens[3:] == list(range(10, 15))
    assert seq.forced == 5, "one of each draft"
    assert [event.finish_reason for event in events] == [None] * 5 + ["stop"]


def test_what_leaves_no_token_is_told_apart() -> None:
    class Stuck(Script):
        def fill(self, draft: list[int], rows: Masks) -> None:
            rows[:] = 0
            self.error = "too deep"

    loop = Loop()
    loop.add([1, 2], matcher=Stuck(5))
    loop.add([1, 3], matcher=Script(5), logit_bias=((5, -math.inf),))
    loop.executor.spoiled = {1: 0}
    errors = {event.seq_id: str(event.error) for event in loop.finish() if event.finish_reason == "error"}
    assert "cannot follow the grammar any further: too deep" in errors[0]
    assert "logit_bias forbids every token" in errors[1]
