"""The list of chats, pinned ones first and then by age, and the search over all their text.

Owns the place of the list beside or over the conversation, and its keys. Its lines are made in chat_list.py. Knows
nothing of how chats are stored and opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message as Event
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from edgelm.chats.history import Chat, Hit
from edgelm.tui.chat_list import ARCHIVE, Row, chat_rows, hit_rows
from edgelm.tui.commands.keymap import keymap_of
from edgelm.tui.commands.table import SIDEBAR_KEYS
from edgelm.tui.dialogs.basic import FOCUS_CSS
from edgelm.tui.fields import LineField
from edgelm.tui.hints import Hint
from edgelm.tui.lines import cut_words
from edgelm.tui.palette import list_text

NARROW = 100  # columns of the terminal; below, the list opens over the conversation


class ChatList(OptionList):
    """The lines. A click opens a chat, the right button asks what to do with it."""

    @dataclass
    class Asked(Event):
        """The right button was pressed on a line."""

    class Resized(Event):
        """The lines have another width."""

    def on_resize(self) -> None:
        self.post_message(self.Resized())

    def on_click(self, event: events.Click) -> None:
        index = event.style.meta.get("option")
        if event.button == 3 and index is not None:
            event.prevent_default()
            event.stop()
            if not self.get_option_at_index(index).disabled:
                self.focus()
                self.highlighted = index
                self.post_message(self.Asked())


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

        text: str

    @dataclass
    class Acted(Event):
        """A key was pressed on a chat: title, pin, tag, archive, delete, or menu to ask for one of them."""

        action: str
        chat_id: int

    class Closed(Event):
        """The list was left for the prompt."""

    def __init__(self) -> None:
        super().__init__(id="sidebar")
        self.can_undo = False  # a chat was deleted in this run
        self._chats: Sequence[Chat] = ()
        self._hits: dict[int, Hit] = {}
        self._rows: list[Row] = []
        self._open_id: int | None = None
        self._unfolded = False  # the archive
        self._shown = ""  # the search whose hits are listed
        self._num_asked = 0  # how often Enter was pressed before they came

    def compose(self) -> ComposeResult:
        key = keymap_of(self.app).label("run('search')", "Ctrl+F")
        yield LineField(placeholder=f"Search  {key}".rstrip(), id="search", select_on_focus=True)
        yield ChatList(id="chats")

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
    def typed(self) -> str:
        """The typed search."""
        return self.query_one(Input).value.strip()

    def show_chats(self, chats: Sequence[Chat], open_id: int | None, *, can_undo: bool = False) -> None:
        """Show all chats, or search again if a search is shown."""
        moved = open_id != self._open_id
        self._chats, self._open_id = chats, open_id
        self.set_class(bool(self.typed), "-searching")
        if self.typed:
            self.post_message(self.Searched(self.typed))
        else:
            self._fill(chat_rows(chats, open_id, unfolded=self._unfolded), to_open=moved)
        if can_undo != self.can_undo:
            self.can_undo = can_undo
            self.refresh_bindings()  # the status line shows other hints

    def show_hits(self, text: str, hits: Sequence[Hit]) -> None:
        """Show the hits of a search, unless it has changed since."""
        if text == self.typed:
            self.add_class("-searching")
            self._hits = {hit.chat.id: hit for hit in hits}
            self._fill(hit_rows(hits, self._open_id))
            asked, self._num_asked, self._shown = self._num_asked, 0, text
            if asked and hits:
                self._focus_list()
            if asked > 1 and hits:
                self.query_one(OptionList).action_select()

    def search(self, words: str = "") -> None:
        """Show the list with the cursor in the search, with these words if there are any."""
        self.display = True
        field = self.query_one(Input)
        if words:
            field.value = words
        self.screen.set_focus(field)  # now: `focus` waits for the keys behind this one

    def _fill(self, rows: list[Row], *, to_open: bool = False) -> None:
        """Show these lines. The cursor stays on its chat while the list has the focus, or else goes to the open one.

        Where only texts differ, nothing moves.
        """
        options = self.query_one(OptionList)
        before, self._rows = self._rows, rows
        prompts = list(map(self._prompt, rows))
        place = options.highlighted
        if [row.id for row in rows] == [row.id for row in before]:
            for i, (row, old) in enumerate(zip(rows, before, strict=True)):
                if row.text != old.text:
                    options.replace_option_prompt_at_index(i, prompts[i])
            if not to_open:
                return
        else:
            scrolled = options.scroll_y
            options.clear_options()
            lines = zip(rows, prompts, strict=True)
            options.add_options([Option(prompt, id=row.id, disabled=row.id is None) for row, prompt in lines])
            options.scroll_to(y=scrolled, animate=False)
        places = {row.id: i for i, row in enumerate(rows) if row.id is not None}
        opened = places.get(str(self._open_id))
        if options.has_focus and place is not None and place < len(before) and not (to_open and opened is not None):
            kept = places.get(before[place].id or "")
            options.highlighted = _nearest(rows, place) if kept is None else kept
        else:
            options.highlighted = opened

    def _prompt(self, row: Row) -> Content:
        """Return a line, which ends with a whole word; a hit is wrapped instead."""
        width = 0 if self.has_class("-searching") else self.query_one(OptionList).scrollable_content_region.width
        lines = (cut_words(line, width) for line in row.text.split("\n", allow_blank=True))
        return list_text(Text("\n").join(lines) if width else row.text, self.app.current_theme)

    @on(ChatList.Resized)
    def _resized(self) -> None:
        options = self.query_one(OptionList)
        for i, row in enumerate(self._rows):
            options.replace_option_prompt_at_index(i, self._prompt(row))

    # Keys

    @on(Input.Changed, "#search")
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self._num_asked = 0
        if self.typed:
            self.post_message(self.Searched(self.typed))
        else:
            self._shown = ""
            self.remove_class("-searching")
            self._fill(chat_rows(self._chats, self._open_id, unfolded=self._unfolded), to_open=True)

    @on(Input.Submitted, "#search")
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.action_list()

    def action_list(self) -> None:
        """Go to the list; where the hits are still to come, then, and at the second time to the first of them."""
        if self.typed == self._shown:
            self._focus_list()
        else:
            self._num_asked += 1

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if event.option_id == ARCHIVE:
            self._unfolded = not self._unfolded
            self._fill(chat_rows(self._chats, self._open_id, unfolded=self._unfolded))
        elif event.option_id is not None:
            chat_id = int(event.option_id)
            hit = self._hits.get(chat_id) if self.typed else None
            self.post_message(self.Opened(chat_id, hit.message if hit else None))

    @on(ChatList.Asked)
    def _asked(self, event: ChatList.Asked) -> None:
        event.stop()
        self.action_act("menu")

    def action_act(self, action: str) -> None:
        """Do something with the chosen chat."""
        options = self.query_one(OptionList)
        index = options.highlighted
        if index is not None and (chat_id := options.get_option_at_index(index).id) not in (None, ARCHIVE):
            self.post_message(self.Acted(action, int(chat_id)))

    def action_close(self) -> None:
        """End the search, and go back to the prompt."""
        self.query_one(Input).value = ""
        self.post_message(self.Closed())

    @property
    def hints(self) -> list[Hint]:
        """Return the hints for the search, or for the chosen chat."""
        if self.query_one(Input).has_focus:
            return [Hint("Enter", "results", "list"), Hint("Esc", "back", "close")]
        undo = [Hint("Ctrl+Z", "undo", "screen.run('undo')")] if self.can_undo else []
        names = (
            ("Del", "delete", "delete"),
            ("p", "pin", "pin"),
            ("t", "tag", "tag"),
            ("a", "archive", "archive"),
            ("r", "rename", "title"),
        )
        acts = [Hint(key, label, f"act({action!r})") for key, label, action in names]
        return [*undo, acts[0], Hint("Esc", "back", "close"), *acts[1:]]

    def on_key(self, event: events.Key) -> None:
        field, options = self.query_one(Input), self.query_one(OptionList)
        if event.key == "escape":
            event.stop()
            self.action_close()
        elif event.key == "down" and field.has_focus:
            event.stop()
            self.action_list()
        elif event.key == "up" and options.has_focus and options.highlighted in (None, _nearest(self._rows, 0)):
            event.stop()
            event.prevent_default()
            field.focus()

    def _focus_list(self) -> None:
        options = self.query_one(OptionList)
        options.focus()
        if options.highlighted is None:
            options.action_cursor_down()


def _nearest(rows: Sequence[Row], place: int) -> int | None:
    """Return the place of a line that can be chosen: the first one from here on, else the last one before."""
    places = [i for i, row in enumerate(rows) if row.id is not None]
    return next((i for i in places if i >= place), places[-1] if places else None)
