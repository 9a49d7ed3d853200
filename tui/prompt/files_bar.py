"""The files that are attached to the message being written, above the prompt, and what is left of the context.

Owns how they are drawn, and which of them is selected. What a key or a click does to one goes out as an event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from rich.cells import cell_len
from textual import events
from textual.app import RenderResult
from textual.binding import BindingType
from textual.content import Content
from textual.message import Message as Event
from textual.style import Style
from textual.widget import Widget

from edgelm.tui.commands.table import FILE_KEYS
from edgelm.tui.hints import Hint
from edgelm.tui.lines import clean

MAX_LINES = 4
CLOSE = " ✕"
ACTION, INDEX = "action", "chip"  # of the meta of a style

Use = Literal["", "as text", "attach again"]


@dataclass(frozen=True, slots=True)
class Chip:
    """A file on the bar. `use` is what Enter does with it."""

    name: str
    details: str = ""
    use: Use = ""
    is_notice: bool = False  # about a file that was sent before


class FilesBar(Widget, can_focus=True):
    """The chips, in lines; hidden where there are none."""

    BINDINGS: ClassVar[list[BindingType]] = [key.binding for key in FILE_KEYS]
    FOCUS_ON_CLICK = False  # a click on a chip does it
    DEFAULT_CSS = """
    FilesBar { height: auto; max-height: 4; padding: 0 2; display: none; }
    FilesBar.-open { display: block; }
    """

    @dataclass
    class Removed(Event):
        """A chip is taken off."""

        index: int

    @dataclass
    class Used(Event):
        """Enter was pressed on a chip with a use, or its use was clicked."""

        index: int

    class Left(Event):
        """The user goes back to the prompt."""

    def __init__(self) -> None:
        super().__init__(id="files")
        self.chips: Sequence[Chip] = ()
        self._room = ""
        self._too_long = False
        self._index = 0

    def show(self, chips: Sequence[Chip], room: str, *, too_long: bool = False) -> None:
        """Show these; `room` says what is left of the context, empty where that is not known."""
        self.chips, self._room, self._too_long = chips, room, too_long
        self._index = max(0, min(self._index, len(chips) - 1))
        self.set_class(bool(chips), "-open")
        if not chips and self.has_focus:
            self.post_message(self.Left())
        self.refresh(layout=True)
        self.refresh_bindings()

    def on_focus(self) -> None:
        self._index = len(self.chips) - 1
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()

    # Keys and clicks

    def action_move(self, by: int) -> None:
        if self.chips:
            self._index = (self._index + by) % len(self.chips)
            self.refresh()
            self.refresh_bindings()

    def action_remove(self, index: int = -1) -> None:
        index = index if index >= 0 else self._index
        if index < len(self.chips):
            self.post_message(self.Removed(index))

    def action_use(self, index: int = -1) -> None:
        index = index if index >= 0 else self._index
        if index < len(self.chips) and self.chips[index].use:
            self.post_message(self.Used(index))

    def on_click(self, event: events.Click) -> None:
        action, index = event.style.meta.get(ACTION), event.style.meta.get(INDEX, -1)
        if action == "remove":
            self.action_remove(index)
        elif action == "use":
            self.action_use(index)
        elif action == "select":
            self.focus()
            self.call_after_refresh(self._select, index)

    def _select(self, index: int) -> None:
        self._index = max(0, min(index, len(self.chips) - 1))
        self.refresh()
        self.refresh_bindings()

    def action_leave(self) -> None:
        self.post_message(self.Left())

    @property
    def hints(self) -> list[Hint]:
        """Return the hints for the selected chip."""
        use = self.chips[self._index].use if self._index < len(self.chips) else ""
        hints = [Hint("Enter", use, "use")] if use else []
        return [*hints, Hint("Del", "take off", "remove"), Hint("Esc", "back", "leave")]

    # Drawing

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        return min(len(self._lines(width)), MAX_LINES)

    def render(self) -> RenderResult:
        lines = self._lines(self.content_size.width)
        of_chip = [number for number, (_, indexes) in enumerate(lines) if self._index in indexes]
        selected = of_chip[0] if of_chip and self.has_focus else len(lines) - 1
        first = max(0, min(selected - MAX_LINES // 2, len(lines) - MAX_LINES))
        return Content("\n").join(line for line, _ in lines[first : first + MAX_LINES])

    def _lines(self, width: int) -> list[tuple[Content, list[int]]]:
        """Return the lines, and the chips of each."""
        lines: list[tuple[Content, list[int]]] = []
        line, indexes = Content(""), list[int]()
        parts = [*((self._chip(i, chip, width), [i]) for i, chip in enumerate(self.chips)), (self._room_part(), [])]
        for part, of in parts:
            if not part.plain:
                continue
            if line.plain and line.cell_length + 2 + part.cell_length > width:
                lines.append((line, indexes))
                line, indexes = Content(""), []
            line = line + "  " + part if line.plain else part
            indexes = [*indexes, *of]
        return [*lines, (line, indexes)] if line.plain else lines

    def _room_part(self) -> Content:
        if not self._room:
            return Content("")
        return Content.styled(f"· {self._room}", "bold $text-error" if self._too_long else self._muted)

    def _chip(self, index: int, chip: Chip, width: int) -> Content:
        is_selected = self.has_focus and index == self._index
        muted = "" if is_selected else self._muted  # it cannot be read where colours are reversed
        use = f" {chip.use}" if chip.use else ""
        details = f" {clean(chip.details)}" if chip.details else ""
        free = width - cell_len(use) - cell_len(CLOSE)
        name = Content(clean(chip.name)).truncate(max(free - cell_len(details), 8), ellipsis=True)
        main = name.stylize("bold") + Content.styled(details, "" if chip.is_notice else muted)
        main = main.truncate(max(free, 8), ellipsis=True)
        parts = [_clickable(main, "select", index)]
        if chip.use:
            parts.append(_clickable(Content.styled(use, "underline"), "use", index))
        parts.append(_clickable(Content.styled(CLOSE, muted), "remove", index))
        content = Content("").join(parts)
        return content.stylize("reverse") if is_selected else content

    @property
    def _muted(self) -> str:
        return "dim" if self.app.current_theme.ansi else "$text-muted"


def _clickable(content: Content, action: str, index: int) -> Content:
    """Mark a content with what a click on it does. Textual's own links have one colour and a line below them."""
    return content.stylize(Style.from_meta({ACTION: action, INDEX: index}))
