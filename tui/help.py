"""The page behind F1: every key and every command, from the tables that define them.

Owns its layout. Knows nothing of what keys and commands do.
"""

from __future__ import annotations

from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from edgelm.tui.commands import COMMANDS
from edgelm.tui.keys import KEY_GROUPS

NOTES = (
    "To select with the mouse where the terminal should do it, hold Shift (Option on a Mac's Terminal).",
    "Copying uses OSC 52, which works over SSH; in tmux it needs `set -g set-clipboard on`.",
)


class HelpScreen(ModalScreen[None]):
    """Keys and commands."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f1,q,enter", "dismiss(None)", "Close", show=False)]
    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen > VerticalScroll {
        width: 84; max-width: 100%; height: auto; max-height: 100%;
        border: round $primary; background: $surface; padding: 0 1; scrollbar-size-vertical: 1;
    }
    HelpScreen Static { height: auto; }
    """

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = "Keys and commands"
            box.border_subtitle = "Esc closes"
            yield Static(_page())


def _page() -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=24)
    table.add_column()
    for title, keys in KEY_GROUPS:
        table.add_row(Text(title, "bold underline"), "")
        for key in keys:
            table.add_row(Text(key.shown, "bold"), key.help)
        table.add_row("", "")
    table.add_row(Text("Commands", "bold underline"), "")
    for command in COMMANDS:
        table.add_row(Text(command.usage, "bold"), command.help)
    table.add_row("", "")
    for note in NOTES:
        table.add_row("", Text(note, "dim"))
    return table
