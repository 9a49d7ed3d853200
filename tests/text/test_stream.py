"""Text shown during decoding: never half a character, never part of a stop string, never withdrawn."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgelm.base.errors import RequestError
from edgelm.text.stream import MAX_STOPS, IndentLimit, TextStream
from tests.counts import Count

EXAMPLES = Count(test=100, soak=4_000)
LETTERS = "abé日🦙"  # of 1, 1, 2, 3 and 4 bytes
texts = st.text(LETTERS, max_size=24) | st.text("ab", max_size=24)
stop_lists = st.lists(st.text(LETTERS, min_size=1, max_size=5) | st.text("ab", min_size=1, max_size=8), max_size=4)
plain_bytes = st.sampled_from([*LETTERS.encode(), 0xFF, 0xC0, 0xA0])
# Python keeps ED A0 (half a surrogate) for one byte longer than it must, so not every test has it.
any_bytes = st.lists(plain_bytes | st.just(0xED), max_size=24).map(bytes)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(at % (len(data) + 1) for at in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def ended(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Return the text that the user sees and the stop string, by trying every end: the definition."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def held_back(text: str, stops: list[str]) -> int:
    """Count the characters at the end of a text that may be the beginning of a stop string."""
    beginnings = [stop[:size] for stop in stops for size in range(1, len(stop))]
    return max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)


def complete_part(data: bytes) -> str:
    """Decode all but an incomplete character at the end."""
    for size in range(min(3, len(data)) + 1):
        body, tail = data[: len(data) - size], data[len(data) - size :]
        text = body.decode("utf-8", "replace")
        try:
            tail.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                return text
    return data.decode("utf-8", "replace")


def show(pieces: list[bytes], stops: list[str]) -> tuple[str, TextStream]:
    stream = TextStream(stops)
    return "".join(stream.push(piece) for piece in pieces) + stream.flush(), stream


@settings(max_examples=EXAMPLES)
@given(texts, stop_lists, st.lists(st.integers(0, 100), max_size=12))
@example("aaab", ["aab"], [1, 2, 3])
@example("aaaab", ["aaab", "aab"], [1, 2, 3])
@example("abaababaabac", ["abaabac"], [5])
@example("abéab日", ["ab日", "éa"], [3])
def test_the_text_ends_before_the_stop_that_is_complete_first(text: str, stops: list[str], cuts: list[int]) -> None:
    shown, stream = show(cut(text.encode(), cuts), stops)
    assert (shown, stream.matched) == ended(text, stops)
    assert stream.stopped == (stream.matched is not None)


@settings(max_examples=EXAMPLES)
@given(texts, stop_lists, st.lists(st.integers(0, 100), max_size=12))
def test_all_that_is_safe_is_shown_at_once_and_nothing_else(text: str, stops: list[str], cuts: list[int]) -> None:
    stream, data, shown = TextStream(stops), b"", ""
    for piece in cut(text.encode(), cuts):
        data += piece
        shown += stream.push(piece)
        so_far = data.decode("utf-8", "ignore")
        visible, matched = ended(so_far, stops)
        safe = len(visible) if matched else len(so_far) - held_back(so_far, stops)
        assert shown == visible[:safe]
        assert "\ufffd" not in shown


@settings(max_examples=EXAMPLES)
@given(
    any_bytes, st.lists(st.text(LETTERS + "\ufffd", min_size=1, max_size=3), max_size=3), st.lists(st.integers(0, 100))
)
@example(b"a\xe6\x97", [], [1, 2])
@example(b"\xf0\x9f\xa6", ["\ufffd"], [1])
def test_invalid_bytes_become_replacement_characters(data: bytes, stops: list[str], cuts: list[int]) -> None:
    shown, stream = show(cut(data, cuts), stops)
    assert (shown, stream.matched) == ended(data.decode("utf-8", "replace"), stops)


@settings(max_examples=EXAMPLES)
@given(st.lists(plain_bytes, max_size=24).map(bytes), st.lists(st.integers(0, 100), max_size=8))
def test_without_stops_only_an_incomplete_character_waits(data: bytes, cuts: list[int]) -> None:
    stream, past, shown = TextStream(), b"", ""
    for piece in cut(data, cuts):
        past += piece
        shown += stream.push(piece)
        assert shown == complete_part(past)
    assert shown + stream.flush() == data.decode("utf-8", "replace")


def test_a_character_of_four_bytes_comes_whole() -> None:
    stream = TextStream()
    assert [stream.push(bytes([byte])) for byte in "🦙".encode()] == ["", "", "", "🦙"]
    assert stream.flush() == ""


def test_a_text_cut_in_a_character_ends_with_a_replacement_character() -> None:
    stream = TextStream(["xyz"])
    assert stream.push(b"a\xf0\x9f") == "a"
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_a_stop_over_several_pieces_says_after_which_it_matched() -> None:
    stream = TextStream(["\n\nUser:", "</s>"])
    pieces = [b"Hi", b"\n", b"\nUs", b"er", b":", b" more", b"</s>"]
    seen = [(stream.push(piece), stream.stopped) for piece in pieces]
    assert seen == [("Hi", False), ("", False), ("", False), ("", False), ("", True), ("", True), ("", True)]
    assert stream.matched == "\n\nUser:"
    assert stream.flush() == ""


def test_what_no_longer_may_be_a_stop_is_shown() -> None:
    stream = TextStream(["abcd"])
    assert [stream.push(piece) for piece in (b"xab", b"c", b"ab", b"e", b"abc")] == ["x", "", "abc", "abe", ""]
    assert stream.flush() == "abc"
    assert not stream.stopped


def test_of_two_stops_with_one_end_the_longest_counts() -> None:
    for stops in (["b", "aab", "ab"], ["aab", "ab", "b"]):
        assert show([b"xa", b"ab", b"b"], stops)[0] == "x"


def test_a_stop_inside_of_another_does_not_wait_for_it() -> None:
    stream = TextStream(["abc", "b"])
    assert stream.push(b"xa") == "x"
    assert stream.push(b"b") == "a"
    assert stream.matched == "b"


@pytest.mark.parametrize("stops", [[""], ["a", ""], ["a"] * (MAX_STOPS + 1)])
def test_stops_that_make_no_sense_are_refused(stops: list[str]) -> None:
    with pytest.raises(RequestError):
        TextStream(stops)
    TextStream(["a"] * MAX_STOPS)


def test_what_is_kept_does_not_grow_with_the_text() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    stops = ["ab" * 40 + "c", "é日" * 20 + "x", "aaaa"]
    longest = max(map(len, stops))
    units = ["ab", "ab", "ab", "é日", "é日", "a", "🦙", "aaa b"]
    data = "".join(rng.choice(units) * rng.randrange(1, 50) for _ in range(14_000)).replace("aaaa", "aaab").encode()
    assert len(data) > 1_000_000
    stream, size, most, at = TextStream(stops), 0, 0, 0
    while at < len(data):
        piece = data[at : at + rng.randrange(1, 9)]
        at += len(piece)
        size += len(stream.push(piece).encode())
        state, _ = stream._decoder.getstate()
        most = max(most, len(stream._held))
        assert len(stream._held) < longest
        assert len(state) < 4
    assert not stream.stopped
    assert most > 40
    assert size + len(stream.flush().encode()) == len(data)


@pytest.mark.parametrize(
    ("least", "text", "shown"),
    [
        (0, "a\nb\n", "a\nb\n"),
        (4, "a\n    b\n    c", "a\n    b\n    c"),
        (4, "a\n    b\nc", "a\n    b\n"),
        (2, "first line is free\n  b\n c", "first line is free\n  b\n "),
        (2, "a\n\tb", "a\n\t"),
        (1, "a\n\n b", "a\n"),
    ],
)
@pytest.mark.parametrize("width", [1, 2, 100])
def test_a_text_ends_at_a_line_with_less_indentation(least: int, text: str, shown: str, width: int) -> None:
    limit = IndentLimit(least)
    pieces = [limit.take(text[at : at + width]) for at in range(0, len(text), width)]
    assert "".join(pieces) == shown
    assert limit.reached == (shown != text)
