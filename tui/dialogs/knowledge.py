"""The dialogs about knowledge: what a chat reads for its questions, and what may leave the machine.

Owns their look and words. Knows nothing of how passages are found.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Label, OptionList, Static
from textual.widgets.option_list import Option

from edgelm.chats.knowledge import GUIDE
from edgelm.chats.knowledge.index import Refreshed
from edgelm.client.reader import SendQuestion, names_of, size_words
from edgelm.tui.dialogs.basic import DIALOG_CSS, Dialog
from edgelm.tui.hints import Hint, footer
from edgelm.tui.lines import clean
from edgelm.tui.palette import list_text
from edgelm.tui.transcript.passages import one_line

MAX_LISTED = 200  # files that are left out


@dataclass(frozen=True, slots=True)
class Entry:
    """A root of a chat, and what is read there or why nothing is."""

    root: str
    refreshed: Refreshed | None = None
    error: str = ""


class KnowledgeScreen(Dialog[str | None]):
    """What a chat reads, and what is left out there. Returns the root to remove."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Close", show=False),
        Binding("delete", "remove", "Remove", show=False),
    ]
    DEFAULT_CSS = (
        DIALOG_CSS.format(name="KnowledgeScreen")
        + """
        KnowledgeScreen OptionList { margin: 1 0 0 0; max-height: 8; }
        KnowledgeScreen VerticalScroll { height: auto; max-height: 12; margin: 1 0; scrollbar-size-vertical: 1; }
        KnowledgeScreen #left-out { height: auto; color: $text-muted; }
        """
    )

    def __init__(self, entries: Sequence[Entry]) -> None:
        super().__init__()
        self._entries = entries

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Knowledge of this chat"
            box.border_subtitle = footer(
                [Hint("Del", "removes", "screen.remove"), Hint("Esc", "closes", "screen.dismiss(None)")]
            )
            yield Label("The best passages for each question are read from these; files that change are read again.")
            theme = self.app.current_theme
            yield OptionList(*(Option(list_text(_outline(entry), theme)) for entry in self._entries))
            with VerticalScroll():
                yield Static(id="left-out", markup=False)

    def on_mount(self) -> None:
        self.query_one(OptionList).highlighted = 0

    @on(OptionList.OptionHighlighted)
    def _highlighted(self, event: OptionList.OptionHighlighted) -> None:
        self.query_one("#left-out", Static).update(_left_out(self._entries[event.option_index]))

    def action_remove(self) -> None:
        if (index := self.query_one(OptionList).highlighted) is not None:
            self.dismiss(self._entries[index].root)


def _outline(entry: Entry) -> Text:
    words = entry.error if entry.refreshed is None else size_words(entry.refreshed)
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(one_line(names_of((entry.root,))), "bold")
    text.append(f"  {one_line(words)}", "" if entry.refreshed else "bold $text-error")
    if entry.root != GUIDE:
        text.append(f"  {one_line(shortened(entry.root))}", "dim")
    return text


def _left_out(entry: Entry) -> Text:
    if entry.refreshed is None:
        return Text(one_line(entry.error))
    left_out = entry.refreshed.left_out
    lines = [f"{one_line(item.path)}: {one_line(item.reason)}" for item in left_out[:MAX_LISTED]]
    if len(left_out) > MAX_LISTED:
        lines.append(f"and {len(left_out) - MAX_LISTED:,} more")
    return Text("\n".join(["Left out:", *lines]) if lines else "Nothing is left out.")


def shortened(path: str) -> str:
    """Return a path with ~ for the user's home."""
    home = str(Path.home())
    return "~" + path[len(home) :] if path == home or path.startswith(home + os.sep) else path


class SendScreen(Dialog[bool]):
    """Ask before passages of the user's files, or a chat, go to another machine or program. Returns whether they may.

    No letter answers: the dialog comes when files were read, and the user may be typing the next message.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(False)", "No", show=False)]
    DEFAULT_CSS = (
        DIALOG_CSS.format(name="SendScreen")
        + """
        SendScreen Label { margin: 0 0 1 0; }
        SendScreen VerticalScroll { height: auto; max-height: 60vh; scrollbar-size-vertical: 1; }
        """
    )

    def __init__(self, question: SendQuestion) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        question = self._question
        with Vertical() as box:
            box.border_title = "Send this chat?" if question.num_messages else "Send passages of your files?"
            box.border_subtitle = footer([Hint("Esc:", "no", "screen.dismiss(False)")])
            roots = "\n".join(f"  {one_line(shortened(root))}" for root in question.roots)
            names = "\n".join(f"  {n} {one_line(passage.name)}" for n, passage in enumerate(question.passages, 1))
            num_chars = sum(len(passage.text) for passage in question.passages)
            host = clean(question.host)
            title = one_line(question.title)
            if question.num_messages:
                words = f"The chat “{title}” was not written with {host}. To answer it,"
                yield Label(f"{words} its {question.num_messages - 1} messages are sent there.", markup=False)
                yield OptionList(
                    Option("No: send nothing of it", id="no"),
                    Option(Content(f"Yes: send this chat to {host}, from now on"), id="yes"),
                )
                return
            with VerticalScroll():
                yield Label(f"The chat “{title}” is answered by {host}. It reads these:\n{roots}", markup=False)
                yield Label(f"For this question it would send {num_chars:,} characters of them:\n{names}", markup=False)
            yield OptionList(
                Option("No: ask without them in this chat", id="no"),
                Option(Content(f"Yes: send passages to {host} in this chat"), id="yes"),
            )

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id == "yes")
