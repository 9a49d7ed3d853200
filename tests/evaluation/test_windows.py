"""What is seen and what is scored: as llama.cpp's tool has it without a stride, and each token once with one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgelm.evaluation.windows import Cut, Window, steps

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
    assert len(predicted) == window.num_scored
