"""NgramDrafter: it proposes only what was said, only what pays, and to nobody what another said."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgelm.chats.knowledge.guide import FOLDER
from edgelm.engine.core import SamplingParams, Sequence
from edgelm.engine.speculation.acceptance import MAX_DRAFT, Acceptance, Guess
from edgelm.engine.speculation.ngram_drafter import NgramDrafter, floors
from edgelm.engine.speculation.past_answers import PastAnswers
from tests.bench.drafter import Replay, Request, read_requests, replay
from tests.counts import Count
from tests.real_data import SHARED

EXAMPLES = Count(test=60, soak=3_000)
CHEAP = [0.02] * 16
PAGES = ("chat", "models", "memory", "run", "measuring")  # of our own guide
CITIES = ("Bern", "Oslo", "Lima", "Kyoto", "Quito", "Turin")
RECORDS = 12


def sequence(
    tokens: list[int], number: int = 0, *, past: list[int] | None = None, cache_namespace: str = ""
) -> Sequence:
    return Sequence(number, tokens, len(tokens), SamplingParams(), past=past or (), cache_namespace=cache_namespace)


def settle(drafter: NgramDrafter) -> None:
    while drafter.work(1.0):
        pass


def first_draft(drafter: NgramDrafter, seq: Sequence, costs: list[float] | None = None) -> list[int]:
    drafter.begin(seq)
    settle(drafter)
    return drafter.propose(seq, costs or CHEAP)


def answered(drafter: NgramDrafter, seq: Sequence, answer: list[int]) -> None:
    drafter.begin(seq)
    seq.tokens += answer
    drafter.end(seq)
    settle(drafter)


# -- what is proposed ----------------------------------------------------------------------------------------------


def test_a_passage_that_comes_again_is_continued() -> None:
    passage = list(range(100, 140))
    draft = first_draft(NgramDrafter(), sequence([*passage, 1, 2, *passage[:10]]))
    assert draft == passage[10:26]


def test_a_text_without_repetition_gets_no_draft() -> None:
    assert first_draft(NgramDrafter(), sequence(list(range(500)))) == []


def test_what_no_longer_fits_the_context_is_continued_too() -> None:
    passage = list(range(100, 140))
    draft = first_draft(NgramDrafter(), sequence(passage[:10], past=[*passage, 1, 2]))
    assert draft == passage[10:26]


def test_past_answers_are_continued_but_not_past_prompts() -> None:
    drafter = NgramDrafter(PastAnswers())
    answered(drafter, sequence(list(range(300, 340))), list(range(100, 140)))
    draft = first_draft(drafter, sequence([1, *range(100, 110)], 1))
    assert len(draft) >= 8
    assert draft == list(range(110, 110 + len(draft)))
    assert first_draft(drafter, sequence([1, *range(300, 310)], 2)) == []


def test_without_a_memory_nothing_is_remembered() -> None:
    drafter = NgramDrafter()
    answered(drafter, sequence([1]), list(range(100, 140)))
    assert first_draft(drafter, sequence([2, *range(100, 110)], 1)) == []


def test_what_one_namespace_wrote_is_proposed_to_no_other() -> None:
    drafter = NgramDrafter(PastAnswers())
    prompt, answer = list(range(300, 400)), list(range(100, 140))
    hers = sequence(list(prompt), cache_namespace="alice")
    drafter.begin(hers)
    settle(drafter)
    hers.tokens += answer
    drafter.propose(hers, CHEAP)  # all of it is counted
    drafter.end(hers)
    settle(drafter)
    for number, cache_namespace in enumerate(("bob", ""), 1):
        # neither from the memory, nor by going on with the very conversation
        assert first_draft(drafter, sequence([1, *answer[:10]], number, cache_namespace=cache_namespace)) == []
        again = sequence([*prompt, *answer, 7, *answer[:2]], number + 10, cache_namespace=cache_namespace)
        drafter.begin(again)
        assert drafter.propose(again, CHEAP) == []  # its own text is not counted yet
    assert first_draft(drafter, sequence([1, *answer[:10]], 20, cache_namespace="alice"))[:8] == answer[10:18]


def test_a_dear_row_needs_better_evidence() -> None:
    text = [5, 6, 7, 8, 1, 5, 6, 9, 2, 5]
    lengths = [len(first_draft(NgramDrafter(), sequence(list(text)), [cost] * 16)) for cost in (0.01, 0.1, 0.5, 2.0)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 0
    assert lengths[-1] == 0


@pytest.mark.parametrize("cost", [1.0, 1.5, 10.0])
def test_where_a_row_costs_a_step_nothing_is_drafted(cost: float) -> None:
    drafter = NgramDrafter(PastAnswers())
    for number, text in enumerate([[5] * 300, [5, 6] * 150, list(range(100)) * 3]):
        seq = sequence(text[:150], number)
        drafter.begin(seq)
        settle(drafter)
        for token in text[150:]:
            assert drafter.propose(seq, [cost] * 16) == []
            seq.tokens.append(token)
        drafter.end(seq)
        settle(drafter)


def test_a_staircase_is_climbed_to_the_end_of_a_step() -> None:
    passage = list(range(100, 140))
    text = [*passage, 1, *passage[:20]]
    stairs = [0.2, 0.9, -0.4, 0.9, 3.0, 3.0, 3.0]  # two rows more than one never pay, three are cheaper than two
    assert first_draft(NgramDrafter(), sequence(text), stairs) == passage[20:23]


def test_no_rows_no_draft() -> None:
    drafter = NgramDrafter()
    seq = sequence([1, 2, 1, 2, 1, 2])
    drafter.begin(seq)
    settle(drafter)
    assert drafter.propose(seq, []) == []


def test_drafts_that_are_never_accepted_stop() -> None:
    drafter = NgramDrafter()
    rng = random.Random(5)
    words = [rng.randrange(30) for _ in range(4_000)]  # repeats itself, but means nothing
    seq = sequence(words[:2_000])
    drafter.begin(seq)
    settle(drafter)
    drafted: list[int] = []
    for token in words[2_000:]:
        draft = drafter.propose(seq, [0.12] * 8)
        drafted.append(len(draft))
        seq.tokens.append(token)
        drafter.observe(seq, len(draft), int(draft[:1] == [token]))
    assert sum(drafted[-500:]) / 500 < 0.1


# -- the protocol --------------------------------------------------------------------------------------------------


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=80),
    st.lists(st.integers(0, 9), max_size=40),
    st.lists(st.integers(1, 6), max_size=30),
    st.lists(st.floats(0, 1), max_size=40),
    st.integers(0, 2**32),
)
def test_drafts_hold_known_tokens_within_the_limit_and_repeat(
    prompt: list[int], past: list[int], steps: list[int], costs: list[float], seed: int
) -> None:
    def run(settled: bool) -> list[list[int]]:
        rng = random.Random(seed)
        drafter = NgramDrafter(PastAnswers())
        answered(drafter, sequence([1, 2, 3]), [rng.randrange(10) for _ in range(30)])
        seq = sequence(list(prompt), 1, past=past)
        drafter.begin(seq)
        drafts = []
        for step in steps:
            if settled:
                settle(drafter)
            draft = drafter.propose(seq, costs)
            assert len(draft) <= min(len(costs), MAX_DRAFT)
            assert set(draft) <= set(range(10))
            accepted = min(step - 1, len(draft))
            seq.tokens += draft[:accepted]
            seq.tokens.append(rng.randrange(10))
            if draft and rng.random() < 0.9:  # the scheduler may drop a draft
                drafter.observe(seq, len(draft), accepted)
            drafts.append(draft)
        drafter.end(seq)
        return drafts

    assert run(settled=True) == run(settled=True)
    if len(prompt) + len(past) <= 40:  # so few are counted at once in any case
        assert run(settled=False)[:1] == run(settled=True)[:1]


def test_indexing_may_go_on_while_it_drafts() -> None:
    passage = list(range(1_000, 3_000))
    text = [*passage, 1, *passage[:20]]
    drafter, whole = NgramDrafter(), NgramDrafter()
    seq, other = sequence(list(text)), sequence(list(text))
    drafter.begin(seq)
    while drafter.work(0.0):  # one slice each
        drafter.propose(seq, CHEAP)
    assert drafter.propose(seq, CHEAP) == first_draft(whole, other)


def test_the_next_message_of_a_conversation_counts_only_what_is_new() -> None:
    drafter = NgramDrafter()
    passage = list(range(100, 140))
    seq = sequence([*passage, 1])
    answered(drafter, seq, [2, 3])
    again = sequence([*seq.tokens, 4, *passage[:10]], 1)
    drafter.begin(again)
    assert drafter.propose(again, CHEAP) == passage[10:26]  # without any work


def test_a_preempted_sequence_may_begin_again_and_one_that_never_began_may_end() -> None:
    drafter = NgramDrafter()
    seq = sequence([1, 2, 3, 1, 2])
    draft = first_draft(drafter, seq)
    drafter.begin(seq)
    assert drafter.propose(seq, CHEAP) == draft
    drafter.end(seq)
    drafter.end(sequence([1], 9))


def test_steps_without_a_question_are_caught_up_with() -> None:
    drafter = NgramDrafter()
    passage = list(range(100, 130))
    seq = sequence([1])
    drafter.begin(seq)
    seq.tokens += [*passage, 2, *passage[:8]]
    assert drafter.propose(seq, CHEAP)[:8] == passage[8:16]


def test_counted_text_is_bounded() -> None:
    drafter = NgramDrafter(max_tokens=1_000)
    rng = random.Random(1)
    for number in range(20):
        seq = sequence([rng.randrange(5_000) for _ in range(700)], number)
        drafter.begin(seq)
        settle(drafter)
        assert sum(each.counted - each.skipped for each in drafter._running.values()) <= 1_000
        if number % 3:
            drafter.end(seq)
    passage = list(range(6_000, 6_040))
    for seq_id in list(drafter._running):
        drafter._running.pop(seq_id)
    long = sequence([*range(5_000), *passage, 1, *passage[:10]], 99)
    assert first_draft(drafter, long) == passage[10:26]  # of a text that is too long, the end is counted


def test_a_conversation_that_goes_on_for_weeks_is_bounded_too() -> None:
    drafter = NgramDrafter(max_tokens=1_000)
    rng = random.Random(1)
    tokens: list[int] = []
    passage = list(range(6_000, 6_040))
    for number in range(60):
        seq = sequence([*tokens, *(rng.randrange(5_000) for _ in range(100)), *passage], number)
        answered(drafter, seq, [1, 2, 3])
        tokens = seq.tokens
        assert max(each.counted - each.skipped for each in drafter._idle) <= 1_000 + 3
        assert len(drafter._idle) == 1
    assert first_draft(drafter, sequence([*tokens, *passage[:10]], 99)) == passage[10:26]


def test_what_was_learnt_is_saved_now_and_then_and_at_the_end() -> None:
    saved: list[Acceptance] = []
    drafter = NgramDrafter(save=saved.append)
    for number in range(33):
        answered(drafter, sequence([1], number), [2])
    assert len(saved) == 1
    drafter.close()
    assert len(saved) == 2
    drafter.close()
    assert len(saved) == 2  # nothing new


# -- the cost rule -------------------------------------------------------------------------------------------------


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.floats(-5, 5), max_size=30))
def test_floors_are_the_least_average_from_each_row_on(costs: list[float]) -> None:
    naive = [
        min(sum(costs[first : last + 1]) / (last + 1 - first) for last in range(first, len(costs)))
        for first in range(len(costs))
    ]
    assert floors(costs) == pytest.approx(naive, abs=1e-9)


# -- recorded answers ----------------------------------------------------------------------------------------------

LEAST_SPEEDUPS = {  # at a cost of 0.12; of recorded answers: the best drafter before this one reaches less on them
    "edits": (5, 4.0),
    "records": (6, 3.0),
    "prose": (5, 1.2),
    "templated": (50, 1.85),
    "specbench": (60, 1.30),
    "longedit": (2, 1.15),
    "agentic": (12, 1.3),
}


class Words:
    """Numbers for the words of a text, in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> list[int]:
        return [self._numbers.setdefault(word, len(self._numbers)) for word in re.findall(r"\w+|\s+|[^\w\s]", text)]


def own_requests(kind: str) -> list[Request]:
    """Return the requests of a kind: "edits", "records" or "prose"."""
    words = Words()
    return [Request(kind, [*words(prompt), *words(answer)], len(words(prompt))) for prompt, answer in TEXTS[kind]()]


def edits() -> Iterator[tuple[str, str]]:
    for page in pages():
        yield f"Write llama in place of edgelm.\n{page}", page.replace("edgelm", "llama")


def records() -> Iterator[tuple[str, str]]:
    rng = random.Random(5)
    for city in CITIES:
        rows = [f'{{"id": {i}, "city": "{city}", "degrees": {rng.randrange(40)}}}' for i in range(RECORDS)]
        yield f"List the weather in {city} as JSON.", ",\n".join(rows)


def prose() -> Iterator[tuple[str, str]]:
    for page in pages():
        title, _, text = page.partition("\n")
        yield title, text


def pages() -> list[str]:
    return [(FOLDER / f"{page}.md").read_text(encoding="utf-8") for page in PAGES]


TEXTS = {"edits": edits, "records": records, "prose": prose}


def requests_of(name: str) -> list[Request]:
    path = SHARED / "traces" / f"{name}.npz"
    return read_requests(path) if path.is_file() else own_requests(name)


def is_here(name: str) -> bool:
    return name in ("edits", "records", "prose") or (SHARED / "traces" / f"{name}.npz").is_file()


@pytest.mark.parametrize("name", [name for name in LEAST_SPEEDUPS if is_here(name)])
def test_answers_that_repeat_come_faster(name: str) -> None:
    count, least = LEAST_SPEEDUPS[name]
    found = replay(requests_of(name)[:count], 0.12)
    assert found.whole.figures(0.12)["speedup"] >= least
    assert all(tally.figures(0.12)["speedup"] >= 0.97 for tally in found.tasks.values())


@pytest.mark.parametrize("name", [name for name in ("prose", "alpaca") if is_here(name)])
def test_prose_is_not_slowed_down_where_a_row_costs_a_third(name: str) -> None:
    found = replay(requests_of(name)[:60], 0.35)
    assert found.whole.figures(0.35)["speedup"] >= 1.0


def test_the_replay_counts_each_token_once() -> None:
    passage = list(range(100, 130))
    requests = [Request("copy", [*passage, 1, *passage], 31), Request("new", list(range(500, 600)), 50)]
    found: Replay = replay(requests, 0.1)
    assert {task: tally.tokens for task, tally in found.tasks.items()} == {"copy": 29, "new": 49}
    assert found.tasks["copy"].steps < 29
    assert found.tasks["new"].steps == 49
    assert found.tasks["new"].figures(0.1)["speedup"] == 1.0
    assert found.whole.tokens == 78


def test_a_draft_continues_behind_forced_tokens_and_learns_from_its_own_guesses_alone() -> None:
    passage = list(range(100, 140))
    drafter = NgramDrafter(acceptance=(acceptance := Acceptance()))
    seq = sequence([*passage, 1, 2, *passage[:10]])
    drafter.begin(seq)
    settle(drafter)
    seen: list[tuple[list[int], list[int]]] = []
    learn = acceptance.learn

    def spy(guesses: Seq[Guess], tokens: Seq[int]) -> list[float]:
        seen.append(([guess[0] for guess in guesses], list(tokens)))
        return learn(guesses, tokens)

    acceptance.learn = spy  # type: ignore[method-assign]
    draft = drafter.propose(seq, CHEAP, passage[10:13])
    assert draft[:4] == passage[13:17]
    seq.tokens += [*passage[10:15], 7]
    drafter.propose(seq, CHEAP)
    ((guessed, came),) = seen
    assert guessed[:2] == came[:2] == passage[13:15]
    assert came == [*passage[13:15], 7]
    seq.tokens += passage[10:12]
    drafter.propose(seq, CHEAP, passage[12:30])
    seen.clear()
    seq.tokens += passage[12:20]  # not yet all of the forced tokens
    assert drafter.propose(seq, CHEAP)[:3] == passage[20:23]
    assert seen == []
