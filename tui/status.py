"""The lines at the bottom: running pulls, then model, engine, speed, context and drafts.

Owns which parts are omitted where the terminal is narrow. Knows nothing of where the figures come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.app import RenderResult
from textual.reactive import reactive
from textual.widget import Widget

from edgelm.client.answer_stream import AnswerStats
from edgelm.tui.lines import clean, short_name
from edgelm.tui.pulls import Pull

PULL_FRAME_S = 0.25  # between two drawings of the pulls


@dataclass(frozen=True, slots=True)
class Status:
    """The content of the status line."""

    model: str = ""
    endpoint: str = ""  # empty: on this machine
    activity: str = "starting"
    reading: str = ""  # which files are indexed now
    stats: AnswerStats | None = None
    unsaved: str = ""  # why the chats are not saved


class StatusLine(Widget):
    """One line; the least important parts are omitted when it is too narrow."""

    DEFAULT_CSS = """
    StatusLine { height: 1; padding: 0 1; color: $text-muted; }
    """
    status: reactive[Status] = reactive(Status())

    def __init__(self) -> None:
        super().__init__(id="status")

    def change(self, **changes: object) -> None:
        """Replace some fields of the status."""
        self.status = replace(self.status, **changes)  # type: ignore[arg-type]

    def on_resize(self, event: events.Resize) -> None:
        self.refresh()

    def render(self) -> RenderResult:
        return status_text(self.status, self.size.width)


def status_text(status: Status, width: int) -> Text:
    """Return the status line at a width."""
    if status.unsaved:
        return Text(clean(f"✗ not saved: {status.unsaved}"), "bold red", no_wrap=True, overflow="ellipsis")
    parts = [(rank, text) for rank, text in _ranked_parts(status) if text]
    help_text = "F1 help"
    while len(parts) > 1 and sum(cell_len(text) + 3 for _, text in parts) + len(help_text) > width:
        parts.remove(max(parts))
    line = Text(no_wrap=True, overflow="ellipsis")
    for i, (_, text) in enumerate(parts):
        line.append((" · " if i else "") + text)
    gap = width - cell_len(line.plain) - len(help_text)
    if gap > 1:
        line.append(" " * gap + help_text)
    return line


def _ranked_parts(status: Status) -> list[tuple[int, str]]:
    """Return the parts in their order, each with its rank: the highest is omitted first."""
    stats = status.stats or AnswerStats()
    engine = "/".join(name for name in (stats.engine, stats.device) if name)
    context = ""
    if stats.context_used is not None:
        size = f"/{stats.context_size:,}" if stats.context_size else ""
        context = f"{stats.context_used:,}{size} ctx"
    drafts = ""
    if stats.drafted:
        drafts = f"drafts {stats.accepted or 0}/{stats.drafted}"
    return [
        (0, clean(short_name(status.model)) or "no model"),
        (1, clean(status.reading) or status.activity),
        (7, clean(status.endpoint)),
        (5, engine),
        (2, f"{stats.tokens_per_second:.1f} tok/s" if stats.tokens_per_second else ""),
        (4, f"ttft {stats.first_token_ms / 1000:.2f} s" if stats.first_token_ms is not None else ""),
        (3, context),
        (6, drafts),
    ]


class PullBar(Widget):
    """One line for each pull; hidden where there is none."""

    DEFAULT_CSS = """
    PullBar { height: auto; max-height: 4; padding: 0 1; display: none; color: $text-accent; }
    PullBar.-open { display: block; }
    """

    def __init__(self) -> None:
        super().__init__(id="pulls")
        self._pulls: Sequence[Pull] = ()
        self._waiting = False

    def show_pulls(self, pulls: Sequence[Pull]) -> None:
        """Show these pulls at the next frame: progress events come faster than anyone can read."""
        changed = len(pulls) != len(self._pulls)
        self._pulls = pulls
        if changed:
            self.set_class(bool(pulls), "-open")
            self.refresh(layout=True)
        elif not self._waiting:
            self._waiting = True
            self.set_timer(PULL_FRAME_S, self._draw)

    def _draw(self) -> None:
        self._waiting = False
        self.refresh()

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        return len(self._pulls)

    def render(self) -> RenderResult:
        lines = [pull_text(pull, self.size.width) for pull in self._pulls]
        return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


def pull_text(pull: Pull, width: int) -> Text:
    """Return the line of a pull at a width; the least important parts are omitted first."""
    parts = [f"↓ {clean(pull.model)}", *map(clean, pull.progress), "/pull stop pauses it"]
    while len(parts) > 2 and sum(cell_len(part) + 3 for part in parts) - 3 > width:
        parts.pop()
    return Text(" · ".join(parts), no_wrap=True, overflow="ellipsis")
