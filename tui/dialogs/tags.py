"""The dialog that edits the tags of a chat: a line with all of them, and below it the known ones to choose from.

Owns its look and keys. Knows nothing of chats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Input, Label, OptionList
from textual.widgets.option_list import Option

from edgelm.tui.dialogs.basic import DIALOG_CSS, Dialog
from edgelm.tui.fields import LineField
from edgelm.tui.hints import CANCEL, Hint, footer
from edgelm.tui.palette import list_text
from edgelm.tui.tags import tag_names


class TagScreen(Dialog[tuple[str, ...] | None]):
    """Edit tags; returns all of them, None: cancelled."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel", show=False)]
    DEFAULT_CSS = DIALOG_CSS.format(name="TagScreen")

    def __init__(self, tags: Sequence[str], known: Sequence[str]) -> None:
        super().__init__()
        self._tags = tags
        self._known = known

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Tags of the chat"
            box.border_subtitle = footer([Hint("Enter", "saves", "screen.save"), CANCEL])
            yield Label("Words, with spaces between them. #TAG in the search filters.")
            yield LineField(" ".join(self._tags), placeholder="work ideas", select_on_focus=False)
            yield OptionList()

    def on_mount(self) -> None:
        self.query_one(OptionList).display = bool(self._known)
        self._mark()

    @on(Input.Changed)
    def _mark(self) -> None:
        """Show which of the known tags the chat has."""
        options = self.query_one(OptionList)
        place = options.highlighted
        chosen = tag_names(self.query_one(Input).value)
        options.clear_options()
        for tag in self._known:
            text = Text(f"{'✓' if tag in chosen else ' '} {tag}", "" if tag in chosen else "dim")
            options.add_option(Option(list_text(text, self.app.current_theme), id=tag))
        options.highlighted = place

    @on(OptionList.OptionSelected)
    def _toggle(self, event: OptionList.OptionSelected) -> None:
        field, tag = self.query_one(Input), event.option_id
        tags = tag_names(field.value)
        field.value = " ".join([name for name in tags if name != tag] + ([] if tag is None or tag in tags else [tag]))

    def on_key(self, event: events.Key) -> None:
        field, options = self.query_one(Input), self.query_one(OptionList)
        if event.key == "down" and field.has_focus and self._known:
            event.stop()
            options.focus()
            options.highlighted = 0
        elif event.key == "up" and options.has_focus and options.highlighted in (None, 0):
            event.stop()
            event.prevent_default()
            field.focus()

    @on(Input.Submitted)
    def action_save(self) -> None:
        self.dismiss(tuple(tag_names(self.query_one(Input).value)))
