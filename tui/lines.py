"""Lines of text on the screen, and rows: runs of lines that are drawn when they come into view.

Owns wrapping, the column of text, how lines are joined when they are copied, and the rows that are not Markdown.
Knows nothing of Markdown and of positions on the screen.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size, split_graphemes
from rich.console import Console
from rich.style import Style
from rich.text import Text
from textual.strip import Strip

from edgelm.tui.control_codes import without_controls
from edgelm.tui.palette import Palette

# Rich requires a console to wrap and render text; its settings do not change the result.
CONSOLE = Console(force_terminal=True, color_system="truecolor", width=80, height=24, legacy_windows=False)
TEXT_WIDTH = 90  # cells of a block at most: longer lines are tiring to read
GUTTER = 2  # cells left of the text: the mark of the selected message
COLUMN = GUTTER + TEXT_WIDTH + 2
ACT = "act"  # the meta of a style: a click there acts on the message
NAME_CELLS = 16  # of a model's name at least, before figures are left out
LINK = "link"  # the meta of a style: an address, shown when the mouse is over it and copied by a click
HELD_SPACE = "\ufdd0"  # of a text that is wrapped: a space at which no line is broken
SEND_ALL = "(/whole sends all) "
HINT = "  Ctrl+T shows it"


@dataclass(slots=True)
class Line:
    """One line of the screen. `joint` is put between it and the line above when both are copied."""

    text: Text
    prefix: int = 0  # number of characters at its start that are decoration and are not copied
    joint: str = "\n"
    fill: Style | None = None  # background of the line
    fill_to: int = 0  # the cells that the background covers at least
    hidden: int = 0  # the cells by which its block is wider than its room: it is moved sideways, not wrapped
    sixels: str = ""  # a part of a picture, drawn over the text
    strip: Strip | None = None  # the last drawing, which is valid for `strip_key`
    strip_key: tuple[int, int, Style, str, int] | None = None


def margin(width: int) -> int:
    """Return the cells left of the column of text in a pane: it is centred where there is room."""
    return max(0, (width - COLUMN) // 2)


def text_width(width: int) -> int:
    """Return the width of lines of text where `width` cells are free."""
    return min(width, TEXT_WIDTH)


def clean(text: str) -> str:
    """Replace characters that move the terminal's cursor or write to its clipboard; tabs become spaces."""
    return without_controls(text.replace("\r\n", "\n").replace("\r", "\n").expandtabs(4))


def short_name(model: str) -> str:
    """Return the displayed name of a model: the last part of a path, else the name."""
    return model.rsplit("/", 1)[-1] if model.startswith("/") or model.endswith(".gguf") else model


def cut_name(name: str, width: int) -> str:
    """Return the words at the beginning of a model's name that have room, and an ellipsis where there are more."""
    if cell_len(name) <= width:
        return name
    begun = set_cell_size(name, max(width - 1, 0)).rstrip()
    words = begun if re.match(r"[-_.:/\s]", name[len(begun) :]) else re.sub(r"[-_.:/\s][^-_.:/\s]*$", "", begun)
    return f"{words.rstrip('-_.:/ ')}…"


def guess_height(text: str, width: int) -> int:
    """Return about how many lines a text takes, without wrapping it."""
    return sum(1 + max(len(line) - 1, 0) // max(width, 1) for line in text.split("\n"))


def wrap_words(text: Text, width: int) -> list[Line]:
    """Break a text at its newlines and between words; a word wider than the line is broken inside."""
    lines: list[Line] = []
    for paragraph in text.split("\n", allow_blank=True):
        plain, end = paragraph.plain, 0
        for i, piece in enumerate(paragraph.wrap(CONSOLE, max(width, 2), tab_size=4)):
            start = plain.find(piece.plain, end)
            joint = "\n" if i == 0 else plain[end:start]
            end = start + len(piece.plain)
            if HELD_SPACE in piece.plain:
                piece.plain = piece.plain.replace(HELD_SPACE, " ")
            lines.append(Line(piece, joint=joint))
    return lines


def cut_words(text: Text, width: int) -> Text:
    """Return the whole words at the beginning of a line that have room, and an ellipsis where there are more."""
    if width <= 1 or text.cell_len <= width:
        return text
    cut = text.copy()
    cut.truncate(width - 1, overflow="crop")
    begun = cut.plain
    words = (begun if text.plain[len(begun)].isspace() else re.sub(r"\s+\S*$", "", begun)).rstrip()
    kept = words if cell_len(words) > width // 2 else begun
    return cut[: len(kept)].append("…")


def wrap_cells(text: Text, width: int) -> list[Line]:
    """Break a line of code, which has no newline, exactly at the width."""
    width = max(width, 2)
    if len(text) <= width and cell_len(text.plain) <= width:
        return [Line(text)]
    cuts, used = [], 0
    for start, _, size in split_graphemes(text.plain)[0]:  # an emoji may be several characters
        if used + size > width:
            cuts.append(start)
            used = 0
        used += size
    return [Line(piece, joint="" if i else "\n") for i, piece in enumerate(text.divide(cuts))]


def indent(lines: list[Line], first: Text, others: Text) -> list[Line]:
    """Prepend decoration: one text to the first line, one to each of the others."""
    for i, line in enumerate(lines):
        decoration = first if i == 0 else others
        line.text = Text.assemble(decoration, line.text)
        line.prefix += len(decoration)
        if line.fill_to:
            line.fill_to += decoration.cell_len
    return lines


@dataclass(slots=True)
class Drawn:
    """The lines of a row at one width and palette; only their number once the lines were released."""

    width: int
    palette: Palette
    height: int
    lines: list[Line] | None


class Row(ABC):
    """A run of lines. It is drawn for one width and one palette, and kept while it is near the screen."""

    def __init__(self) -> None:
        self._drawn: Drawn | None = None

    @abstractmethod
    def draw(self, width: int, palette: Palette) -> list[Line]:
        """Return the lines."""

    @abstractmethod
    def guess(self, width: int) -> int:
        """Return about how many lines there will be."""

    def lines(self, width: int, palette: Palette) -> list[Line]:
        """Return the lines; draw them now if they are not kept."""
        drawn = self._drawn
        if drawn is None or drawn.lines is None or drawn.width != width or drawn.palette is not palette:
            lines = self.draw(width, palette)
            self._drawn = Drawn(width, palette, len(lines), lines)
            return lines
        return drawn.lines

    def release(self) -> None:
        """Drop the lines but keep their number."""
        if self._drawn is not None:
            self._drawn.lines = None

    def height(self, width: int, palette: Palette) -> tuple[int, bool]:
        """Return the number of lines, and whether it is exact (False: a guess)."""
        drawn = self._drawn
        if drawn is not None and drawn.width == width and drawn.palette is palette:
            return drawn.height, True
        return self.guess(width), False

    def forget(self) -> None:
        """Drop the lines and their number: the row looks different now."""
        self._drawn = None


class SpaceRow(Row):
    """An empty line."""

    def draw(self, width: int, palette: Palette) -> list[Line]:
        return [Line(Text())]

    def guess(self, width: int) -> int:
        return 1


class FootRow(Row):
    """The quiet line under a message: who wrote it, its figures, and which of several versions it is."""

    def __init__(self, parts: Sequence[str] = (), *, kept: int = 1, version: int = 1, num_versions: int = 1) -> None:
        """Make the line; where there is no room, its last parts are left out, and the first `kept` are cut."""
        super().__init__()
        self._parts = [clean(part) for part in parts if part]
        self._kept, self._version, self._num_versions = kept, version, num_versions

    def draw(self, width: int, palette: Palette) -> list[Line]:
        versions = Text(style=palette.muted)
        if self._num_versions > 1:
            versions.append("◂ ", Style(meta={ACT: "previous"}))
            versions.append(f"{self._version}/{self._num_versions}")
            versions.append(" ▸", Style(meta={ACT: "next"}))
            versions.append("  " if self._parts else "")
        parts, room = list(self._parts), max(text_width(width) - versions.cell_len, 1)
        if parts and cell_len(" · ".join(parts)) > room:
            parts[0] = cut_name(parts[0], max(room // 3, NAME_CELLS if self._kept == 1 else 0))
        while len(parts) > self._kept and cell_len(" · ".join(parts)) > room:
            parts.pop()
        words = Text(" · ".join(parts), palette.muted + Style(meta={ACT: "figures"}))
        words.truncate(room, overflow="ellipsis")
        text = Text.assemble(versions, words)
        return [Line(text, prefix=len(text))]

    def guess(self, width: int) -> int:
        return 1


class CutRow(Row):
    """The line above the first message that is sent to the model."""

    def __init__(self, num_left_out: int) -> None:
        super().__init__()
        messages = "message is" if num_left_out == 1 else "messages are"
        self._text = f" {num_left_out:,} earlier {messages} not sent to the model any more "

    def draw(self, width: int, palette: Palette) -> list[Line]:
        width = text_width(width)
        text = self._text if len(self._text) + len(SEND_ALL) > width - 4 else self._text + SEND_ALL
        lines = wrap_words(Text(text, palette.note), max(width - 2, 2))
        for line in lines:
            line.text.align("center", width, "─")
            line.prefix = len(line.text)  # it belongs to no message: none of it is copied
        return lines

    def guess(self, width: int) -> int:
        return 1 + len(self._text) // max(text_width(width), 1)


class FoldRow(Row):
    """A line about a text that is folded away: a click on it unfolds the text, and folds it again."""

    def __init__(self, words: str = "", *, unfolded: bool = False) -> None:
        super().__init__()
        self._words, self._unfolded = words, unfolded

    def show(self, words: str, *, unfolded: bool) -> None:
        """Replace the words."""
        if (words, unfolded) != (self._words, self._unfolded):
            self._words, self._unfolded = words, unfolded
            self.forget()

    def draw(self, width: int, palette: Palette) -> list[Line]:
        text = Text(f"{'▾' if self._unfolded else '▸'} {self._words}", palette.muted)
        width = text_width(width)
        if not self._unfolded and text.cell_len + len(HINT) <= width:
            text.append(HINT)
        text.truncate(max(width, 1), overflow="ellipsis")
        return [Line(text, prefix=len(text))]

    def guess(self, width: int) -> int:
        return 1


class FoldedRow(Row):
    """A whole message as one line: a click unfolds it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def draw(self, width: int, palette: Palette) -> list[Line]:
        lines = self._text.strip().split("\n")
        num_lines = guess_height(self._text.strip(), text_width(width))
        count = f"  {num_lines:,} lines" if num_lines > 1 else ""
        begin = next(
            (line for line in lines if line.strip() and not line.lstrip().startswith(("```", "~~~"))), lines[0]
        )
        first = Text(f"▸ {clean(re.sub('[*`#>]', '', begin)).strip()}", palette.text)
        first.truncate(max(text_width(width) - len(count), 2), overflow="ellipsis")
        text = Text.assemble(first, (count, palette.muted), style=Style(meta={ACT: "collapse"}))
        return [Line(text, prefix=len(text))]

    def guess(self, width: int) -> int:
        return 1


class PlainRow(Row):
    """Text without Markdown: a message of the user, or the model's reasoning."""

    def __init__(self, text: str, *, muted: bool = False) -> None:
        super().__init__()
        self._text = clean(text)
        self._muted = muted

    def draw(self, width: int, palette: Palette) -> list[Line]:
        width = text_width(width)
        if not self._muted:
            return wrap_words(Text(self._text, palette.text), width)
        bar = Text("┊ ", palette.muted)
        return indent(wrap_words(Text(self._text, palette.muted), width - 2), bar, bar)

    def guess(self, width: int) -> int:
        return guess_height(self._text, text_width(width))


class NoteRow(Row):
    """A note of edgelm under a message: an error, or how the message ended."""

    def __init__(self, text: str, *, error: bool = False) -> None:
        super().__init__()
        self._text, self._error = clean(text), error

    def draw(self, width: int, palette: Palette) -> list[Line]:
        style = palette.error if self._error else palette.muted
        mark = Text("✗ " if self._error else "· ", style)
        return indent(wrap_words(Text(self._text, style), text_width(width) - 2), mark, Text("  "))

    def guess(self, width: int) -> int:
        return 1 + len(self._text) // max(text_width(width), 1)
