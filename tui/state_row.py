"""The row under the title: what is set for this chat, each part with the dialog that changes it.

Owns the wording and order of the parts. It is hidden where nothing is set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from textual.app import RenderResult
from textual.binding import BindingType
from textual.content import Content
from textual.widget import Widget

from edgelm.chats.history import Chat
from edgelm.tui.commands.table import STATE_KEYS
from edgelm.tui.dialogs.params import effort_name
from edgelm.tui.hints import Hint, link
from edgelm.tui.lines import clean
from edgelm.tui.transcript.passages import one_line

MAX_VALUES = 3  # of sampling; more are counted


class StatePart(NamedTuple):
    """A part of the row, and the command that changes it."""

    text: str
    command: str


def state_parts(
    chat: Chat,
    num_tools: Callable[[str], int | None],
    *,
    unused_gpu: str = "",
    runs_at: str = "",
    is_outdated: bool = False,
) -> list[StatePart]:
    """Return what is set for a chat. `num_tools` returns the number of a server's tools, None while unknown.

    `unused_gpu` is the line about a GPU that stands in the machine and is not used. `runs_at` are the servers that run
    the model, if it is not this one. `is_outdated`: another window has changed the chat.
    """
    parts = [StatePart("changed in another window: reload", "reload")] if is_outdated else []
    if runs_at:
        parts.append(StatePart(f"runs at {runs_at}", "model"))
    if chat.preset:
        parts.append(StatePart(f"preset {chat.preset}", "preset"))
    if chat.system.strip():
        parts.append(StatePart("system prompt", "system"))
    values = dict(chat.sampling)
    effort = values.pop("reasoning_effort", None)
    if len(values) > MAX_VALUES:
        parts.append(StatePart(f"{len(values)} sampling values", "params"))
    else:
        parts += [StatePart(f"{name.replace('_', ' ')} {value}", "params") for name, value in values.items()]
    if effort is not None:
        parts.append(StatePart(f"thinking {effort_name(effort)}", "think"))
    if len(chat.knowledge) > 1:
        parts.append(StatePart(f"reads {len(chat.knowledge)} files and folders", "know"))
    elif chat.knowledge:
        parts.append(StatePart(f"reads {Path(chat.knowledge[0]).name or chat.knowledge[0]}", "know"))
    if chat.tools:
        counts = [num_tools(name) for name in chat.tools]
        known = [count for count in counts if count is not None]
        total = sum(known)
        words = f"{total} tool{'' if total == 1 else 's'}" if len(known) == len(counts) else ", ".join(chat.tools)
        parts.append(StatePart(words if len(known) == len(counts) else f"tools of {words}", "tools"))
    if unused_gpu:
        parts.append(StatePart(unused_gpu, "model"))
    return [StatePart(one_line(clean(part.text)), part.command) for part in parts]


class StateRow(Widget, can_focus=True):
    """The parts on one line; a click or Enter opens the dialog of one."""

    BINDINGS: ClassVar[list[BindingType]] = [key.binding for key in STATE_KEYS]
    FOCUS_ON_CLICK = False
    DEFAULT_CSS = """
    StateRow {
        height: 1; display: none; color: $text-muted; text-wrap: nowrap; text-overflow: ellipsis; padding-left: 2;
        link-style: none; link-color: $text-muted; link-style-hover: underline;
    }
    StateRow.-open { display: block; }
    """

    def __init__(self) -> None:
        super().__init__(id="state")
        self._parts: Sequence[StatePart] = ()
        self._index = 0

    def show(self, parts: Sequence[StatePart]) -> None:
        """Show these parts."""
        if parts != self._parts:
            self._parts = parts
            self._index = max(0, min(self._index, len(parts) - 1))
            if not parts and self.has_focus:
                self.screen.focus_next()
            self.set_class(bool(parts), "-open")
            self.refresh()

    def action_move(self, by: int) -> None:
        self._index = (self._index + by) % max(len(self._parts), 1)
        self.refresh()

    async def action_open(self) -> None:
        if self._parts:
            await self.app.run_action(f"screen.run({self._parts[self._index].command!r})", self)

    @property
    def hints(self) -> list[Hint]:
        return [Hint("Enter", "change", "open"), Hint("Esc", "back", "screen.stop")]

    def on_focus(self) -> None:
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()

    def render(self) -> RenderResult:
        parts = [link(part.text, f"screen.run({part.command!r})") for part in self._parts]
        if self.has_focus:
            parts[self._index] = parts[self._index].stylize("reverse")
        return Content(" · ").join(parts)
