"""Tokens of a file in pieces, errors in it, and windows: llama.cpp's without a stride, each token once with one."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.base.errors import EdgeLMError
from edgelm.evaluation.text import CONTEXT_CHARS, PIECE_CHARS, Cut, TextTokens, Window, steps
from tests.counts import Count
from tests.real_data import vocabulary, with_vocabulary
from tests.tiny import write_tiny

TEXTS = Count(test=12, soak=400)
VOCABS = with_vocabulary(["llama-spm", "phi-3", "llama-bpe", "qwen2", "gpt-2"])
WORDS = (
    "the a Once upon time, there's 'quoted' (text) x = 3.14; def f(x): return 2**x 123456 été Straße привет мир 日本語 "
    "こんにちは。 😀 👩‍👩‍👧 <s> </s> <|endoftext|> !!! ... -- Ünïcödé \t\t tab naïve http://a.b/c?d=e#f"
).split(" ")
GAPS = (" ", " ", " ", " ", "\n", "\n\n", "\r\n", "  ", "   ", "\n  ", " \n", "\t", "\u3000", "\u00a0")


class Letters:
    """A tokenizer with a token for each character, which notes what it is asked."""

    def __init__(self) -> None:
        self.longest = 0

    def encode(self, text: str, *, special: bool, bos: bool) -> list[int]:
        assert not special
        assert not bos
        self.longest = max(self.longest, len(text))
        return [ord(char) for char in text]


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def random_text(rng: random.Random, length: int) -> str:
    return "".join(rng.choice(WORDS) + rng.choice(GAPS) for _ in range(length))


def read(path: Path, tokenizer: object, piece_chars: int = PIECE_CHARS) -> tuple[list[int], TextTokens]:
    text = TextTokens(path, tokenizer, piece_chars)
    return list(text), text


@pytest.mark.parametrize("name", ["tiny", *VOCABS])
def test_pieces_give_the_tokens_of_the_whole(name: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", vocab_only=True) if name == "tiny" else vocabulary(name)
    tokenizer = LlamaTokenizer.from_file(path)
    rng = random.Random(7)
    for _ in range(TEXTS):
        text = random_text(rng, 400)
        tokens, state = read(write(tmp_path / "a.txt", text), tokenizer, rng.choice((120, 300, 1000)))
        assert tokens == tokenizer.encode(text, special=False, bos=False)
        assert state.num_tokens == state.estimated_tokens == len(tokens)
        assert state.num_bytes == state.size_bytes


def test_a_text_without_spaces_is_read_too(tmp_path: Path) -> None:
    tokenizer = LlamaTokenizer.from_file(write_tiny(tmp_path / "tiny.gguf", vocab_only=True))
    text = "日本語é" * 900
    tokens, _ = read(write(tmp_path / "a.txt", text), tokenizer, 100)
    assert tokenizer.decode(tokens, strip_prefix_space=True) == text


@pytest.mark.parametrize("unit", ["one two three\n", "word ", "x", "€", "\n", " "])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, unit: str) -> None:
    path = write(tmp_path / "a.txt", unit * (600_000 // len(unit)))
    tokenizer = Letters()
    tokens, _ = read(path, tokenizer)
    assert "".join(map(chr, tokens)) == path.read_bytes().decode()
    assert tokenizer.longest <= PIECE_CHARS + CONTEXT_CHARS


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_the_length_is_judged_from_what_was_read(tmp_path: Path, share: float) -> None:
    path = write(tmp_path / "a.txt", "some words in a line\n" * 30_000)
    text = TextTokens(path, Letters())
    assert text.estimated_tokens == 0
    tokens = iter(text)
    for _ in range(int(share * 600_000)):
        next(tokens)
    assert text.estimated_tokens == pytest.approx(630_000, rel=0.01)


@pytest.mark.parametrize("at", [0, 5, 65_535, 65_536, 200_001])
@pytest.mark.parametrize("bad", [b"\xff", b"\xed\xa0\x80", b"\xe2\x82x"])
def test_what_is_not_utf_8_is_told_with_its_place(tmp_path: Path, at: int, bad: bytes) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"a" * at + bad + b"b" * 70_000)
    with pytest.raises(EdgeLMError, match=rf"bad.txt is not valid UTF-8 \(byte 0x{bad[0]:02x} at {at:,}\)"):
        read(path, Letters())


def test_half_a_character_at_the_end_is_told(tmp_path: Path) -> None:
    (tmp_path / "cut.txt").write_bytes(b"abc\xe2\x82")
    with pytest.raises(EdgeLMError, match="byte 0xe2 at 3"):
        read(tmp_path / "cut.txt", Letters())


def test_a_binary_file_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(1000))
    with pytest.raises(EdgeLMError, match="is not a text"):
        read(tmp_path / "a.bin", Letters())


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfabc")
    tokens, text = read(path, Letters())
    assert tokens == [97, 98, 99]
    assert text.estimated_tokens == 3


def test_a_file_that_changes_meanwhile_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "some words\n" * 20_000)
    tokens = iter(TextTokens(path, Letters()))
    next(tokens)
    with path.open("ab") as file:
        file.write(b"more")
        os.fsync(file.fileno())

    def rest(tokens: Iterable[int]) -> None:
        for _ in tokens:
            pass

    with pytest.raises(EdgeLMError, match="changed while it was read"):
        rest(tokens)


# -- windows -----------------------------------------------------------------------------------------------------------

BOS = [[], [-1]]
LENGTHS = st.integers(4, 40)


def scored(window: Window) -> list[int]:
    return window.tokens[window.first :]


@pytest.mark.parametrize("bos", BOS)
@given(LENGTHS, st.integers(0, 300))
def test_without_a_stride_it_is_what_llama_cpp_does(bos: list[int], length: int, num_tokens: int) -> None:
    text = list(range(num_tokens))
    stream = bos + text
    windows = list(Cut(length).windows(iter(text), bos))
    assert len(windows) == len(stream) // length
    for i, window in enumerate(windows):
        whole = stream[i * length : (i + 1) * length]
        assert window.tokens == bos + whole[len(bos) :]
        # perplexity.cpp scores rows n_ctx/2 .. n_ctx-2, each of which predicts the token behind it
        assert scored(window) == whole[length // 2 + 1 :]


@pytest.mark.parametrize("bos", BOS)
@given(LENGTHS, st.integers(1, 39), st.integers(0, 300))
def test_with_a_stride_each_token_is_scored_once(bos: list[int], length: int, stride: int, num_tokens: int) -> None:
    stride = min(stride, length - 1)
    text = list(range(num_tokens))
    windows = list(Cut(length, stride).windows(iter(text), bos))
    expected = text if bos else text[1:]  # nothing predicts a first token
    assert [token for window in windows for token in scored(window)] == expected
    for i, window in enumerate(windows):
        assert window.first >= 1
        start = i * stride
        assert window.tokens == bos + text[start : start + length - len(bos)]
        assert len(window.tokens) == length or window is windows[-1]


@pytest.mark.parametrize("bos", BOS)
@given(LENGTHS, st.none() | st.integers(1, 39), st.integers(0, 300))
def test_windows_are_counted_without_being_cut(
    bos: list[int], length: int, stride: int | None, num_tokens: int
) -> None:
    cut = Cut(length, stride and min(stride, length - 1))
    assert cut.count(num_tokens, bos) == len(list(cut.windows(iter(range(num_tokens)), bos)))


@given(LENGTHS, st.data(), st.integers(1, 50), st.integers(1, 50))
def test_steps_give_a_row_for_each_scored_token_within_the_bounds(
    length: int, data: st.DataObject, max_tokens: int, max_rows: int
) -> None:
    window = Window(list(range(length)), data.draw(st.integers(1, length - 1)))
    fed, predicted = [], []
    for start, end, rows in steps(window, max_tokens, max_rows):
        assert 0 < end - start <= max_tokens
        assert rows <= min(max_rows, end - start)
        fed += window.tokens[start:end]
        predicted += window.tokens[end - rows + 1 : end + 1]
    assert fed == window.tokens[:-1]
    assert predicted == scored(window)
    assert len(predicted) == length - window.first
