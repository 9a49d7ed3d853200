"""The bytes of a terminal as keys and pastes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
from textual import events
from textual._compositor import LayoutUpdate
from textual._xterm_parser import XTermParser
from textual.drivers import linux_driver
from textual.drivers.linux_driver import LinuxDriver

from edgelm.tui.terminal_input import PASTE, PASTED, InputParser, TerminalAnswer
from tests.tui.conftest import Open


def keys(found: Iterable[object]) -> list[str]:
    """Return the names of keys."""
    return [event.key for event in found if isinstance(event, events.Key)]


def read(*reads: str) -> list[str]:
    """Return the keys and, in brackets, the pastes that the parser makes of some reads."""
    parser = InputParser()
    found = [event for data in reads for event in parser.feed(data) if not isinstance(event, TerminalAnswer)]
    assert all(isinstance(event, events.Key | events.Paste) for event in found)
    return [f"[{event.text}]" if isinstance(event, events.Paste) else event.key for event in found]


ANSWERS = (
    "\x1b]11;rgb:1e1e/1e1e/1e1e\x1b\\",
    "\x1b]10;rgb:ffff/ffff/ffff\x07",
    "\x1b]52;c;c2VjcmV0\x07",
    "\x1bP>|tmux 3.4\x1b\\",
    "\x1b[?62;22c",
    "\x1b[>41;354;0c",
    "\x1b_Gi=1;OK\x1b\\",
    "\x1b[6;20;10t",
    "\x1b[4;704;843t",
    "\x1b[?1;0;256S",
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let time stand still until a test moves it."""
    now = [100.0]
    for module in ("edgelm.tui.terminal_input", "textual._parser"):
        monkeypatch.setattr(f"{module}.get_time", lambda: now[0])
    return now


@pytest.mark.parametrize("answer", ANSWERS)
def test_answers_of_the_terminal_are_no_keys(answer: str) -> None:
    assert read(f"a{answer}b") == ["a", "b"]
    assert read("a", answer, answer, "b") == ["a", "b"]


def test_the_name_of_the_terminal_is_told(clock: list[float]) -> None:
    parser = InputParser()
    found = [event for data in ("a\x1bP>|kit", "ty(0.35.2)\x1b\\b") for event in parser.feed(data)]
    assert [event.answer for event in found if isinstance(event, TerminalAnswer)] == ["\x1bP>|kitty(0.35.2)\x1b\\"]
    assert keys(found) == ["a", "b"]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("step", [1, 2, 3, 5, 7])
def test_an_answer_in_several_reads(answer: str, step: int, clock: list[float]) -> None:
    assert read("a", *(answer[i : i + step] for i in range(0, len(answer), step)), "b") == ["a", "b"]


def test_a_long_answer_in_many_reads(clock: list[float]) -> None:
    assert read("\x1b]52;c;", *["QUJD" * 1000] * 20, "\x07b") == ["b"]


def test_an_answer_that_never_ends_takes_no_keys(clock: list[float]) -> None:
    parser = InputParser()
    assert keys(parser.feed("a\x1b]11;rgb:1e")) == ["a"]
    assert keys(parser.feed("b")) == keys(parser.feed("c")) == keys(parser.tick()) == []
    clock[0] += 1
    assert keys(parser.tick()) == ["b", "c"]
    assert keys(parser.feed("d\x1b]11;rgb:1e")) == ["d"]
    clock[0] += 1
    assert keys(parser.feed("e")) == ["e"]


def test_a_report_in_two_reads_comes_through(clock: list[float]) -> None:
    parser = InputParser()
    events_ = [event for data in ("\x1b[?20", "26;2$y") for event in parser.feed(data)]
    assert [type(event).__name__ for event in events_] == ["TerminalSupportsSynchronizedOutput"]


@pytest.mark.parametrize("typed", ["\x1b]", "\x1bP", "\x1b", "\x1b[A", "\x1b_", "\x1b[", "\x1bx"])
def test_keys_that_begin_like_answers_stay(typed: str, clock: list[float]) -> None:
    found: list[list[str]] = []
    for parser in (InputParser(), XTermParser()):
        events_ = [*parser.feed(typed)]
        for _ in range(2):  # Textual itself waits for the rest of a sequence
            clock[0] += 1
            events_ += parser.tick()
        found.append([key.removeprefix("alt+") for key in keys(events_)])  # we name more of them
    assert found[0] == found[1]


@pytest.mark.parametrize("newline", ["\x1b[106;5u", "\x1b[13;2u", "\x1b[13u", "\x1b[27;5;106~", "\n"])
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_newlines_in_a_paste_stay_in_their_place(newline: str, step: int) -> None:
    data = f"one{newline}two{newline}{newline}three\x1b[201~y"
    reads = [data[i : i + step] for i in range(0, len(data), step)]
    assert read("x\x1b[200~", *reads) == ["x", "[one\ntwo\n\nthree]", "y"]


PASTES = (
    ("\x1b[31merror\x1b[0m\r!touch x\rand the rest of a log", "error\n!touch x\nand the rest of a log"),
    ("\x1b]8;;http://x/\x1b\\link\x1b]8;;\x1b\\ \x1b]0;title\x07\x1b(Bend", "link end"),
    ("\x1b]52;c;QUJD\r!touch x\r", "�]52;c;QUJD\n!touch x\n"),
    ("a\x1bb\x1b", "a�b�"),
    ("a\x1b\x1b[A\rb", "a�\nb"),
    ("\x1bOA\x1b[M###\x1b", "�OA###�"),
    ("a\x1b[201\rb\x1b[2", "a�[201\nb�[2"),
    ("a\x1b[200~b\x9b201~\r\x8fA\x08\x7f\x03", "ab�201~\n�A���"),
    ("mÄ\x9bsto â\x80\x9dnoâ\x80\x9d", "mÄ�sto â��noâ��"),  # UTF-8 read as Latin-1
    ("tab\there\r\nline\x0c\x85", "tab\there\nline��"),
)


@pytest.mark.parametrize(("pasted", "text"), PASTES)
@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_nothing_in_a_paste_is_a_key(pasted: str, text: str, step: int, clock: list[float]) -> None:
    data = f"x\x1b[200~{pasted}\x1b[201~y"
    assert read(*(data[i : i + step] for i in range(0, len(data), step))) == ["x", f"[{text}]", "y"]


@pytest.mark.parametrize("cut", range(1, len(PASTE)))
def test_a_paste_begins_in_two_reads(cut: int, clock: list[float]) -> None:
    parser = InputParser()
    found = [*parser.feed(PASTE[:cut])]
    clock[0] += 0.2  # Textual reads an ESC as the key
    found += [*parser.tick(), *parser.feed(f"{PASTE[cut:]}a\rb{PASTED}")]
    assert [event.text for event in found if isinstance(event, events.Paste)] == ["a\nb"]
    assert set(keys(found)) <= {"escape"}


@pytest.mark.parametrize(
    ("sequence", "key", "character"),
    [
        ("\x1b[1089::99;5u", "ctrl+c", None),  # Russian
        ("\x1b[1089:1057:99;6u", "ctrl+shift+c", None),
        ("\x1b[1084::118;69u", "ctrl+v", None),  # with Caps Lock
        ("\x1b[959::111;5u", "ctrl+o", None),  # Greek
        ("\x1b[1079::112;3u", "alt+p", None),
        ("\x1b[1092::97;;1092u", "ф", "ф"),
        ("\x1b[1092:1060:97;2;1060u", "Ф", "Ф"),
        ("\x1b[97:65;2;65u", "A", "A"),
        ("\x1b[97::113;5u", "ctrl+a", None),  # French: it is the user's own layout
        ("\x1b[99;5u", "ctrl+c", None),
        ("\x1b[13;2u", "shift+enter", None),
        ("\x1b[57414;129u", "enter", None),
    ],
)
def test_keys_of_other_keyboard_layouts(sequence: str, key: str, character: str | None) -> None:
    assert [(event.key, event.character) for event in InputParser().feed(sequence)] == [(key, character)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("sequence", ["\x1b[97;5:1u", "\x1b[1;5:3A", "\x1b[99999999999;5u"])
def test_keys_that_cannot_be_read_are_none(sequence: str) -> None:
    assert read(f"a{sequence}b") == ["a", "b"]


def test_the_terminal_is_asked_for_the_layout() -> None:
    assert linux_driver.KITTY_DISAMBIGUATE_ESCAPE_CODES == 0b101


def test_bytes_that_are_not_utf_8_do_not_end_the_chat() -> None:
    """Such a byte may be part of a report of the mouse in its oldest form; that types nothing."""
    found: list[object] = []
    reader, writer = os.pipe()
    os.write(writer, b"a\xff\x1b[M\x43\x84(b\x1b[M\x20\xf0\xf0c\xe2\x82z")
    os.close(writer)
    ended = SimpleNamespace(is_set=iter((False, True)).__next__)  # after one read
    driver = SimpleNamespace(fileno=reader, exit_event=ended, _debug=False, process_message=found.append)
    LinuxDriver.run_input_thread(driver)  # type: ignore[arg-type]  # what it uses of a driver
    os.close(reader)
    typed = [event.character for event in found if isinstance(event, events.Key)]
    assert typed == ["a", "\ufffd", "b", "c", "\ufffd", "z"]


async def test_all_is_drawn_again_after_fg(open_chat: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_chat() as chat:
        await chat.ask("q")
        drawn: list[object] = []
        monkeypatch.setattr(chat.app, "_display", lambda screen, update: drawn.append(update))
        chat.app.post_message(LinuxDriver.SignalResume())  # what the driver sends when the process goes on
        await chat.until(lambda: any(isinstance(update, LayoutUpdate) for update in drawn), "the whole screen")
