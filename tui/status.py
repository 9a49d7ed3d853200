"""The lines at the bottom: running pulls, then model, activity, speed and the share of the context that is used.

Owns which parts are omitted where the terminal is narrow, and the hints of keys, which can be clicked. Knows nothing
of where the figures come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.app import RenderResult
from textual.content import Content
from textual.dom import DOMNode
from textual.reactive import reactive
from textual.widget import Widget

from edgelm.client.answer_stream import AnswerStats
from edgelm.tui.commands.keymap import keymap_of
from edgelm.tui.dialogs.stats_text import speed_text
from edgelm.tui.hints import HasHints, Hint, link
from edgelm.tui.lines import NAME_CELLS, clean, cut_name, short_name
from edgelm.tui.pulls import Pull

PULL_FRAME_S = 0.25  # between two drawings of the pulls
IDLE = ("starting", "connecting", "ready", "not connected")  # activities without an answer
HELP = Hint("F1", "help", "screen.run('help')")
STOP = Hint("Esc", "stop", "screen.stop")
COPY = Hint("Ctrl+C", "copy", "screen.interrupt")


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
    """One line: the status, and hints of keys. The least important parts are omitted when it is too narrow."""

    ALLOW_SELECT = False
    DEFAULT_CSS = """
    StatusLine {
        height: 1; padding: 0 1; color: $text-muted;
        link-style: none; link-color: $text-muted; link-style-hover: underline;
    }
    """
    status: reactive[Status] = reactive(Status())

    def __init__(self) -> None:
        super().__init__(id="status")
        self._sources: list[tuple[DOMNode, Hint]] = []  # the hints of the focused widget, and whose actions they run
        self._selecting = False  # text is selected in the conversation

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, lambda _: self._update_hints())
        self.watch(self.screen, "selections", self._selection_changed, init=False)

    def _selection_changed(self) -> None:
        if bool(self.screen.selections) != self._selecting:
            self._selecting = not self._selecting
            self.refresh()

    def _update_hints(self) -> None:
        focused = self.screen.focused
        nodes = focused.ancestors_with_self if focused is not None else ()
        source = next((node for node in nodes if isinstance(node, HasHints)), None)
        if source is None or focused is None:
            self._sources = []
        else:
            self._sources = [(source, hint) for hint in source.hints]
        self.refresh()

    def _hints(self) -> list[tuple[DOMNode, Hint]]:
        """Return the hints for the present state, the most important first."""
        own: list[tuple[DOMNode, Hint]] = [(self, COPY)] if self._selecting else []
        focused = self.screen.focused
        if self.status.activity in IDLE or focused is None or focused.id != "prompt":
            return self._relabelled([*own, *self._sources, (self, HELP)])
        # Optional hints come and go with the figures: none moves this one away from the pointer.
        needed = [(source, hint) for source, hint in self._sources if not hint.optional]
        return self._relabelled([*own, (self, STOP), *needed, (self, HELP)])

    def _relabelled(self, hints: list[tuple[DOMNode, Hint]]) -> list[tuple[DOMNode, Hint]]:
        """Return hints with the keys in force."""
        keymap = keymap_of(self.app)
        return [(source, keymap.relabel(hint)) for source, hint in hints]

    async def action_hint(self, action: str) -> None:
        """Run the action of a hint."""
        for source, hint in self._hints():
            if hint.action == action != COPY.action:
                await self.app.run_action(hint.action, source)
                return

    async def on_mouse_down(self, event: events.MouseDown) -> None:
        """Copy the selected text already now: it is not selected any more when the button is released."""
        if self._selecting and event.style.meta.get("@click") == _click(COPY):
            await self.app.run_action(COPY.action, self)

    def change(self, **changes: object) -> None:
        """Replace some fields of the status."""
        self.status = replace(self.status, **changes)  # type: ignore[arg-type]

    def on_resize(self, event: events.Resize) -> None:
        self.refresh()

    def render(self) -> RenderResult:
        return status_text(self.status, self.size.width, [hint for _, hint in self._hints()])


def status_text(status: Status, width: int, hints: Sequence[Hint] = (HELP,)) -> Content:
    """Return the status line at a width."""
    if status.unsaved:
        return Content.styled(clean(f"✗ not saved: {status.unsaved}"), "bold $text-error").truncate(
            width, ellipsis=True
        )
    parts = [part for part in _ranked_parts(status) if part.text]
    shown = list(hints)
    optional = [hint for hint in shown if hint.optional]
    while optional and _cells_of_parts(parts) + 2 + _cells_of(shown) > width:
        shown.remove(optional.pop())
    if _cells_of_parts(parts) + 2 + _cells_of(shown) > width:
        parts[0] = parts[0]._replace(text=cut_name(parts[0].text, max(width // 3, NAME_CELLS)))
    while len(shown) > 1 and parts[0].cells + 2 + _cells_of(shown) > width:
        shown.pop()
    while len(parts) > 1 and _cells_of_parts(parts) + 2 + _cells_of(shown) > width:
        parts.remove(max(parts, key=lambda part: part.rank))
    line = Content(" · ").join(link(part.text, part.action) if part.action else Content(part.text) for part in parts)
    gap = width - line.cell_length - _cells_of(shown)
    if gap > 1:
        words = (link(hint.key, _click(hint)).stylize("bold") + link(f" {hint.label}", _click(hint)) for hint in shown)
        line += Content(" " * gap) + Content("  ").join(words)
    return line.truncate(width, ellipsis=True)


def _cells_of_parts(parts: Sequence[Part]) -> int:
    return sum(part.cells + 3 for part in parts) - 3


def _click(hint: Hint) -> str:
    return f"hint({hint.action!r})"


def _cells_of(hints: Sequence[Hint]) -> int:
    return sum(cell_len(hint.key) + cell_len(hint.label) + 3 for hint in hints) - 2


class Part(NamedTuple):
    """A part of the status line. The highest rank is omitted first; a click runs `action`."""

    rank: int
    text: str
    action: str = ""

    @property
    def cells(self) -> int:
        return cell_len(self.text)


def _ranked_parts(status: Status) -> list[Part]:
    """Return the parts in their order."""
    stats = status.stats or AnswerStats()
    context = ""
    if stats.context_used is not None:
        context = f"{stats.context_used:,} tokens of context"
        if stats.context_size:
            context = f"{max(1, round(100 * stats.context_used / stats.context_size))} % of the context"
    return [
        Part(0, clean(short_name(status.model)) or "no model", "screen.run('model')"),
        Part(1, clean(status.reading) or status.activity),
        Part(4, clean(status.endpoint)),
        Part(2, speed_text(stats.tokens_per_second) if stats.tokens_per_second else "", "screen.figures"),
        Part(3, context, "screen.run('shorten')"),
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
