"""Which characters of a text were drafted: whatever the tokens cut through, and whatever is held back."""

from __future__ import annotations

import codecs
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from edgelm.completion import Delta, complete
from edgelm.core import Event, Sampled, SamplingParams, Stats
from tests.counts import Count

EXAMPLES = Count(test=200, soak=20_000)
STOP = 0
STATS = Stats(
    prompt_tokens=1, cached_tokens=0, completion_tokens=1, drafted=0, accepted=0,
    queue_ms=0, prompt_ms=0, first_token_ms=0, decode_ms=0,
)  # fmt: skip


class FakeTokenizer:
    """Token i + 1 is the i-th piece; 0 is the stop token."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def piece(self, token: int) -> bytes:
        return self.pieces[token - 1]


class FakeStream:
    def __init__(self, events: Sequence[Event]) -> None:
        self.events = list(events)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Event]:
        for event in self.events:
            yield event

    async def stop(self) -> Stats:
        return STATS

    async def aclose(self) -> None:
        pass


class FakeEngine:
    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.given: dict[str, Any] = {}

    def submit(self, tokens: list[int], params: SamplingParams, **given: Any) -> FakeStream:
        self.given = given
        return FakeStream(self.events)


async def deltas_of(pieces: Sequence[bytes], steps: Sequence[tuple[int, int]], stop: Sequence[str]) -> list[Delta]:
    """Complete with these tokens in steps of (how many, how many of them were drafted)."""
    events, at = [], 0
    for i, (count, accepted) in enumerate(steps):
        sampled = tuple(Sampled(1 + at + k) for k in range(count))
        at += count
        last = i == len(steps) - 1
        events.append(Event(0, sampled, "length" if last else None, None, STATS if last else None, accepted))
    engine: Any = FakeEngine(events)
    tokenizer: Any = FakeTokenizer(pieces)
    params = SamplingParams(stop_ids=frozenset({STOP}))
    return [delta async for delta in complete(engine, tokenizer, [1], params, stop)]


def expected(pieces: Sequence[bytes], drafted: Sequence[bool]) -> list[tuple[str, bool]]:
    """Return each character with whether the token that completed it was drafted."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    found = [(char, has) for piece, has in zip(pieces, drafted, strict=True) for char in decoder.decode(piece)]
    return found + [(char, False) for char in decoder.decode(b"", final=True)]


TEXTS = st.text(st.sampled_from("ab#é日🙂 "), min_size=1, max_size=40)


@settings(max_examples=EXAMPLES, deadline=None)
@given(TEXTS, st.randoms(use_true_random=False), st.sampled_from([(), ("##",), ("b#", "a"), ("日é",)]))
async def test_the_characters_that_were_drafted(text: str, chance: random.Random, stop: tuple[str, ...]) -> None:
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
    deltas = await deltas_of(pieces, steps, stop)
    shown = []
    for delta in deltas:
        inside = {at for begin, end in delta.drafted for at in range(begin, end)}
        assert all(0 <= begin < end <= len(delta.text) for begin, end in delta.drafted)
        assert list(delta.drafted) == sorted(delta.drafted)
        shown += [(char, at in inside) for at, char in enumerate(delta.text)]
    whole = expected(pieces, drafted)
    assert shown == whole[: len(shown)]
    if not any(each in text for each in stop):
        assert len(shown) == len(whole)


async def test_what_is_held_back_keeps_its_mark() -> None:
    deltas = await deltas_of([b"a", b"#", b"b", b"c"], [(1, 0), (2, 1), (1, 0)], ["##"])
    assert [(delta.text, delta.drafted) for delta in deltas] == [("a", ()), ("#b", ((0, 1),)), ("c", ())]
    deltas = await deltas_of([b"a", b"#", b"b"], [(2, 2), (1, 0)], ["##"])
    assert [(delta.text, delta.drafted) for delta in deltas] == [("a", ((0, 1),)), ("#b", ((0, 1),))]


async def test_a_stop_string_takes_its_mark_with_it() -> None:
    deltas = await deltas_of([b"a", b"#", b"#", b"z"], [(4, 4)], ["##"])
    assert [(delta.text, delta.drafted, delta.finish_reason) for delta in deltas] == [("a", ((0, 1),), "stop")]


async def test_past_and_owner_reach_the_engine() -> None:
    engine: Any = FakeEngine([Event(0, (Sampled(1),), "length", None, STATS)])
    tokenizer: Any = FakeTokenizer([b"a"])
    async for _ in complete(engine, tokenizer, [1], SamplingParams(), past=[7, 8], owner="me"):
        pass
    assert engine.given == {"past": [7, 8], "owner": "me"}
