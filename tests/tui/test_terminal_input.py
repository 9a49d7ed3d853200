"""The bytes of a terminal as keys and pastes."""

from __future__ import annotations

import pytest
from textual import events

from edgelm.tui.terminal_input import InputParser


def read(*reads: str) -> list[str]:
    """Return the keys and, in brackets, the pastes that the parser makes of some reads."""
    parser = InputParser()
    found = [event for data in reads for event in parser.feed(data)]
    assert all(isinstance(event, events.Key | events.Paste) for event in found)
    return [f"[{event.text}]" if isinstance(event, events.Paste) else event.key for event in found]


@pytest.mark.parametrize(
    "answer",
    [
        "\x1b]11;rgb:1e1e/1e1e/1e1e\x1b\\",
        "\x1b]10;rgb:ffff/ffff/ffff\x07",
        "\x1b]52;c;c2VjcmV0\x07",
        "\x1bP>|tmux 3.4\x1b\\",
        "\x1b[?62;22c",
        "\x1b[>41;354;0c",
        "\x1b_Gi=1;OK\x1b\\",
    ],
)
def test_answers_of_the_terminal_are_no_keys(answer: str) -> None:
    assert read(f"a{answer}b") == ["a", "b"]
    assert read("a", answer, answer, "b") == ["a", "b"]


def test_an_answer_in_two_reads() -> None:
    assert read("a\x1b]11;rgb:1e", "1e/1e\x1b\\b") == ["a", "b"]
    assert read("a\x1b]11;rgb:1e", "b", "c") == ["a", "b", "c"], "what never ends takes no keys"


def test_keys_that_begin_like_answers_stay() -> None:
    for keys in ("\x1b]", "\x1bP", "\x1b", "\x1b[A"):
        assert InputParser()._repaired(keys) == keys


@pytest.mark.parametrize("newline", ["\x1b[106;5u", "\x1b[13;2u", "\x1b[13u", "\x1b[27;5;106~", "\n"])
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_newlines_in_a_paste_stay_in_their_place(newline: str, step: int) -> None:
    data = f"one{newline}two{newline}{newline}three\x1b[201~y"
    reads = [data[i : i + step] for i in range(0, len(data), step)]
    assert read("x\x1b[200~", *reads) == ["x", "[one\ntwo\n\nthree]", "y"]
