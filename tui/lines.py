"""Lines of text as they stand on the screen, and how a text is broken into them.

Owns wrapping, and what a line says about copying: which of its characters are decoration and how it joins the one
above it. Knows nothing of Markdown and widgets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.cells import cell_len, get_character_cell_size
from rich.console import Console
from rich.style import Style
from rich.text import Text
from textual.strip import Strip

# Rich asks for one; it decides nothing here.
CONSOLE = Console(force_terminal=True, color_system="truecolor", width=80, height=24, legacy_windows=False)

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(slots=True)
class Line:
    """One line of the screen. `joint` stands between it and the line above when both are copied."""

    text: Text
    prefix: int = 0  # so many characters at its start are decoration and are not copied
    joint: str = "\n"
    fill: Style | None = None  # what is behind the rest of the line
    strip: Strip | None = None  # as it was drawn last, and for what
    strip_key: tuple[int, int, Style] | None = None

    @property
    def copied(self) -> str:
        return self.text.plain[self.prefix :]


def clean(text: str) -> str:
    """Replace what would move the terminal's cursor or write to its clipboard; tabs become spaces."""
    return _CONTROL.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n").expandtabs(4))


def short_name(model: str) -> str:
    """Return the name of a model as it is shown: of a path the last part."""
    return model.rsplit("/", 1)[-1] if model.startswith("/") or model.endswith(".gguf") else model


def wrap_words(text: Text, width: int) -> list[Line]:
    """Break a text at its newlines and between words; a word that is too long is broken where it must be."""
    lines: list[Line] = []
    for hard in text.split("\n", allow_blank=True):
        plain, at = hard.plain, 0
        for i, piece in enumerate(hard.wrap(CONSOLE, max(width, 2), tab_size=4)):
            found = plain.find(piece.plain, at)
            joint = "\n" if i == 0 else plain[at:found]
            at = found + len(piece.plain)
            lines.append(Line(piece, joint=joint))
    return lines


def wrap_cells(text: Text, width: int) -> list[Line]:
    """Break a line of code, which has no newline, exactly at the width."""
    width = max(width, 2)
    if len(text) <= width and cell_len(text.plain) <= width:
        return [Line(text)]
    cuts, used = [], 0
    for i, character in enumerate(text.plain):
        size = get_character_cell_size(character)
        if used + size > width:
            cuts.append(i)
            used = 0
        used += size
    return [Line(piece, joint="" if i else "\n") for i, piece in enumerate(text.divide(cuts))]


def indent(lines: list[Line], first: Text, others: Text) -> list[Line]:
    """Put decoration before lines: one text before the first, one before the others."""
    for i, line in enumerate(lines):
        before = first if i == 0 else others
        line.text = Text.assemble(before, line.text)
        line.prefix += len(before)
    return lines
