"""What a terminal sends, before Textual reads it: answers to questions of other programs, and pastes.

Textual types an answer that it does not know into the prompt (`]11;rgb:1e1e/…`), and reads what follows an ESC in a
paste as keys: Enter among them would send a message. So a paste is held until its end, and has no ESC then.
"""

from __future__ import annotations

import re
from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Iterable
from functools import partial

from textual import events
from textual._time import get_time
from textual._xterm_parser import XTermParser
from textual.drivers import linux_driver
from textual.keys import Keys
from textual.message import Message

from edgelm.tui.control_codes import clean_text

PASTE, PASTED = "\x1b[200~", "\x1b[201~"
HOLD_S = 0.3  # so long an answer waits for its next part: a slow connection sends it in several
_ANSWER = re.compile(
    r"\x1b\]\d+;[^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[P_][^\x1b]*\x1b\\|\x1b\[(?:[?>][\d;]*c|\?[\d;]*S|[46];\d+;\d+t)"
)
_TOLD = ("\x1bP>|", "\x1b[")  # answers that the chat asks for: the terminal's name, what it draws and its sizes
# The beginning of one, or of a paste, at the end of a read; of two characters it may be a key, such as Alt+].
_BEGUN = re.compile(
    r"\x1b(?:\](?:\d+(?:;[^\x07\x1b]*)?)?|P(?:[>!+$\d][^\x1b]*)?|_(?:G[^\x1b]*)?"
    r"|\[(?:[?>][\d;]*|[46](?:;[\d;]*)?|20{0,2})?)\x1b?\Z"
)
# Enter and Ctrl+J or Ctrl+M as CSI u, or as xterm's modifyOtherKeys.
_NEWLINE = re.compile(r"\x1b\[(?:(?:1[03](?:;[\d:]+)?|10[69];5(?::\d)?)u|27;\d+;(?:1[03]|10[69])~)")
_PART = re.compile(r"\x1b(?:\[(?:20?)?|\[201)?\Z")  # of PASTED, at the end of a read
# A key as CSI u: its code, with Shift, that of the layout of the United States in its place; modifiers, text.
_KEY = re.compile(r"\x1b\[(\d+)(?::\d*(?::(\d+))?)?((?:;(\d*))?[\d:;]*u)")
_SHORTCUT_BITS = 0b111110  # of its modifiers: all but Shift, Caps Lock and Num Lock
_NOTHING = "[?9999;0$y"  # behind an ESC that Textual has: a report about a mode that nothing asked for


class TerminalAnswer(Message):
    """The terminal answered which one it is, what it draws, or how large its cells are."""

    def __init__(self, answer: str) -> None:
        super().__init__()
        self.answer = answer


class InputParser(XTermParser):
    """Textual's parser of what a terminal sends, without other programs' answers and with pastes in their order."""

    _is_pasting = False
    _held = ""  # the beginning of what may be the end of a paste
    _begun = ""  # the beginning of an answer
    _num_sure = 0  # characters of it that came in its first read; what follows may be keys
    _due = 0.0  # when it is given up
    _answers: tuple[str, ...] = ()  # to the chat's questions
    _has_escape = False  # Textual has an ESC that may be the first character of an answer, or has given it up

    def __init__(self, debug: bool = False) -> None:
        super().__init__(debug)
        self._pasted: list[str] = []  # of a paste that has not ended

    def feed(self, data: str) -> Iterable[Message]:
        if not data:  # the end of the input
            return super().feed(data)
        if self._begun and get_time() >= self._due:
            data = self._given_up() + data
        escape = "\x1b" if self._has_escape and self._timeout_time is not None and not self._begun else ""
        if self._has_escape and not escape and data.startswith(PASTE[1:]):  # Textual made a key of its first character
            data = f"\x1b{data}"
        repaired = self._repaired(escape + data)
        if escape:
            repaired = repaired[1:] if repaired.startswith("\x1b") else _NOTHING + repaired
        self._has_escape = repaired.endswith("\x1b") and not self._is_pasting
        return self._with_answers(super().feed(repaired) if repaired else ())

    def _with_answers(self, found: Iterable[Message]) -> Iterable[Message]:
        answers, self._answers = self._answers, ()
        yield from map(TerminalAnswer, answers)
        yield from found

    def _take(self, answer: re.Match[str]) -> str:
        if answer[0].startswith(_TOLD):
            self._answers += (answer[0],)
        return ""

    def _sequence_to_key_events(self, sequence: str, alt: bool = False) -> Iterable[events.Key]:
        """Name an Alt also before punctuation and Enter: it may be Esc and the next key in one read."""
        try:
            found = [*super()._sequence_to_key_events(_KEY.sub(_without_alternates, sequence), alt)]
        except (ValueError, OverflowError):  # Textual cannot read the numbers of the key
            found = [events.Key(Keys.Ignore, sequence)]
        for event in found:
            name = "enter" if sequence == "\x1b\r" else event.key
            if (alt or name != event.key) and not name.startswith("alt+"):
                event = events.Key(f"alt+{name}", event.character)
            yield event

    def tick(self) -> Iterable[Message]:
        """Give up an answer that does not end, besides what Textual does at regular intervals."""
        yield from super().tick()
        if self._begun and get_time() >= self._due and (keys := self._given_up()):
            yield from super().feed(keys)

    def _given_up(self) -> str:
        """Return what was typed behind the beginning of an answer that does not end; all where it is no answer's."""
        begun, self._begun = self._begun, ""
        return begun if begun.startswith("\x1b[") or self._num_sure == 2 else begun[self._num_sure :]

    def _repaired(self, data: str) -> str:
        data, before = self._held + self._begun + data, len(self._begun)
        self._held = self._begun = ""
        parts = []
        while data:
            was_pasting = self._is_pasting
            part, found, data = data.partition(PASTED if was_pasting else PASTE)
            self._is_pasting ^= bool(found)
            if was_pasting:
                parts.append(self._taken(part, ended=bool(found)))
                continue
            part = _ANSWER.sub(self._take, part)
            if not found and (begun := _BEGUN.search(part)):
                part, self._begun = part[: begun.start()], begun[0]
                self._num_sure = self._num_sure if before else len(begun[0])
                self._due = get_time() + HOLD_S
            parts.append(part)
        return "".join(parts)

    def _taken(self, part: str, *, ended: bool) -> str:
        """Return a paste once it has ended, as text without any control character; nothing before."""
        if not ended and (cut := _PART.search(part)):
            part, self._held = part[: cut.start()], cut[0]
        self._pasted.append(part)
        if not ended:
            return ""
        text, self._pasted = "".join(self._pasted), []
        return PASTE + clean_text(_NEWLINE.sub("\n", text)) + PASTED


def install() -> None:
    """Let Textual read the terminal with this parser, and replace what is not UTF-8: a mouse may send such bytes.

    In kitty's protocol, keys also tell what they are in the layout of the United States.
    """
    linux_driver.XTermParser = InputParser  # type: ignore[attr-defined]  # its reader has no other place for one
    linux_driver.getincrementaldecoder = _lenient_decoder  # type: ignore[assignment, attr-defined]
    linux_driver.KITTY_DISAMBIGUATE_ESCAPE_CODES |= linux_driver.KITTY_REPORT_ALTERNATE_KEYS  # type: ignore[misc]


def _without_alternates(key: re.Match[str]) -> str:
    """Return a key without its other codes. Where it is a shortcut in another script, it is the key at that place."""
    code, base, rest, modifiers = key.groups()
    if base and int(code) > 127 and (int(modifiers or 1) - 1) & _SHORTCUT_BITS:
        code = base
    return f"\x1b[{code}{rest}"


def _lenient_decoder(encoding: str) -> partial[IncrementalDecoder]:
    return partial(getincrementaldecoder(encoding), errors="replace")
