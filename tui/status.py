"""The line at the bottom: model, engine, speed, context and drafts.

Owns what is left out where there is little room. Knows nothing of how the figures come about.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.app import RenderResult
from textual.reactive import reactive
from textual.widget import Widget

from edgelm.client.endpoint import AnswerStats
from edgelm.tui.lines import clean, short_name


@dataclass(frozen=True, slots=True)
class Status:
    """What the line says."""

    model: str = ""
    endpoint: str = ""  # where it is remote
    activity: str = "starting"
    stats: AnswerStats | None = None
    unsaved: str = ""


class StatusLine(Widget):
    """One line; the least important parts go first when it is too narrow."""

    DEFAULT_CSS = """
    StatusLine { height: 1; padding: 0 1; color: $text-muted; }
    """
    status: reactive[Status] = reactive(Status())

    def __init__(self) -> None:
        super().__init__(id="status")

    def change(self, **changes: object) -> None:
        """Say something else."""
        self.status = replace(self.status, **changes)  # type: ignore[arg-type]

    def on_resize(self, event: events.Resize) -> None:
        self.refresh()

    def render(self) -> RenderResult:
        return lay_out(self.status, self.size.width)


def lay_out(status: Status, width: int) -> Text:
    """Return the line at a width."""
    if status.unsaved:
        return Text(clean(f"✗ not saved: {status.unsaved}"), "bold red", no_wrap=True, overflow="ellipsis")
    parts = [(rank, text) for rank, text in _parts(status) if text]
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


def _parts(status: Status) -> list[tuple[int, str]]:
    """Return the parts in their order, each with its rank: the highest goes first."""
    stats = status.stats or AnswerStats()
    engine = "/".join(each for each in (stats.engine, stats.device) if each)
    context = ""
    if stats.context_used is not None:
        size = f"/{stats.context_size:,}" if stats.context_size else ""
        context = f"{stats.context_used:,}{size} ctx"
    drafts = ""
    if stats.drafted:
        drafts = f"drafts {stats.accepted or 0}/{stats.drafted}"
    return [
        (0, clean(short_name(status.model)) or "no model"),
        (1, status.activity),
        (7, clean(status.endpoint)),
        (5, engine),
        (2, f"{stats.tokens_per_second:.1f} tok/s" if stats.tokens_per_second else ""),
        (4, f"ttft {stats.first_token_ms / 1000:.2f} s" if stats.first_token_ms is not None else ""),
        (3, context),
        (6, drafts),
    ]
