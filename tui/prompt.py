"""The box in which a message is written.

Owns Enter, line breaks, the history and the size of the box. Knows nothing of commands and chats.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual import events
from textual.message import Message as Event
from textual.widgets import TextArea

from edgelm.tui.history import History

BREAKS = frozenset({"alt+enter", "ctrl+j", "shift+enter"})
PLACEHOLDER = "Message: Enter sends, Ctrl+J breaks the line"


class Prompt(TextArea):
    """A text area that sends itself."""

    DEFAULT_CSS = """
    Prompt {
        height: auto; min-height: 3; max-height: 10;
        border: round $border-blurred; padding: 0 1; background: transparent;
        scrollbar-size-vertical: 1;
        border-title-color: $text-muted; border-subtitle-color: $text-muted;
    }
    Prompt:focus { border: round $primary; background: transparent; }
    Prompt.-editing { border: round $warning; }
    Prompt .text-area--cursor-line { background: transparent; }
    """

    @dataclass
    class Sent(Event):
        """Enter was pressed on a text."""

        text: str

    @dataclass
    class Typed(Event):
        """The text changed."""

        text: str

    @dataclass
    class TabPressed(Event):
        """Tab was pressed; the text is a command that may be completed."""

        text: str

    @dataclass
    class Moved(Event):
        """Up (-1) or Down (1) was pressed while the list of commands is open."""

        by: int

    @dataclass
    class Paged(Event):
        """PageUp (-1) or PageDown (1) was pressed: the conversation scrolls."""

        by: int

    def __init__(self) -> None:
        super().__init__(
            id="prompt", soft_wrap=True, show_line_numbers=False, tab_behavior="focus", placeholder=PLACEHOLDER,
            highlight_cursor_line=False,
        )  # fmt: skip
        self.sent = History()
        self.completing = False  # the list of commands is open

    def put(self, text: str) -> None:
        """Replace the text, with the cursor at its end."""
        self.load_text(text)
        self.move_cursor(self.document.end)

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            self._take(event)
            self.post_message(self.Sent(self.text))
        elif event.key in BREAKS:
            self._take(event)
            self.insert("\n")
        elif event.key in ("up", "down") and self.completing:
            self._take(event)
            self.post_message(self.Moved(-1 if event.key == "up" else 1))
        elif event.key in ("pageup", "pagedown"):
            self._take(event)
            self.post_message(self.Paged(-1 if event.key == "pageup" else 1))
        elif event.key in ("up", "down") and self._walk_history(event.key):
            self._take(event)
        elif event.key == "tab" and self.text.startswith("/"):
            self._take(event)
            self.post_message(self.TabPressed(self.text))
        else:
            await super()._on_key(event)

    def _take(self, event: events.Key) -> None:
        event.stop()
        event.prevent_default()

    def _walk_history(self, key: str) -> bool:
        """Show an earlier or later text if the cursor is at the first or last line; say whether the key was used."""
        row = self.wrapped_document.location_to_offset(self.cursor_location).y
        if row != (0 if key == "up" else self.wrapped_document.height - 1):
            return False
        found = self.sent.back(self.text) if key == "up" else self.sent.forward(self.text)
        if found is not None:
            self.put(found)
        return found is not None

    def on_text_area_changed(self) -> None:
        self.post_message(self.Typed(self.text))
