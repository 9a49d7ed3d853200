"""Caches that cannot be cut: what a next turn, a retry, an edit and a shared system prompt compute again."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from edgelm.engine import kv_slots, prefixes
from edgelm.engine import save_points as engine_save_points
from edgelm.engine.core import Load, Op, SamplingParams, Save, Sequence
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.save_points import (
    ANSWER_START_LEN,
    MIN_GAIN_LEN,
    REACH,
    STRIDE,
    StateSizes,
    dispensable,
    save_points,
)
from tests.counts import Count
from tests.engine.fake import SimpleDrafter, SlotMemory, complete_alone
from tests.engine.loop import Loop
from tests.engine.simulation import fresh_seed, run_workload
from tests.engine.test_prefixes import Disk
from tests.engine.workloads import make_workload

HISTORIES = Count(test=100, soak=20_000)
WORKLOADS = Count(test=100, soak=10_000)
BACK: dict[str, Any] = {"can_trim": False, "can_copy": False, "rollback_len": 3}
WHOLE: list[dict[str, Any]] = [
    {"can_trim": False},
    {"can_trim": False, "can_copy": False},
    {"keeps_all": False},
    BACK,
]  # prefixes serve whole

whole = pytest.mark.parametrize("facts", WHOLE, ids=["recurrent", "hybrid", "window", "rollback"])


def words(count: int) -> list[int]:
    return random.Random(fresh_seed()).choices(range(40), k=count)


def changed(tokens: list[int], kept: int) -> list[int]:
    """Return other tokens behind the first `kept`."""
    return [*tokens[:kept], *((token + 1) % 40 for token in tokens[kept:])]


def roomy(facts: dict[str, Any], **more: Any) -> Disk:
    return Disk(**({"context": 8192, "capacity": 16384} | facts | more))


def computed(loop: Loop, prompt: list[int], **params: Any) -> tuple[Sequence, int]:
    """Return a request that ran alone, and how many tokens of its prompt were computed."""
    before = loop.executor.num_computed
    seq = loop.ask(prompt, **params)
    return seq, loop.executor.num_computed - before - seq.completion_len + 1


@whole
def test_a_tool_loop_computes_only_what_is_new(facts: dict[str, Any]) -> None:
    loop = roomy(facts)
    tokens = words(300)
    for turn in range(12):
        known = len(tokens) - 1 if turn else 0
        prompt = tokens + words(20)
        seq, num_computed = computed(loop, prompt, max_tokens=30)
        assert seq.cached == known
        assert num_computed == len(prompt) - known
        tokens = seq.tokens


@whole
def test_a_retry_computes_the_start_of_the_answer_again(facts: dict[str, Any]) -> None:
    loop = roomy(facts)
    first = loop.ask(words(300))
    second = loop.ask(first.tokens + words(200))
    for seq in (second, first):
        again, num_computed = computed(loop, seq.tokens[: seq.prompt_len])
        assert num_computed == ANSWER_START_LEN
        assert again.tokens == seq.tokens


@whole
def test_a_turn_whose_thought_the_template_omits_goes_on_from_the_start_of_the_answer(facts: dict[str, Any]) -> None:
    loop = roomy(facts)
    tokens = words(200)
    for turn in range(5):
        seq, num_computed = computed(loop, tokens + words(100), max_tokens=150)
        prompt, answer = seq.tokens[: seq.prompt_len], seq.tokens[seq.prompt_len + 80 :]
        tokens = prompt[:-3] + answer
        if turn:
            assert num_computed <= 100 + 70 + ANSWER_START_LEN


@whole
def test_an_edited_question_goes_on_from_the_end_of_the_turn_before(facts: dict[str, Any]) -> None:
    loop = roomy(facts)
    first = loop.ask(words(300), max_tokens=100)
    loop.ask(first.tokens + words(50))
    assert loop.ask(first.tokens + words(50)).cached == len(first.tokens) - 1


@whole
def test_a_system_prompt_is_kept_once_a_second_conversation_begins_with_it(facts: dict[str, Any]) -> None:
    loop = roomy(facts)
    system = words(400)
    cached = [loop.ask([*system, number, *words(60)]).cached for number in range(5)]
    assert cached == [0, 0, 400, 400, 400]


@whole
def test_requests_that_come_together_compute_their_system_prompt_twice_at_most(facts: dict[str, Any]) -> None:
    loop = roomy(facts, max_sequences=6)
    system = words(400)
    together = [loop.add([*system, number, *words(80)]) for number in range(6)]
    loop.finish()
    assert [seq.cached for seq in together[2:]] == [400] * 4


@whole
def test_a_long_document_serves_another_question_in_part_at_once(facts: dict[str, Any]) -> None:
    loop = roomy(facts, max_tokens=512)
    document = words(2 * STRIDE + 300)
    found = [loop.ask([*document, question, *words(90)], max_tokens=1).cached for question in range(3)]
    assert found == [0, 2 * STRIDE, len(document)]


@whole
def test_a_restart_forgets_neither_the_conversation_nor_its_last_question(facts: dict[str, Any]) -> None:
    for retry in (False, True):
        loop = roomy(facts)
        first = loop.ask(words(300))
        second = loop.ask(first.tokens + words(100))
        loop.restart()
        known = second.prompt_len - ANSWER_START_LEN if retry else len(second.tokens) - 1
        prompt = second.tokens[: second.prompt_len] if retry else second.tokens + words(9)
        assert loop.ask(prompt).cached == known


@whole
def test_a_state_on_the_way_does_not_take_the_room_of_other_conversations(facts: dict[str, Any]) -> None:
    loop = Loop(snapshot_bytes=8_000, **({"context": 1000, "capacity": 4000} | facts))
    others = [loop.ask(words(100)) for _ in range(2)]
    loop.ask(words(500))
    assert Save not in [type(op) for op in loop.ops[-1:]]
    assert all(loop.ask(other.tokens + words(5)).cached == len(other.tokens) - 1 for other in others)


def test_a_cache_that_can_be_cut_saves_nothing_on_the_way() -> None:
    loop = roomy({})
    first = loop.ask(words(3000))
    loop.ask(first.tokens + words(100))
    assert not {Save, Load} & {type(op) for op in loop.ops}


@whole
def test_a_long_conversation_drops_its_own_states_first(facts: dict[str, Any]) -> None:
    loop = roomy(facts, snapshot_bytes=25_000)
    other, seq = loop.ask(words(300)), loop.ask(words(200))
    for _ in range(8):
        seq = loop.ask(seq.tokens + words(70), max_tokens=1)
    again = loop.ask(other.tokens + words(5))
    assert again.cached == len(other.tokens) - 1
    assert not loop.files.num_fetched, "it stayed in memory"
    assert loop.ask(seq.tokens + words(5)).cached == len(seq.tokens) - 1


@whole
def test_the_next_prompt_goes_on_from_the_start_of_a_loop_that_the_template_omits(facts: dict[str, Any]) -> None:
    """The state that it needs is not dropped for the end of the loop."""
    loop = roomy(facts, snapshot_bytes=16_000)
    seq = first = loop.ask(words(300))
    for _ in range(4):
        seq = loop.ask(seq.tokens + words(30), max_tokens=10)
    again = loop.ask(first.tokens[: first.prompt_len] + words(50))
    assert again.cached == first.prompt_len - ANSWER_START_LEN


@whole
def test_of_a_long_conversation_few_states_are_stored(facts: dict[str, Any]) -> None:
    loop = roomy(facts)
    seq = loop.ask(words(200))
    for _ in range(12):
        seq = loop.ask(seq.tokens + words(100), max_tokens=1)
    assert isinstance(loop.kv, SlotKV)
    loop.flush_idle()
    assert len(loop.kv._snapshots) > 12
    assert len(loop.files.found) <= 7
    assert max(loop.lengths()) == len(seq.tokens) - 1


def test_every_answer_is_the_one_given_alone_with_many_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are saved at every turn here, whatever they cost, and loaded by turns, branches and retries."""
    for name, value in (("MIN_GAIN_LEN", 2), ("STRIDE", 24), ("ANSWER_START_LEN", 3)):
        monkeypatch.setattr(engine_save_points, name, value)
    for module in (kv_slots, prefixes):
        monkeypatch.setattr(module, "MIN_PREFIX_LEN", 4)
    first, num_saved = fresh_seed(), Counter[str]()
    apply = SlotMemory.apply

    def count(memory: SlotMemory, op: Op, lenient: bool) -> None:
        num_saved[type(op).__name__] += 1
        apply(memory, op, lenient)

    monkeypatch.setattr(SlotMemory, "apply", count)
    seeds = [seed for seed in range(first, first + WORKLOADS) if not divisible(seed)]
    for seed in seeds:
        run_workload(seed, "slots")
    assert num_saved["Save"] >= len(seeds)
    assert num_saved["Load"] >= len(seeds) // 4


def divisible(seed: int) -> bool:
    facts = make_workload(seed).info
    return facts.can_trim and facts.keeps_all


# -- states that can go back a few tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("differ", [1, 2, 3])
def test_a_prompt_that_differs_in_its_last_tokens_computes_these_alone(differ: int) -> None:
    loop, prompt = roomy(BACK), words(300)
    loop.ask(prompt, max_tokens=1)
    # The states behind a chunk of `differ` tokens do not reach to before it.
    for num_computed in (differ, ANSWER_START_LEN, differ):
        prompt = changed(prompt, 300 - differ)
        assert computed(loop, prompt, max_tokens=1)[1] == num_computed


def test_a_prompt_that_differs_earlier_goes_on_from_a_saved_state() -> None:
    loop, prompt = roomy(BACK), words(300)
    loop.ask(prompt, max_tokens=1)
    assert computed(loop, changed(prompt, 296))[1] == ANSWER_START_LEN


class Copycat(SimpleDrafter):
    """Proposes the answer of the sequence itself, `right` tokens of it rightly; `rng` spoils some more."""

    def __init__(self, rng: random.Random | None = None, right: int = 99) -> None:
        self.loop: Loop | None = None
        self.rng = rng
        self.right = right

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        assert self.loop
        params = SamplingParams(temperature=0.0, max_tokens=seq.completion_len + len(marginal_cost))
        answer, _ = complete_alone(seq.tokens[: seq.prompt_len], params, self.loop.info)
        draft = changed(answer[seq.completion_len :], self.right)
        return [0 if self.rng and self.rng.random() < 0.2 else token for token in draft]


def drafted(rng: random.Random | None = None, right: int = 99) -> Loop:
    loop = Loop(drafter=(copycat := Copycat(rng, right)), context=1024, capacity=2048, **BACK)
    copycat.loop = loop
    return loop


def test_a_turn_without_the_last_tokens_of_the_answer_computes_only_what_is_new() -> None:
    """A text that ends before a stop string, whose tokens are computed, goes on before them."""
    loop = drafted()
    first = loop.ask(words(300), max_tokens=9)  # 1, 4, and 4 tokens a step
    assert computed(loop, changed(first.tokens, 307))[1] == 2
    first = loop.ask(words(300), max_tokens=9)
    assert computed(loop, changed(first.tokens, 306))[1] == 3


def test_a_rejected_draft_goes_only_when_it_is_known_where_to_cut() -> None:
    loop = drafted()
    answer = loop.ask(prompt := words(300), max_tokens=9).tokens[300:]
    loop.ask(prompt, max_tokens=9)
    assert loop.last
    first = loop.ask(words(200), max_tokens=None, stop_ids=frozenset({answer[2]}))
    assert computed(loop, changed(first.tokens, len(first.tokens) - 1))[1] == 1


def test_a_state_that_went_back_for_a_draft_does_not_go_back_again() -> None:
    loop = drafted(right=1)
    seq = loop.add(words(200), max_tokens=40)
    while not seq.accepted:
        loop.step()
    assert seq.drafted == 3
    tokens, end = list(seq.tokens), seq.computed
    loop.scheduler.abort(seq.id)
    assert loop.ask(changed(tokens, end - 1)).cached < end - 1


def test_a_state_goes_back_for_no_prompt_where_another_sequence_ran_beside_it() -> None:
    """llama.cpp loses the earlier states of a sequence that it moves."""
    num_tried = 0
    for count in range(1, 40):
        loop = drafted()
        other, seq = loop.add(words(50), max_tokens=count), loop.add(words(90), max_tokens=1)
        while loop.scheduler.num_unfinished:
            events = loop.step()
        if {event.seq_id for event in events if event.finish_reason} == {other.id, seq.id}:
            again = loop.ask(changed(seq.tokens, 88))
            assert again.cached is not None
            assert again.cached < 88
            num_tried += 1
    assert num_tried


def test_a_cut_at_any_of_the_last_tokens_costs_nothing_and_no_other_is_made() -> None:
    rng = random.Random(seed := fresh_seed())
    num_cut = 0
    for _ in range(HISTORIES // 10):
        loop, tokens = drafted(rng), words(rng.randint(40, 200))
        memory = loop.memory
        assert isinstance(memory, SlotMemory)
        for _ in range(8):
            seq = loop.ask(tokens, max_tokens=rng.randint(1, 12))  # compared with the answer given alone
            (slot,) = (slot for slot, cells in enumerate(memory.slots) if cells)
            shortest = max(memory._starts[slot] + 1, len(memory.slots[slot]) - BACK["rollback_len"])
            computed_len = len(seq.tokens) - 1
            kept = rng.randint(computed_len - 4, computed_len)
            tokens = changed(seq.tokens, kept)
            again = loop.ask(tokens, max_tokens=1)
            assert again.cached is not None
            if (shortest <= kept and slot not in memory._cut) or kept == computed_len:
                assert again.cached == kept, f"seed {seed}"
                num_cut += kept < computed_len
    assert num_cut >= HISTORIES // 10


# -- the positions -----------------------------------------------------------------------------------------------------


def test_save_points_of_a_prompt() -> None:
    assert save_points(0, 300, 0, []) == [300 - ANSWER_START_LEN]
    assert save_points(0, 300, 100, []) == [100, 300 - ANSWER_START_LEN]
    assert save_points(0, 300, 300, []) == [300 - ANSWER_START_LEN], "a retry: the last token is always computed"
    assert save_points(0, 2 * STRIDE + 100, 0, []) == [STRIDE, 2 * STRIDE, 2 * STRIDE + 100 - ANSWER_START_LEN]
    assert save_points(250, 300, 100, [250]) == [], "too little is new"
    assert save_points(250, 300, 100, [150]) == [250], "the end of a turn"
    assert save_points(0, MIN_GAIN_LEN, 0, []) == [], "a short prompt"


def test_save_points_are_apart_and_ascend() -> None:
    rng = random.Random(seed := fresh_seed())
    for _ in range(HISTORIES):
        length = rng.randint(1, 9000)
        start, shared = rng.randint(0, length - 1), rng.randint(0, length)
        kept = [rng.randint(1, length) for _ in range(rng.randint(0, 4))]
        points = save_points(start, length, shared, kept)
        assert all(start <= point < length for point in points), f"seed {seed}"
        assert all(b - a >= MIN_GAIN_LEN for a, b in zip([0, *points], points, strict=False)), f"seed {seed}"


def test_dispensable_states() -> None:
    others = [(100, 100), (700, 700), (970, 970), (980, 980), (990, 990), (800, 250)]
    assert dispensable(1000, others) == [3, 0], "the distances 10, 30, 300 are left, and 1000 for no state"
    assert dispensable(1000, [*others, (990, 980)]) == [0], "another conversation differs after 980"
    assert dispensable(1000, [(750, 750), (700, 700)]) == [1], "no state is within reach too"
    assert dispensable(100, [(100, 100), (300, 100), (40, 30)]) == []


def test_the_states_of_a_long_conversation_are_few_and_reach_back() -> None:
    rng = random.Random(seed := fresh_seed())
    for _ in range(HISTORIES):
        length, kept = 0, list[int]()
        for _ in range(200):
            length += rng.choice([rng.randint(MIN_GAIN_LEN, 300), rng.randint(MIN_GAIN_LEN, 5000)])
            drop = dispensable(length, [(state, state) for state in kept])
            kept = [state for index, state in enumerate(kept) if index not in drop] + [length]
        distances = [length - state for state in reversed(kept)]
        for near, far in zip(distances[1:], [*distances[2:], length], strict=True):
            assert far <= REACH * near or far - near <= 5000, (seed, kept)
        assert len(kept) <= 2 + 2 * math.log(length / MIN_GAIN_LEN, REACH), (seed, kept)


def test_sizes_are_a_constant_and_a_part_that_grows() -> None:
    sizes = StateSizes(10)
    assert sizes.estimate(100) == 1000
    sizes.add(50, 2000)
    assert (sizes.estimate(40), sizes.estimate(100)) == (2000, 4000), "at most: one state tells no parts"
    sizes.add(150, 3000)
    assert [sizes.estimate(length) for length in (0, 50, 100, 200)] == [1500, 2000, 2500, 3500]
