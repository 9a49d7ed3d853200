"""The drafted characters of a text, wherever tokens split characters and whatever is held back."""

from __future__ import annotations

import codecs
import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from edgelm.jobs.request import AnswerDelta
from edgelm.text.parse import AnswerParser, Part
from tests.counts import Count

EXAMPLES = Count(test=200, soak=20_000)


def deltas_of(pieces: Sequence[bytes], steps: Sequence[tuple[int, int]], stop: Sequence[str]) -> list[AnswerDelta]:
    """Parse these pieces in steps of (how many, how many of them were drafted)."""
    parser = AnswerParser(None, None, stop=stop)
    deltas, at = [], 0
    for i, (count, accepted) in enumerate(steps):
        parts: list[Part] = []
        for k in range(count):
            parts += parser.push(None, pieces[at + k], drafted=k < accepted)
            if parser.stopped:
                return [*deltas, AnswerDelta(tuple(parts), stop=parser.stop)]
        at += count
        if i == len(steps) - 1:
            parts += parser.flush("length")
        deltas.append(AnswerDelta(tuple(parts)))
    return deltas


def expected(pieces: Sequence[bytes], drafted: Sequence[bool]) -> list[tuple[str, bool]]:
    """Return each character with whether the token that completed it was drafted."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    chars = [(char, has) for piece, has in zip(pieces, drafted, strict=True) for char in decoder.decode(piece)]
    return chars + [(char, False) for char in decoder.decode(b"", final=True)]


TEXTS = st.text(st.sampled_from("ab#é日🙂 "), min_size=1, max_size=40)


@settings(max_examples=EXAMPLES, deadline=None)
@given(TEXTS, st.randoms(use_true_random=False), st.sampled_from([(), ("##",), ("b#", "a"), ("日é",)]))
def test_the_characters_that_were_drafted(text: str, chance: random.Random, stop: tuple[str, ...]) -> None:
    data, pieces = text.encode(), []
    while data:
        size = chance.randint(1, 4)
        pieces.append(data[:size])
        data = data[size:]
    steps, drafted = [], []
    while len(drafted) < len(pieces):
        count = chance.randint(1, min(4, len(pieces) - len(drafted)))
        accepted = chance.randint(0, count)
        steps.append((count, accepted))
        drafted += [k < accepted for k in range(count)]
    deltas = deltas_of(pieces, steps, stop)
    shown = []
    for delta in deltas:
        inside = {at for begin, end in delta.drafted for at in range(begin, end)}
        assert all(0 <= begin < end <= len(delta.text) for begin, end in delta.drafted)
        assert list(delta.drafted) == sorted(delta.drafted)
        shown += [(char, at in inside) for at, char in enumerate(delta.text)]
    whole = expected(pieces, drafted)
    assert shown == whole[: len(shown)]
    if not any(string in text for string in stop):
        assert len(shown) == len(whole)


def test_what_is_held_back_keeps_its_mark() -> None:
    deltas = deltas_of([b"a", b"#", b"b", b"c"], [(1, 0), (2, 1), (1, 0)], ["##"])
    assert [(delta.text, delta.drafted) for delta in deltas] == [("a", []), ("#b", [(0, 1)]), ("c", [])]
    deltas = deltas_of([b"a", b"#", b"b"], [(2, 2), (1, 0)], ["##"])
    assert [(delta.text, delta.drafted) for delta in deltas] == [("a", [(0, 1)]), ("#b", [(0, 1)])]


def test_a_stop_string_takes_its_mark_with_it() -> None:
    deltas = deltas_of([b"a", b"#", b"#", b"z"], [(4, 4)], ["##"])
    assert [(delta.text, delta.drafted, delta.stop) for delta in deltas] == [("a", [(0, 1)], "##")]
