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
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen, ScreenResultType
from textual.widgets import Input, Label, OptionList, TextArea
from textual.widgets.option_list import Option

from edgelm.tui.fields import LineField, TextField
from edgelm.tui.hints import CANCEL, Hint, footer
from edgelm.tui.palette import list_text

# A bar stands left of the field or list that has the focus: it is seen in 16 colours too.
FOCUS_CSS = """
{name} Input, {name} TextArea {{
    border: none; border-left: blank; padding: 0; background: $boost; background-tint: transparent;
}}
{name} Input {{ height: 1; }}
{name} OptionList {{
    border: none; border-left: blank; padding: 0; background: $surface; background-tint: transparent;
}}
{name} Input:focus, {name} TextArea:focus, {name} OptionList:focus {{
    border: none; border-left: outer $primary; background-tint: transparent;
}}
{name} OptionList:ansi:blur > .option-list--option-highlighted {{
    color: $block-cursor-foreground; background: $block-cursor-background;
}}
"""
DIALOG_CSS = (
    FOCUS_CSS
    + """
{name} {{ align: center middle; }}
{name} > Vertical {{
    width: 72; max-width: 100%; height: auto; max-height: 100%;
    border: round $primary; border-title-color: $foreground; border-subtitle-color: $text-muted;
    background: $surface; padding: 0 1;
}}
{name} Label {{ width: 1fr; color: $text-muted; }}
{name} Input {{ margin: 0 0 1 0; }}
{name} OptionList, {name} VerticalScroll {{
    scrollbar-background: $surface; scrollbar-background-hover: $surface; scrollbar-background-active: $surface;
}}
{name} OptionList {{
    height: auto; max-height: 14; scrollbar-size-vertical: 1; text-wrap: nowrap; text-overflow: ellipsis;
}}
"""
)


class Dialog(ModalScreen[ScreenResultType]):
    """A dialog that closes once: of two Enters in one read, the second finds it closed."""

    def dismiss(self, result: ScreenResultType | None = None) -> AwaitComplete:
        if self not in self.app.screen_stack:  # Textual would close what is below
            return AwaitComplete()
        return super().dismiss(result)


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of a list: the value it returns, its label, and a dim detail after it."""

    value: str
    label: str
    detail: str = ""


CHOOSE = Hint("Enter", "chooses", "screen.choose")


class PickScreen(Dialog[str | None]):
    """Pick one line of a list; typing filters it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel", show=False)]
    DEFAULT_CSS = DIALOG_CSS.format(name="PickScreen")

    def __init__(
        self, title: str, choices: Sequence[Choice], current: str = "", hints: Sequence[Hint] = (CHOOSE, CANCEL)
    ) -> None:
        super().__init__()
        self._title = title
        self._choices = choices
        self._current = current
        self._hints = hints

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = Content(self._title)
            box.border_subtitle = footer(self._hints)
            yield LineField(placeholder="type to filter")
            yield OptionList()
            yield from self.compose_below()

    def compose_below(self) -> ComposeResult:
        """Yield what stands below the list, such as a preview of the chosen line."""
        return iter(())

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
            options.add_option(Option(list_text(text, self.app.current_theme), id=choice.value))
        if matches:
            options.highlighted = next((i for i, choice in enumerate(matches) if choice.value == self._current), 0)

    def on_key(self, event: events.Key) -> None:
        options = self.query_one(OptionList)
        if event.key in ("up", "down") and not options.has_focus:
            event.stop()
            self.action_move(-1 if event.key == "up" else 1)

    def action_move(self, by: int) -> None:
        """Choose the line above (-1) or below (1)."""
        options = self.query_one(OptionList)
        options.action_cursor_up() if by < 0 else options.action_cursor_down()

    @on(Input.Submitted)
    def action_choose(self) -> None:
        options = self.query_one(OptionList)
        if options.highlighted is not None:
            self.dismiss(options.get_option_at_index(options.highlighted).id)

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)


class LineScreen(Dialog[str | None]):
    """Write one line."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel", show=False)]
    DEFAULT_CSS = DIALOG_CSS.format(name="LineScreen")

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title = title
        self._text = text

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = Content(self._title)
            box.border_subtitle = footer([Hint("Enter", "saves", "screen.save"), CANCEL])
            yield LineField(self._text)

    @on(Input.Submitted)
    def action_save(self) -> None:
        self.dismiss(self.query_one(Input).value.strip() or None)


class TextScreen(Dialog[str | None]):
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
            box.border_title = Content(self._title)
            box.border_subtitle = footer([Hint("Ctrl+S", "saves", "screen.save"), CANCEL])
            yield Label(self._help)
            yield TextField(self._text, soft_wrap=True, highlight_cursor_line=False)

    def action_save(self) -> None:
        self.dismiss(self.query_one(TextArea).text.strip())


class ConfirmScreen(Dialog[bool]):
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
            box.border_subtitle = footer(
                [Hint("y", "yes", "screen.dismiss(True)"), Hint("n", "no", "screen.dismiss(False)")]
            )
            yield Label(self._question, markup=False)
            yield OptionList(Option("No", id="no"), Option(Content(self._yes), id="yes"))

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id == "yes")
