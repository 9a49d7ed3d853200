"""The rows of the transcript: runs of lines that are drawn when they come into view and then kept.

Owns the rows that are not Markdown. Knows nothing of where on the screen they stand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from rich.text import Text

from edgelm.tui.lines import Line, clean, indent, wrap_words
from edgelm.tui.palette import Palette

SEND_ALL = "(/whole sends all) "


@dataclass(slots=True)
class Drawn:
    """Lines and their number, and what they were drawn for; only the number once the lines have been let go."""

    width: int
    palette: Palette
    height: int
    lines: list[Line] | None


class Row(ABC):
    """Something with lines. They are made for one width and one palette, and kept while they are near the screen."""

    def __init__(self) -> None:
        self._drawn: Drawn | None = None

    @abstractmethod
    def draw(self, width: int, palette: Palette) -> list[Line]:
        """Return the lines."""

    @abstractmethod
    def guess(self, width: int) -> int:
        """Return about how many lines there will be."""

    def lines(self, width: int, palette: Palette) -> list[Line]:
        """Return the lines, drawn now if need be."""
        drawn = self._drawn
        if drawn is None or drawn.lines is None or drawn.width != width or drawn.palette is not palette:
            lines = self.draw(width, palette)
            self._drawn = Drawn(width, palette, len(lines), lines)
            return lines
        return drawn.lines

    def release(self) -> None:
        """Let the lines go, but remember how many there are."""
        if self._drawn is not None:
            self._drawn.lines = None

    def height(self, width: int, palette: Palette) -> tuple[int, bool]:
        """Return how many lines there are, and whether that is known and not a guess."""
        drawn = self._drawn
        if drawn is not None and drawn.width == width and drawn.palette is palette:
            return drawn.height, True
        return self.guess(width), False

    def forget(self) -> None:
        self._drawn = None


class SpaceRow(Row):
    """An empty line."""

    def draw(self, width: int, palette: Palette) -> list[Line]:
        return [Line(Text())]

    def guess(self, width: int) -> int:
        return 1


class HeadRow(Row):
    """Who speaks, and which of several versions this is."""

    def __init__(self, who: str, *, user: bool, version: int = 1, versions: int = 1) -> None:
        super().__init__()
        self._who, self._user = clean(who), user
        self._version, self._versions = version, versions
        self._selected = False

    def select(self, selected: bool) -> None:
        if selected != self._selected:
            self._selected = selected
            self.forget()

    def draw(self, width: int, palette: Palette) -> list[Line]:
        style = palette.user if self._user else palette.assistant
        text = Text(f" {self._who} " if self._selected else self._who, palette.selected if self._selected else style)
        if self._versions > 1:
            text.append(f"  ◂ {self._version}/{self._versions} ▸", None if self._selected else palette.muted)
        text.truncate(max(width, 1), overflow="ellipsis")
        return [Line(text, prefix=len(text))]

    def guess(self, width: int) -> int:
        return 1


class CutRow(Row):
    """Stands above the first message that is sent to the model."""

    def __init__(self, left_out: int) -> None:
        super().__init__()
        messages = "message is" if left_out == 1 else "messages are"
        self._text = f" {left_out:,} earlier {messages} not sent to the model any more "

    def draw(self, width: int, palette: Palette) -> list[Line]:
        text = self._text if len(self._text) + len(SEND_ALL) > width - 4 else self._text + SEND_ALL
        lines = wrap_words(Text(text, palette.note), max(width - 2, 2))
        for line in lines:
            line.text.align("center", width, "─")
            line.prefix = len(line.text)  # none of it was said: it is not copied
        return lines

    def guess(self, width: int) -> int:
        return 1 + len(self._text) // max(width, 1)


class PlainRow(Row):
    """Text as it is: what the user wrote, or the model's reasoning."""

    def __init__(self, text: str, *, muted: bool = False) -> None:
        super().__init__()
        self._text = clean(text)
        self._muted = muted

    def draw(self, width: int, palette: Palette) -> list[Line]:
        if not self._muted:
            return wrap_words(Text(self._text, palette.user_text), width)
        bar = Text("┊ ", palette.muted)
        return indent(wrap_words(Text(self._text, palette.muted), width - 2), bar, bar)

    def guess(self, width: int) -> int:
        return sum(1 + len(line) // max(width, 1) for line in self._text.split("\n"))


class NoteRow(Row):
    """A line of ours under a message: an error, or how it ended."""

    def __init__(self, text: str, *, error: bool = False) -> None:
        super().__init__()
        self._text, self._error = clean(text), error

    def draw(self, width: int, palette: Palette) -> list[Line]:
        style = palette.error if self._error else palette.muted
        mark = Text("✗ " if self._error else "· ", style)
        return indent(wrap_words(Text(self._text, style), width - 2), mark, Text("  "))

    def guess(self, width: int) -> int:
        return 1 + len(self._text) // max(width, 1)
