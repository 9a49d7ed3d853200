"""NgramCounts against a plain count of every context, and whatever way the text is added."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from edgelm.engine.ngrams import (
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


def said(text: list[int], counts: NgramCounts) -> Evidence | None:
    spoken, remembered = look_up(text, counts, NOTHING)
    assert remembered is None
    assert look_up(text, NOTHING, counts) == (None, spoken)  # both sources are read alike
    return spoken


def followers(text: list[int], context: list[int]) -> Counter[int]:
    """Return what followed a context, by trying each place."""
    ends = range(len(context), len(text))
    return Counter(text[end] for end in ends if text[end - len(context) : end] == context)


@settings(max_examples=EXAMPLES, deadline=None)
@given(texts | wide_texts, texts)
def test_the_longest_known_context_speaks_and_only_of_what_followed_it(text: list[int], tail: list[int]) -> None:
    evidence = said(tail, counted(text))
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
    if len(seen) <= 2:  # two places hold all there is: the count is exact
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
        assert said(tail[:end], sliced) == said(tail[:end], counted(text))
    assert sliced.num_bytes == counted(text).num_bytes


def test_of_equally_frequent_tokens_the_most_recent_is_proposed() -> None:
    evidence = said([1], counted([1, 7, 1, 8]))
    assert evidence is not None
    assert evidence[0] == 8
    for answers, token in (([7, 7, 8], 7), ([7, 7, 8, 8], 8), ([7, 8, 9], 9), ([7, 7, 8, 8, 7], 7)):
        evidence = said([1], counted([each for answer in answers for each in (1, answer)]))
        assert evidence is not None
        assert evidence[0] == token


def test_a_context_seen_often_is_other_evidence_than_one_seen_once() -> None:
    once, often = said([1], counted([1, 7])), said([1], counted([1, 7] * 9))
    assert once == (7, 0, kind_of(0, 0, False))
    assert often == (7, 0, kind_of(0, 4, False))


def test_a_longer_context_is_backed_where_the_shorter_one_mostly_says_the_same() -> None:
    backed = said([1, 2], counted([1, 2, 3, 9, 2, 3, 8, 2, 4]))  # after 2: 3, 3, 4
    alone = said([1, 2], counted([1, 2, 3, 9, 2, 4, 8, 2, 4]))  # after 2: 3, 4, 4
    assert backed == (3, 1, kind_of(1, 0, True))
    assert alone == (3, 1, kind_of(1, 0, False))


def test_kinds_are_all_different() -> None:
    kinds = {
        kind_of(level, state, backed)
        for level in range(len(ORDERS))
        for state in range(NUM_STATES)
        for backed in (False, True)
    }
    assert kinds == set(range(NUM_KINDS))
