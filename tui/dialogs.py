"""The small dialogs: pick from a list, write a line or a text, confirm. Each returns a typed value; None: cancelled.

Owns their look and keys. Knows nothing of the use of their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Label, OptionList, TextArea
from textual.widgets.option_list import Option

DIALOG_CSS = """
{name} {{ align: center middle; }}
{name} > Vertical {{
    width: 72; max-width: 100%; height: auto; max-height: 100%;
    border: round $primary; background: $surface; padding: 0 1;
}}
{name} Label {{ width: 1fr; color: $text-muted; }}
{name} Input {{ background: $boost; margin: 0 0 1 0; }}
{name} OptionList {{
    height: auto; max-height: 14; background: $surface; text-wrap: nowrap; text-overflow: ellipsis;
}}
"""


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of a list: the value it returns, its label, and a dim detail after it."""

    value: str
    label: str
    detail: str = ""


class PickScreen(ModalScreen[str | None]):
    """Pick one line of a list; typing filters it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel", show=False)]
    DEFAULT_CSS = DIALOG_CSS.format(name="PickScreen")

    def __init__(self, title: str, choices: Sequence[Choice], current: str = "") -> None:
        super().__init__()
        self._title = title
        self._choices = choices
        self._current = current

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = self._title
            box.border_subtitle = "Enter chooses, Esc cancels"
            yield Input(placeholder="type to filter", compact=True)
            yield OptionList(compact=True)

    def on_mount(self) -> None:
        self._fill("")

    @on(Input.Changed)
    def _filter(self, event: Input.Changed) -> None:
        self._fill(event.value)

    def _fill(self, words: str) -> None:
        options = self.query_one(OptionList)
        options.clear_options()
        matches = [
            choice for choice in self._choices if all(word in choice.label.lower() for word in words.lower().split())
        ]
        for choice in matches:
            text = Text(no_wrap=True, overflow="ellipsis")
            text.append(choice.label, "bold" if choice.value == self._current else "")
            text.append(f"  {choice.detail}", "dim")
            options.add_option(Option(text, id=choice.value))
        if matches:
            options.highlighted = next((i for i, choice in enumerate(matches) if choice.value == self._current), 0)

    def on_key(self, event: events.Key) -> None:
        options = self.query_one(OptionList)
        if event.key in ("up", "down") and not options.has_focus:
            event.stop()
            options.action_cursor_up() if event.key == "up" else options.action_cursor_down()

    @on(Input.Submitted)
    def _submitted(self) -> None:
        options = self.query_one(OptionList)
        if options.highlighted is not None:
            self.dismiss(options.get_option_at_index(options.highlighted).id)

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)


class LineScreen(ModalScreen[str | None]):
    """Write one line."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel", show=False)]
    DEFAULT_CSS = DIALOG_CSS.format(name="LineScreen")

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title = title
        self._text = text

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = self._title
            box.border_subtitle = "Enter saves, Esc cancels"
            yield Input(self._text, compact=True)

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)


class TextScreen(ModalScreen[str | None]):
    """Write a text of several lines."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Cancel", show=False),
        Binding("ctrl+s", "save", "Save", show=False, priority=True),
    ]
    DEFAULT_CSS = DIALOG_CSS.format(name="TextScreen") + "TextScreen TextArea { height: 10; background: $boost; }"

    def __init__(self, title: str, text: str, help_text: str) -> None:
        super().__init__()
        self._title = title
        self._text = text
        self._help = help_text

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = self._title
            box.border_subtitle = "Ctrl+S saves, Esc cancels"
            yield Label(self._help)
            yield TextArea(self._text, soft_wrap=True, highlight_cursor_line=False, compact=True)

    def action_save(self) -> None:
        self.dismiss(self.query_one(TextArea).text.strip())


class ConfirmScreen(ModalScreen[bool]):
    """Ask before something that cannot be undone."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,n", "dismiss(False)", "No", show=False),
        Binding("y", "dismiss(True)", "Yes", show=False),
    ]
    DEFAULT_CSS = DIALOG_CSS.format(name="ConfirmScreen")

    def __init__(self, question: str, yes: str) -> None:
        super().__init__()
        self._question = question
        self._yes = yes

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Are you sure?"
            box.border_subtitle = "y or n"
            yield Label(self._question, markup=False)
            yield OptionList(Option("No", id="no"), Option(Text(self._yes), id="yes"), compact=True)

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id == "yes")
