"""The list of commands above the prompt while one is being written.

Owns what it shows and which line is chosen. Knows nothing of what commands do.
"""

from __future__ import annotations

from rich.text import Text
from textual.app import RenderResult
from textual.widget import Widget

from edgelm.tui.commands import Command, complete

MAX_SHOWN = 8


class Completion(Widget):
    """Commands that the text may become; hidden where there is none."""

    DEFAULT_CSS = """
    Completion {
        height: auto; max-height: 8; padding: 0 2; background: $panel; display: none;
        text-wrap: nowrap; text-overflow: ellipsis;
    }
    Completion.-open { display: block; }
    """

    def __init__(self) -> None:
        super().__init__(id="completion")
        self._found: list[Command] = []
        self._at = 0

    @property
    def chosen(self) -> Command | None:
        return self._found[self._at] if self._found else None

    def update(self, text: str) -> None:
        """Show what a text may become."""
        found = complete(text)
        if found != self._found:
            self._found, self._at = found, 0
            self.set_class(bool(found), "-open")
            self.refresh(layout=True)

    def move(self, by: int) -> None:
        """Choose the line above or below."""
        if self._found:
            self._at = (self._at + by) % len(self._found)
            self.refresh()

    def close(self) -> bool:
        """Hide the list; say whether it was open."""
        was_open = bool(self._found)
        self._found = []
        self.remove_class("-open")
        return was_open

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        return min(len(self._found), MAX_SHOWN)

    def render(self) -> RenderResult:
        width = max((len(command.usage) for command in self._found), default=0) + 2
        first = max(0, min(self._at - MAX_SHOWN // 2, len(self._found) - MAX_SHOWN))
        text = Text(no_wrap=True, overflow="ellipsis")
        for i, command in enumerate(self._found[first : first + MAX_SHOWN], first):
            style = "reverse" if i == self._at else ""
            text.append(f"{command.usage:<{width}}", f"bold {style}".strip())
            text.append(command.help + "\n", style or "dim")
        text.rstrip()
        return text
