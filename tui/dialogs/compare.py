"""The dialog that shows two versions of an answer side by side while the second is written.

Owns the two columns, their figures, and the choice of the version that stays on screen. Both are versions in the chat
already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.widgets import Static

from edgelm.chats.history import Message
from edgelm.client.answer_stream import stats_from_json
from edgelm.tui.dialogs.basic import Dialog
from edgelm.tui.hints import CANCEL, Hint, footer
from edgelm.tui.lines import clean, short_name
from edgelm.tui.transcript.views import MessageView
from edgelm.tui.transcript.widget import Transcript

FRAME_S = 0.1
FOOTER = (
    Hint("←", "", "screen.choose(0)"),
    Hint("→", "side", "screen.choose(1)"),
    Hint("PgUp", "", "screen.scroll(-10)"),
    Hint("PgDn", "scroll", "screen.scroll(10)"),
    Hint("Enter", "keeps it", "screen.keep"),
    CANCEL,
)
NARROW = 90  # cells; below, the versions stand one above the other


@dataclass(frozen=True, slots=True)
class Side:
    """One version, and the settings in which it differs from the chat."""

    message: Message
    setting: str


class Column(Vertical, can_focus=True):
    """One version: its model and figures, and its text."""

    DEFAULT_CSS = """
    Column { width: 1fr; height: 1fr; border: round $foreground 30%; padding: 0 1; }
    Column:focus, Column:focus-within { border: round $primary; }
    Column > .head { height: 1; color: $text-muted; }
    """

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.message = side.message
        self._setting = side.setting
        self._head = Static(classes="head", markup=False)
        self._transcript = Transcript(wraps_code=True)  # no key moves it sideways
        self._transcript.can_focus = False
        self._view = MessageView(side.message, live=side.message.state == "streaming")
        self._shown = side.message.text
        self._num_frames = 0

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._transcript

    def on_mount(self) -> None:
        self._transcript.show([self._view])
        self.draw()

    @property
    def is_live(self) -> bool:
        return self._view.live

    def draw(self) -> None:
        """Show the text that came since the last frame, and the figures."""
        message = self.message
        if self._view.live:
            self._num_frames += 1
            self._view.append(message.text.removeprefix(self._shown))
            self._view.show_calls()
            self._shown = message.text
            if message.state != "streaming":
                self._view.settle()
            elif not message.text:
                self._view.set_status(f"{'thinking' if message.reasoning else 'waiting'}, {self._seconds:.0f} s")
            self._transcript.changed()
        self._head.update(self._figures())

    @property
    def _seconds(self) -> float:
        return self._num_frames * FRAME_S

    def _figures(self) -> Text:
        message, stats = self.message, stats_from_json(self.message.stats)
        parts = [clean(self._setting or short_name(message.model))]
        if message.state == "streaming":
            parts.append("writing" if message.text else "waiting")
        elif stats is not None and stats.first_token_ms:
            parts.append(f"first token after {stats.first_token_ms / 1000:.2f} s")
        return Text(" · ".join(parts), no_wrap=True, overflow="ellipsis")

    def scroll(self, by: int) -> None:
        """Scroll the text by some lines."""
        self._transcript.scroll_relative(y=by, animate=False)


class CompareScreen(Dialog[int | None]):
    """Two versions; returns the id of the one that stays on screen, None: the older one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Keep the old version", show=False),
        Binding("left,up", "choose(0)", "The left version", show=False),
        Binding("right,down", "choose(1)", "The right version", show=False),
        Binding("pageup", "scroll(-10)", "Scroll up", show=False),
        Binding("pagedown", "scroll(10)", "Scroll down", show=False),
        Binding("enter", "keep", "Keep the chosen version on screen", show=False),
    ]
    DEFAULT_CSS = """
    CompareScreen { align: center middle; }
    CompareScreen > Vertical { width: 100%; height: 100%; background: $surface; padding: 0 1; }
    CompareScreen #question { height: auto; max-height: 3; color: $text-muted; margin: 0 1; }
    CompareScreen #columns { layout: horizontal; height: 1fr; }
    CompareScreen.-narrow #columns { layout: vertical; }
    CompareScreen #keys { height: 1; color: $text-muted; link-style: none; link-color: $text-muted; }
    """

    def __init__(self, question: str, sides: Sequence[Side]) -> None:
        super().__init__()
        self._question = question
        self._columns = [Column(side) for side in sides]

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(clean(self._question), id="question", markup=False)
            with Container(id="columns"):
                yield from self._columns
            yield Static(footer(FOOTER), id="keys")

    def on_mount(self) -> None:
        self._columns[-1].focus()
        self.set_interval(FRAME_S, self._draw)

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width < NARROW, "-narrow")

    def _draw(self) -> None:
        for column in self._columns:
            if column.is_live:
                column.draw()

    def action_choose(self, number: int) -> None:
        self._columns[number].focus()

    @property
    def _chosen(self) -> Column:
        return next((column for column in self._columns if column.has_focus), self._columns[-1])

    def action_scroll(self, by: int) -> None:
        self._chosen.scroll(by)

    def action_keep(self) -> None:
        if any(column.is_live for column in self._columns):
            self.notify("a version is being written; Esc stops it and keeps the old one", severity="warning")
        else:
            self.dismiss(self._chosen.message.id)

    def on_click(self, event: events.Click) -> None:
        """Keep the version that is clicked twice; one click chooses it."""
        column = next((column for column in self._columns if column.region.contains(*event.screen_offset)), None)
        if column is not None:
            column.focus()
            if event.chain > 1:
                self.action_keep()
