"""The lines above the status line: what is being pulled, and how far it is.

Owns their layout. Knows nothing of processes.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text
from textual.app import RenderResult
from textual.widget import Widget

from edgelm.tui.lines import clean
from edgelm.tui.pulls import Pull

FRAME_S = 0.25  # between two pictures


class PullBar(Widget):
    """A line for each pull; hidden where there is none."""

    DEFAULT_CSS = """
    PullBar { height: auto; max-height: 4; padding: 0 1; display: none; color: $text-accent; }
    PullBar.-open { display: block; }
    """

    def __init__(self) -> None:
        super().__init__(id="pulls")
        self._pulls: Sequence[Pull] = ()
        self._waiting = False

    def show_pulls(self, pulls: Sequence[Pull]) -> None:
        """Show these, soon: they tell of themselves more often than anyone can read."""
        changed = len(pulls) != len(self._pulls)
        self._pulls = pulls
        if changed:
            self.set_class(bool(pulls), "-open")
            self.refresh(layout=True)
        elif not self._waiting:
            self._waiting = True
            self.set_timer(FRAME_S, self._draw)

    def _draw(self) -> None:
        self._waiting = False
        self.refresh()

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        return len(self._pulls)

    def render(self) -> RenderResult:
        lines = [lay_out(pull, self.size.width) for pull in self._pulls]
        return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


def lay_out(pull: Pull, width: int) -> Text:
    """Return the line of a pull at a width: the least important parts go first."""
    parts = [f"↓ {clean(pull.model)}", *map(clean, pull.progress), "/pull stop keeps what came"]
    while len(parts) > 2 and sum(cell_len(part) + 3 for part in parts) - 3 > width:
        parts.pop()
    return Text(" · ".join(parts), no_wrap=True, overflow="ellipsis")
