"""Where each row of the transcript stands.

Owns heights and offsets: exact ones for what has been drawn, guesses for what has never come into view. Knows nothing
of widgets and scrolling.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from edgelm.tui.lines import Line
from edgelm.tui.palette import Palette
from edgelm.tui.rows import Row
from edgelm.tui.views import MessageView, PendingRow


class Flow:
    """The rows of all messages, one below the other, at one width."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._known: list[bool] = []
        self._offsets: list[int] = [0]  # the first line of each row, and of what would be next
        self._owners: list[MessageView] = []
        self._width = 0
        self._palette: Palette | None = None

    @property
    def height(self) -> int:
        return self._offsets[-1]

    def measure(self, views: Sequence[MessageView], width: int, palette: Palette) -> None:
        """Stack the rows as they are now."""
        self._width, self._palette = width, palette
        self.rows = [row for view in views for row in view.rows]
        self._owners = [view for view in views for _ in view.rows]
        heights = [row.height(width, palette) for row in self.rows]
        self._known = [known for _, known in heights]
        self._offsets = [0, *accumulate(height for height, _ in heights)]

    def locate(self, y: int) -> tuple[int, int]:
        """Return the row at a line and the line within it; (-1, 0) where there is none."""
        if not 0 <= y < self.height:
            return -1, 0
        index = bisect_right(self._offsets, y) - 1
        return index, y - self._offsets[index]

    def top_of(self, row: Row) -> int | None:
        """Return the first line of a row."""
        try:
            return self._offsets[self.rows.index(row)]
        except ValueError:
            return None

    def draw(self, top: int, bottom: int) -> bool:
        """Draw what stands between two lines and never was; say whether there was any."""
        first, _ = self.locate(max(top, 0))
        if first < 0:
            return False
        found = False
        for index in range(first, len(self.rows)):
            if self._offsets[index] >= bottom:
                break
            if not self._known[index]:
                self._draw_row(index)
                found = True
        return found

    def draw_last_unknown(self) -> bool:
        """Draw the lowest row that never was; say whether there was one."""
        for index in range(len(self.rows) - 1, -1, -1):
            if not self._known[index]:
                self._draw_row(index)
                self._known[index] = True
                return True
        return False

    def release(self, top: int, bottom: int) -> None:
        """Let the lines of all rows go that do not stand between two lines."""
        for index, row in enumerate(self.rows):
            if self._offsets[index + 1] <= top or self._offsets[index] >= bottom:
                row.release()

    def _draw_row(self, index: int) -> None:
        owner = self._owners[index]
        if owner.pending and isinstance(self.rows[index], PendingRow):
            owner.expand()
        else:
            assert self._palette is not None
            self.rows[index].lines(self._width, self._palette)

    def line(self, y: int) -> Line | None:
        """Return the line at a height; None below the end, and where a guess was too long."""
        index, at = self.locate(y)
        if index < 0:
            return None
        assert self._palette is not None
        lines = self.rows[index].lines(self._width, self._palette)
        return lines[at] if at < len(lines) else None

    def view_at(self, y: int) -> MessageView | None:
        """Return the message that a line belongs to."""
        index, _ = self.locate(y)
        return self._owners[index] if index >= 0 else None

    def span_of(self, view: MessageView) -> tuple[int, int] | None:
        """Return the first line of a message and the line behind its last; None where it has not been stacked."""
        first, last = self.top_of(view.rows[0]), self.top_of(view.rows[-1])
        return None if first is None or last is None else (first, last + 1)
