"""What a terminal sends, before Textual reads it: answers to questions of other programs, and newlines in pastes.

Textual types an answer that it does not know into the prompt (`]11;rgb:1e1e/…`), and reads a newline that a terminal
encodes as a key at once, while the rest of a paste comes at its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from textual._xterm_parser import XTermParser
from textual.drivers import linux_driver
from textual.message import Message

PASTE, PASTED = "\x1b[200~", "\x1b[201~"
# Alone, ESC ] and ESC P are Alt+] and Alt+P: only whole answers are taken, and an OSC that goes on in the next read.
_ANSWER = re.compile(r"\x1b\]\d+;[^\x07\x1b]*(?:\x07|\x1b\\|(?P<open>\Z))|\x1b[P_][^\x1b]*\x1b\\|\x1b\[[?>][\d;]*c")
_REST = re.compile(r"[^\x07\x1b]*(?:\x07|\x1b\\)")
# Enter and Ctrl+J or Ctrl+M as CSI u, or as xterm's modifyOtherKeys.
_NEWLINE = re.compile(r"\x1b\[(?:(?:1[03](?:;[\d:]+)?|10[69];5(?::\d)?)u|27;\d+;(?:1[03]|10[69])~)")
_PART = re.compile(r"\x1b(?:\[[\d;:]{0,12})?\Z")


class InputParser(XTermParser):
    """Textual's parser of what a terminal sends, without other programs' answers and with pastes in their order."""

    _is_open = False  # an answer goes on in the next read
    _is_pasting = False
    _held = ""  # the beginning of a sequence in a paste

    def feed(self, data: str) -> Iterable[Message]:
        if data and not (data := self._repaired(data)):
            return ()  # to feed nothing is the end of the input
        return super().feed(data)

    def _repaired(self, data: str) -> str:
        data, self._held = self._held + data, ""
        if self._is_open:
            self._is_open = False
            data = _REST.sub("", data, count=1) if _REST.match(data) else data
        parts = []
        while data:
            mark = PASTED if self._is_pasting else PASTE
            part, found, data = data.partition(mark)
            if not self._is_pasting:
                answers = list(_ANSWER.finditer(part))
                self._is_open = not found and bool(answers) and answers[-1]["open"] is not None
                part = _ANSWER.sub("", part)
            elif not found and (cut := _PART.search(part)):
                part, self._held = part[: cut.start()], cut[0]
            parts += [_NEWLINE.sub("\n", part) if self._is_pasting else part, found]
            self._is_pasting ^= bool(found)
        return "".join(parts)


def install() -> None:
    """Let Textual read the terminal with this parser."""
    linux_driver.XTermParser = InputParser  # type: ignore[attr-defined]  # its reader has no other place for one
