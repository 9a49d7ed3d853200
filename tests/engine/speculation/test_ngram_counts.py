"""NgramCounts equal a naive count of every context, in whatever slices the text is added."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from edgelm.engine.speculation.ngram_counts import (
    NOTHING,
    NUM_KINDS,
    NUM_STATES,
    ORDERS,
    SEVERAL,
    Evidence,
    NgramCounts,
    kind_of,
    look_up,
)
from tests.counts import Count

EXAMPLES = Count(test=150, soak=5_000)
texts = st.lists(st.integers(0, 5), max_size=60)
wide_texts = st.lists(st.sampled_from([0, 1, 2, 128_255, 2**31 - 1]), max_size=60)


def counted(text: list[int]) -> NgramCounts:
    counts = NgramCounts()
    counts.add(text, 0, len(text))
    return counts


def evidence_of(text: list[int], counts: NgramCounts) -> Evidence | None:
    current, past = look_up(text, counts, NOTHING)
    assert past is None
    assert look_up(text, NOTHING, counts) == (None, current)  # both sources work alike
    return current


def followers(text: list[int], context: list[int]) -> Counter[int]:
    """Return the tokens that followed a context, by a search of the whole text."""
    ends = range(len(context), len(text))
    return Counter(text[end] for end in ends if text[end - len(context) : end] == context)


@settings(max_examples=EXAMPLES, deadline=None)
@given(texts | wide_texts, texts)
def test_the_longest_counted_context_gives_a_token_that_followed_it(text: list[int], tail: list[int]) -> None:
    evidence = evidence_of(tail, counted(text))
    known = [order for order in ORDERS if len(tail) >= order and followers(text, tail[-order:])]
    if evidence is None:
        assert not known
        return
    token, level, kind = evidence
    assert ORDERS[level] == max(known)
    seen = followers(text, tail[-ORDERS[level] :])
    assert token in seen
    assert 0 <= kind < NUM_KINDS
    state = kind // 2 % NUM_STATES
    assert (state >= SEVERAL) == (len(seen) > 1)
    if len(seen) <= 2:  # a cell has two places, so the count is exact
        assert seen[token] == max(seen.values())


@settings(max_examples=EXAMPLES, deadline=None)
@given(texts, st.lists(st.integers(1, 9)), texts)
def test_slices_count_the_same_as_the_whole(text: list[int], slices: list[int], tail: list[int]) -> None:
    sliced = NgramCounts()
    done = 0
    for length in [*slices, len(text)]:
        stop = min(done + length, len(text))
        sliced.add(text, done, stop)
        done = stop
    for end in range(len(tail) + 1):
        assert evidence_of(tail[:end], sliced) == evidence_of(tail[:end], counted(text))
    assert sliced.num_bytes == counted(text).num_bytes


def test_of_equally_frequent_tokens_the_most_recent_is_proposed() -> None:
    evidence = evidence_of([1], counted([1, 7, 1, 8]))
    assert evidence is not None
    assert evidence[0] == 8
    for answers, token in (([7, 7, 8], 7), ([7, 7, 8, 8], 8), ([7, 8, 9], 9), ([7, 7, 8, 8, 7], 7)):
        evidence = evidence_of([1], counted([token for answer in answers for token in (1, answer)]))
        assert evidence is not None
        assert evidence[0] == token


def test_often_and_once_are_different_evidence() -> None:
    once, often = evidence_of([1], counted([1, 7])), evidence_of([1], counted([1, 7] * 9))
    assert once == (7, 0, kind_of(0, 0, False))
    assert often == (7, 0, kind_of(0, 4, False))


def test_a_shorter_context_may_agree() -> None:
    agreeing = evidence_of([1, 2], counted([1, 2, 3, 9, 2, 3, 8, 2, 4]))  # after 2: 3, 3, 4
    alone = evidence_of([1, 2], counted([1, 2, 3, 9, 2, 4, 8, 2, 4]))  # after 2: 3, 4, 4
    assert agreeing == (3, 1, kind_of(1, 0, True))
    assert alone == (3, 1, kind_of(1, 0, False))


def test_kinds_are_all_different() -> None:
    kinds = {
        kind_of(level, state, agreeing)
        for level in range(len(ORDERS))
        for state in range(NUM_STATES)
        for agreeing in (False, True)
    }
    assert kinds == set(range(NUM_KINDS))
