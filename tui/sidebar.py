"""The list of chats, newest first, and the search over all their text.

Owns the content of the list and its place beside or over the conversation. Knows nothing of how chats are stored and
opened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.message import Message as Event
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from edgelm.chats.history import Chat, Hit
from edgelm.tui.commands import SIDEBAR_KEYS
from edgelm.tui.dialogs import FOCUS_CSS
from edgelm.tui.hints import Hint
from edgelm.tui.keymap import keymap_of
from edgelm.tui.lines import clean
from edgelm.tui.palette import list_text

MAX_SHOWN = 300
NARROW = 100  # columns of the terminal; below, the list opens over the conversation


class Sidebar(Vertical):
    """The chats, or the hits of a search among them."""

    BINDINGS: ClassVar[list[BindingType]] = [key.binding for key in SIDEBAR_KEYS if key.action]
    DEFAULT_CSS = (
        FOCUS_CSS.format(name="Sidebar")
        + """
    Sidebar { width: 30; height: 1fr; border-right: solid $border-blurred; margin-right: 1; }
    Sidebar.-narrow { layer: above; width: 100%; max-width: 40; dock: left; margin: 0; background: $background; }
    Sidebar Input { margin-bottom: 1; background: transparent; }
    Sidebar OptionList {
        height: 1fr; padding-right: 1; background: transparent; scrollbar-size-vertical: 1;
        text-wrap: nowrap; text-overflow: ellipsis;
    }
    Sidebar.-searching OptionList { text-wrap: wrap; }
    """
    )

    @dataclass
    class Opened(Event):
        """A chat was chosen, at a message if a search found it there."""

        chat_id: int
        message_id: int | None

    @dataclass
    class Searched(Event):
        """The words of the search changed; the receiver calls `show_hits`."""

        words: str

    @dataclass
    class Deleted(Event):
        """Delete was pressed on a chat."""

        chat_id: int

    class Closed(Event):
        """The list was left for the prompt."""

    def __init__(self) -> None:
        super().__init__(id="sidebar")
        self._chats: Sequence[Chat] = ()
        self._hits: dict[int, Hit] = {}
        self._open_id: int | None = None

    def compose(self) -> ComposeResult:
        key = keymap_of(self.app).label("run('search')", "Ctrl+F")
        yield Input(placeholder=f"Search  {key}".rstrip(), id="search", select_on_focus=True)
        yield OptionList(id="chats")

    # Its place

    def fit(self, terminal_width: int) -> None:
        """Stand beside the conversation where there is room, else hide until it is opened over it."""
        narrow = terminal_width < NARROW
        if self.has_class("-narrow") != narrow:
            self.set_class(narrow, "-narrow")
            self.display = not narrow

    def toggle(self) -> None:
        """Show or hide the list."""
        self.display = not self.display
        if not self.display:
            self.post_message(self.Closed())
        elif self.has_class("-narrow"):
            self.query_one(OptionList).focus()

    def leave(self) -> None:
        """Hide the list if it is over the conversation."""
        if self.has_class("-narrow"):
            self.display = False

    # Its content

    @property
    def words(self) -> str:
        return self.query_one(Input).value.strip()

    def show_chats(self, chats: Sequence[Chat], open_id: int | None) -> None:
        """Show all chats, unless a search is shown."""
        self._chats, self._open_id = chats, open_id
        self.set_class(bool(self.words), "-searching")
        if not self.words:
            self._fill(chats, self._chat_text)

    def show_hits(self, words: str, hits: Sequence[Hit]) -> None:
        """Show the hits of a search, unless the words have changed since."""
        if words == self.words:
            self.add_class("-searching")
            self._hits = {hit.chat.id: hit for hit in hits}
            self._fill([hit.chat for hit in hits], self._hit_text)

    def search(self, words: str = "") -> None:
        """Show the list with the cursor in the search, with these words if there are any."""
        self.display = True
        field = self.query_one(Input)
        if words:
            field.value = words
        field.focus()

    def _fill(self, chats: Sequence[Chat], text: Callable[[Chat], Text]) -> None:
        options = self.query_one(OptionList)
        options.clear_options()
        theme = self.app.current_theme
        options.add_options([Option(list_text(text(chat), theme), id=str(chat.id)) for chat in chats[:MAX_SHOWN]])
        if len(chats) > MAX_SHOWN:
            options.add_option(Option(f"… {len(chats) - MAX_SHOWN:,} more: search", disabled=True))
        if not chats:
            options.add_option(Option("nothing found" if self.words else "no chats yet", disabled=True))
        open_index = next((i for i, chat in enumerate(chats[:MAX_SHOWN]) if chat.id == self._open_id), None)
        options.highlighted = open_index

    def _chat_text(self, chat: Chat) -> Text:
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(clean(chat.title), "bold" if chat.id == self._open_id else "")
        text.append(f"\n{_short_date(chat.changed)}", "dim")
        return text

    def _hit_text(self, chat: Chat) -> Text:
        hit = self._hits[chat.id]
        text = Text(no_wrap=True, overflow="ellipsis")
        if hit.message is not None:
            text.append(clean(chat.title) + "\n", "bold")
        for i, part in enumerate(hit.snippet.replace("\n", " ").split("\x02")):
            match, _, rest = part.partition("\x03") if i else ("", "", part)
            text.append(clean(match), "bold underline")
            text.append(clean(rest), "dim" if hit.message is not None else "bold")
        return text

    # Keys

    @on(Input.Changed, "#search")
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        if self.words:
            self.post_message(self.Searched(self.words))
        else:
            self.remove_class("-searching")
            self._fill(self._chats, self._chat_text)

    @on(Input.Submitted, "#search")
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._focus_list()

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if event.option_id is not None:
            chat_id = int(event.option_id)
            hit = self._hits.get(chat_id) if self.words else None
            self.post_message(self.Opened(chat_id, hit.message if hit else None))

    def action_delete_chat(self) -> None:
        options = self.query_one(OptionList)
        index = options.highlighted
        if index is not None and (chat_id := options.get_option_at_index(index).id) is not None:
            self.post_message(self.Deleted(int(chat_id)))

    def action_close(self) -> None:
        """End the search, and go back to the prompt."""
        self.query_one(Input).value = ""
        self.post_message(self.Closed())

    @property
    def hints(self) -> list[Hint]:
        """Return the hints for the chosen chat."""
        return [Hint("Del", "delete", "delete_chat"), Hint("Esc", "back", "close")]

    def on_key(self, event: events.Key) -> None:
        field, options = self.query_one(Input), self.query_one(OptionList)
        if event.key == "escape":
            event.stop()
            self.action_close()
        elif event.key == "down" and field.has_focus:
            event.stop()
            self._focus_list()
        elif event.key == "up" and options.has_focus and options.highlighted in (None, 0):
            event.stop()
            event.prevent_default()
            field.focus()

    def _focus_list(self) -> None:
        options = self.query_one(OptionList)
        options.focus()
        if options.highlighted is None:
            options.action_cursor_down()


def _short_date(timestamp: float) -> str:
    """Return when a chat was last used, as short as its age allows."""
    then, now = datetime.fromtimestamp(timestamp), datetime.fromtimestamp(time.time())  # noqa: DTZ006 - the reader's own time
    days = (now.date() - then.date()).days
    if days <= 0:
        return f"{then:%H:%M}"
    if days == 1:
        return "yesterday"
    if days < 7:
        return f"{then:%A}"
    return f"{then.day} {then:%b}" if then.year == now.year else f"{then.day} {then:%b %Y}"
