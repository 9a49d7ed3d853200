"""The list of chats, newest first, and the search over all their text.

Owns what the list shows. Knows nothing of how chats are stored and what opening one does.
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

from edgelm.chats.model import Chat, Hit
from edgelm.tui.keys import SIDEBAR_KEYS
from edgelm.tui.lines import clean

MAX_SHOWN = 300
DAY_S = 86_400


class Sidebar(Vertical):
    """Chats, or what a search found among them."""

    BINDINGS: ClassVar[list[BindingType]] = [key.binding for key in SIDEBAR_KEYS if key.action]
    DEFAULT_CSS = """
    Sidebar { width: 30; height: 1fr; border-right: solid $border-blurred; }
    Sidebar.-narrow { layer: above; width: 100%; max-width: 40; dock: left; background: $background; }
    Sidebar Input { margin: 0 1 1 1; background: transparent; }
    Sidebar Input:focus { background: $boost; }
    Sidebar OptionList {
        height: 1fr; margin-left: 1; background: transparent; scrollbar-size-vertical: 1;
        text-wrap: nowrap; text-overflow: ellipsis;
    }
    Sidebar.-searching OptionList { text-wrap: wrap; }
    """

    @dataclass
    class Opened(Event):
        """A chat was chosen, maybe at a message that a search found."""

        chat_id: int
        message_id: int | None

    @dataclass
    class Searched(Event):
        """The words of the search changed; whoever knows answers with `show_hits`."""

        words: str

    @dataclass
    class Deleted(Event):
        """The chat under the cursor shall go."""

        chat_id: int

    class Closed(Event):
        """Escape was pressed."""

    def __init__(self) -> None:
        super().__init__(id="sidebar")
        self._chats: Sequence[Chat] = ()
        self._hits: dict[int, Hit] = {}
        self._open: int | None = None

    def compose(self) -> ComposeResult:
        yield Input(placeholder="Search  Ctrl+F", id="search", select_on_focus=True, compact=True)
        yield OptionList(id="chats", compact=True)

    @property
    def words(self) -> str:
        return self.query_one(Input).value.strip()

    def show_chats(self, chats: Sequence[Chat], open_id: int | None) -> None:
        """Show all chats."""
        self._chats, self._open = chats, open_id
        self.set_class(bool(self.words), "-searching")
        if not self.words:
            self._fill(chats, self._chat_text)

    def show_hits(self, words: str, hits: Sequence[Hit]) -> None:
        """Show what a search found, unless the words have changed since."""
        if words == self.words:
            self.add_class("-searching")
            self._hits = {hit.chat.id: hit for hit in hits}
            self._fill([hit.chat for hit in hits], self._hit_text)

    def search(self, words: str = "") -> None:
        """Put the cursor into the search, with these words if there are any."""
        field = self.query_one(Input)
        if words:
            field.value = words
        field.focus()

    def clear_search(self) -> None:
        self.query_one(Input).value = ""

    def _fill(self, chats: Sequence[Chat], text: Callable[[Chat], Text]) -> None:
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options([Option(text(chat), id=str(chat.id)) for chat in chats[:MAX_SHOWN]])
        if len(chats) > MAX_SHOWN:
            options.add_option(Option(Text(f"… {len(chats) - MAX_SHOWN:,} more: search", "dim"), disabled=True))
        if not chats:
            options.add_option(Option(Text("nothing found" if self.words else "no chats yet", "dim"), disabled=True))
        here = next((i for i, chat in enumerate(chats[:MAX_SHOWN]) if chat.id == self._open), None)
        options.highlighted = here

    def _chat_text(self, chat: Chat) -> Text:
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(clean(chat.title), "bold" if chat.id == self._open else "")
        text.append(f"\n{_when(chat.changed)}", "dim")
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
        options = self.query_one(OptionList)
        options.focus()
        if options.highlighted is None:
            options.action_cursor_down()

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if event.option_id is not None:
            chat_id = int(event.option_id)
            hit = self._hits.get(chat_id) if self.words else None
            self.post_message(self.Opened(chat_id, hit.message if hit else None))

    def action_delete_chat(self) -> None:
        options = self.query_one(OptionList)
        at = options.highlighted
        if options.has_focus and at is not None and (option_id := options.get_option_at_index(at).id) is not None:
            self.post_message(self.Deleted(int(option_id)))

    def on_key(self, event: events.Key) -> None:
        field, options = self.query_one(Input), self.query_one(OptionList)
        if event.key == "escape":
            event.stop()
            self.clear_search()
            self.post_message(self.Closed())
        elif event.key == "down" and field.has_focus:
            event.stop()
            options.focus()
            if options.highlighted is None:
                options.action_cursor_down()
        elif event.key == "up" and options.has_focus and options.highlighted in (None, 0):
            event.stop()
            event.prevent_default()
            field.focus()


def _when(moment: float) -> str:
    """Return when a chat was last used, as short as its age allows."""
    then, now = datetime.fromtimestamp(moment), datetime.fromtimestamp(time.time())  # noqa: DTZ006 - the reader's own time
    days = (now.date() - then.date()).days
    if days <= 0:
        return f"{then:%H:%M}"
    if days == 1:
        return "yesterday"
    if days < 7:
        return f"{then:%A}"
    return f"{then.day} {then:%b}" if then.year == now.year else f"{then.day} {then:%b %Y}"
