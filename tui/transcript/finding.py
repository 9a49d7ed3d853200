"""Finding words in the open chat: the bar below the conversation, and where the words stand in drawn lines.

Owns how words match. Knows nothing of messages and of scrolling.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.style import Style
from textual import events, on
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.message import Message as Event
from textual.widgets import Input, Static

from edgelm.tui.dialogs.basic import FOCUS_CSS
from edgelm.tui.fields import LineField
from edgelm.tui.hints import Hint
from edgelm.tui.lines import Line

FOUND, FOUND_HERE = Style(bold=True, underline=True), Style(reverse=True)  # seen without colours, too


class Piece(NamedTuple):
    """A part of a match: it may go on in the next line."""

    line: int
    start: int
    end: int


class Place(NamedTuple):
    """The beginning of a match: the line of its message, and the character there."""

    line: int
    start: int


@dataclass(slots=True)
class Found:
    """A place that was gone to."""

    message_id: int
    place: Place


class Finding:
    """The words that are looked for; white space between them matches any other, also the end of a line."""

    def __init__(self, words: str) -> None:
        self._parts = [re.compile(re.escape(word), re.IGNORECASE) for word in words.split()]
        self._whole = re.compile(r"\s+".join(part.pattern for part in self._parts), re.IGNORECASE)
        self.found: Found | None = None

    def may_be_in(self, text: str) -> bool:
        """Tell whether a text in Markdown may have them once it is drawn."""
        return all(part.search(text) for part in self._parts)

    def is_in(self, text: str) -> bool:
        return self._whole.search(text) is not None

    def matches(self, lines: Sequence[Line | None]) -> list[list[Piece]]:
        """Return the matches in consecutive lines, each with its part of every line that it touches."""
        text = ""
        begins: list[tuple[int, int, int]] = []  # in the text, the line, and its prefix
        for index, line in enumerate(lines):
            if line is None or 0 < len(line.text) <= line.prefix:
                continue  # no line, or only decoration
            text += line.joint if begins else ""
            begins.append((len(text), index, line.prefix))
            text += line.text.plain[line.prefix :]
        matches = []
        for match in self._whole.finditer(text):
            pieces = []
            for number, (begin, index, prefix) in enumerate(begins):
                end = begins[number + 1][0] if number + 1 < len(begins) else len(text)
                if begin < match.end() and match.start() < end:
                    start = max(match.start() - begin, 0) + prefix
                    pieces.append(Piece(index, start, match.end() - begin + prefix))
            matches.append(pieces)
        return matches

    def snippet(self, text: str, around: int) -> str:
        """Return the first match with some characters before and after it, on one line."""
        match = self._whole.search(text) or self._parts[0].search(text)
        if match is None:
            return ""
        begin, end = max(match.start() - around, 0), match.end() + around
        shown = " ".join(text[begin:end].split())
        return f"{'…' if begin else ''}{shown}{'…' if end < len(text) else ''}"


class FindBar(Horizontal):
    """The field for the words, and how many messages have them."""

    DEFAULT_CSS = (
        FOCUS_CSS.format(name="FindBar")
        + """
    FindBar { height: 1; display: none; }
    FindBar.-open { display: block; }
    FindBar > .label { width: 7; padding-left: 2; color: $text-muted; }
    FindBar Input { width: 1fr; background: $boost; }
    FindBar > #found { width: auto; min-width: 16; padding-left: 2; color: $text-muted; }
    """
    )

    @dataclass
    class Typed(Event):
        """The words changed."""

        words: str

    @dataclass
    class Moved(Event):
        """Down (1) or Up (-1) was pressed: the next or the previous place."""

        by: int

    class Entered(Event):
        """Enter was pressed: the keys go to the message."""

    def __init__(self) -> None:
        super().__init__(id="find")

    def compose(self) -> ComposeResult:
        yield Static("Find", classes="label")
        yield LineField(placeholder="words in this chat", select_on_focus=True)
        yield Static("", id="found")

    @property
    def is_open(self) -> bool:
        return self.has_class("-open")

    def open(self, words: str) -> None:
        """Show the bar with the cursor in it."""
        self.add_class("-open")
        field = self.query_one(Input)
        if words not in ("", field.value):
            field.value = words
        elif field.value:  # as in the chat that was open before
            self.post_message(self.Typed(field.value))
        self.screen.set_focus(field)  # now: `focus` waits for the keys behind this one

    def close(self) -> bool:
        """Hide the bar; return whether it was open."""
        was_open = self.is_open
        self.remove_class("-open")
        return was_open

    def show_count(self, count: int) -> None:
        """Show how many messages have the words."""
        words = self.query_one(Input).value.strip()
        text = f"in {count:,} message{'' if count == 1 else 's'}" if count else "not found"
        self.query_one("#found", Static).update(text if words else "")

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        if self.is_open:
            self.post_message(self.Typed(event.value))

    @on(Input.Submitted)
    def action_enter(self) -> None:
        self.post_message(self.Entered())

    def action_move(self, by: int) -> None:
        self.post_message(self.Moved(by))

    def on_key(self, event: events.Key) -> None:
        if event.key in ("up", "down"):
            event.stop()
            self.action_move(1 if event.key == "down" else -1)

    @property
    def hints(self) -> list[Hint]:
        return [
            Hint("↓", "next", "move(1)"),
            Hint("↑", "previous", "move(-1)"),
            Hint("Enter", "message", "enter"),
            Hint("Esc", "close", "screen.stop"),
        ]
