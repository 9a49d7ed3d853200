"""Pictures in full resolution, by sixels: where a terminal says that it draws them, and how large its cells are.

Owns what a terminal is asked, the pictures that were drawn last, and the strips of the screen with a part of one. Each
line of the screen has a drawing of its own, so that a picture scrolls and is covered line by line.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import struct
import termios
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress

from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter
from textual.strip import Strip

from edgelm.base.workers.pictures import DrawnPicture, draw_sixels

# XTWINOPS: the pixels of a cell, and of the whole screen. DA1 is last, for every terminal answers it.
CELL_QUESTION = "\x1b[16t\x1b[14t\x1b[c"
QUESTION = f"\x1b[?1;1;0S{CELL_QUESTION}"  # XTSMGRAPHICS: how many colours
MAX_KEPT_BYTES = 16 * 2**20
_SIZE = re.compile(r"\x1b\[([46]);(\d+);(\d+)t")
_COLORS = re.compile(r"\x1b\[\?1;0;(\d+)S")
_ATTRIBUTES = re.compile(r"\x1b\[\?[\d;]+c")
_MULTIPLEXER = re.compile(r"\x1bP>\|(?:tmux|screen)", re.IGNORECASE)  # keeps fewer drawings than a picture has lines
_POSSIBLE = range(4, 101)  # pixels of a cell
MAX_COLORS = 256


def known_size() -> str:
    """Return what the kernel knows of the terminal's pixels, as its own answer is; empty: nothing.

    xterm tells them only there, unless its settings allow more.
    """
    size = (0, 0, 0, 0)
    with suppress(OSError):
        size = struct.unpack("4H", fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))
    return f"\x1b[4;{size[3]};{size[2]}t" if size[2] and size[3] else ""


class SixelPictures:
    """The pictures as a terminal with such cells draws them. `draw` and `kept` may be called by several threads."""

    def __init__(self, cell: tuple[int, int], num_colors: int) -> None:
        self._cell, self._num_colors = cell, num_colors
        self._drawn: OrderedDict[bytes, DrawnPicture] = OrderedDict()

    def kept(self, data: bytes) -> DrawnPicture | None:
        """Return a picture that was drawn before, without waiting."""
        return self._drawn.get(hashlib.sha256(data).digest())

    def draw(self, data: bytes, columns: int, num_lines: int) -> None:
        """Draw a picture in at most so many cells. Raises RequestError for one that is not taken."""
        drawn = draw_sixels(data, columns, num_lines, self._cell, self._num_colors)
        self._drawn[hashlib.sha256(data).digest()] = drawn
        while sum(sum(map(len, picture.lines)) for picture in tuple(self._drawn.values())) > MAX_KEPT_BYTES:
            self._drawn.popitem(last=False)


class SixelTerminal:
    """What a terminal says of itself, an answer at a time."""

    def __init__(self) -> None:
        self._draws = self._is_multiplexer = self._knows_cells = False
        self._cell: tuple[int, int] | None = None
        self._num_colors = MAX_COLORS
        self._told: tuple[tuple[int, int], int] | None = None

    def take(self, answer: str, columns: int, num_lines: int) -> SixelPictures | None:
        """Take an answer of a terminal with so many cells.

        Return how pictures are drawn from now on; None: as before.
        """
        if match := _SIZE.fullmatch(answer):
            height, width = int(match[2]), int(match[3])
            if match[1] == "6":
                self._knows_cells, self._cell = True, (width, height)
            elif not self._knows_cells and columns and num_lines:
                self._cell = width // columns, height // num_lines
        elif match := _COLORS.fullmatch(answer):
            self._num_colors = min(int(match[1]), MAX_COLORS)
        elif _ATTRIBUTES.fullmatch(answer):
            self._draws = "4" in answer[3:-1].split(";")[1:]
        elif _MULTIPLEXER.match(answer):
            self._is_multiplexer = True
        if not self._draws or self._is_multiplexer or self._cell is None or self._num_colors < 2:
            return None
        if self._told == (self._cell, self._num_colors) or not all(side in _POSSIBLE for side in self._cell):
            return None
        self._told = self._cell, self._num_colors
        return SixelPictures(*self._told)


class SixelStrip(Strip):  # noqa: PLW1641 - a strip has no hash
    """A line with a part of a picture. Its segments have that part as half blocks, for where something covers it."""

    __slots__ = ["_background", "_sixels", "_start", "_width"]

    def __init__(self, strip: Strip, start: int, width: int, sixels: str, background: Style) -> None:
        """Draw `sixels` over `width` cells from `start` on, with this style behind them."""
        super().__init__(strip, strip.cell_length)
        self._start, self._width, self._sixels, self._background = start, width, sixels, background

    def __eq__(self, strip: object) -> bool:
        return isinstance(strip, SixelStrip) and self._sixels == strip._sixels and super().__eq__(strip)

    def _over(self, strip: Strip, start: int = 0) -> Strip:
        """Return a strip that shows this one from a cell on, with the picture where all of its cells are there."""
        start = self._start - start
        if strip is self or start < 0 or start + self._width > strip.cell_length:
            return strip
        return SixelStrip(strip, start, self._width, self._sixels, self._background)

    def adjust_cell_length(self, cell_length: int, style: Style | None = None) -> Strip:
        return self._over(super().adjust_cell_length(cell_length, style))

    def apply_filter(self, filter: LineFilter, background: Color) -> Strip:  # noqa: A002 - Textual's name
        return self._over(super().apply_filter(filter, background))

    def crop(self, start: int, end: int | None = None) -> Strip:
        return self._over(super().crop(start, end), max(0, start))

    def divide(self, cuts: Iterable[int]) -> Sequence[Strip]:
        strips, start = [], 0
        for strip in super().divide(cuts):
            strips.append(self._over(strip, start))
            start += strip.cell_length
        return strips

    def render(self, console: Console) -> str:
        """Return the line's text with the drawing over it. The cursor ends behind the line, as after a text."""
        end = self._start + self._width
        blank = Strip([Segment(" " * self._width, self._background)], self._width)
        text = Strip.join([super().crop(0, self._start), blank, super().crop(end)]).render(console)
        place = f"\x1b[{self._start}C" if self._start else ""
        return f"\x1b7{text}\x1b8{place}{self._sixels}\x1b8\x1b[{self.cell_length}C"
