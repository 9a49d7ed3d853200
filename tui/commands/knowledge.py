"""The commands about knowledge, and their dialogs: what a chat reads for its questions, and what may leave the machine.

Owns what is asked and reported. How passages are found for a question is in reader.py.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Label, OptionList, Static
from textual.widgets.option_list import Option

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.chats.knowledge.index import GUIDE, Refreshed
from edgelm.client.reader import Reader, SendQuestion, names_of, size_words
from edgelm.client.session import Session
from edgelm.tui.commands.keymap import keymap_of
from edgelm.tui.commands.table import HelpScreen
from edgelm.tui.dialogs.basic import DIALOG_CSS
from edgelm.tui.hints import Hint, footer
from edgelm.tui.lines import clean
from edgelm.tui.palette import list_text
from edgelm.tui.prompt.paths import absolute_path
from edgelm.tui.screen_view import ScreenView
from edgelm.tui.transcript.passages import one_line
from edgelm.tui.workspace import Workspace

MAX_LISTED = 200  # files that are left out


class Send(Protocol):
    """Sends a message in the open chat; `roots` are read for it instead of the chat's knowledge."""

    def __call__(self, text: str, roots: tuple[str, ...] = ()) -> None: ...


class KnowledgeActions:
    """Runs the commands `know` and `help`. Each may raise EdgeLMError."""

    def __init__(self, app: App[Any], workspace: Workspace, reader: Reader, view: ScreenView, send: Send) -> None:
        self._app = app
        self._workspace = workspace
        self._reader = reader
        self._view = view
        self._send = send
        self.by_name: dict[str, Callable[[str], Awaitable[None]]] = {"know": self._know, "help": self._help}

    async def _help(self, argument: str) -> None:
        """Ask about edgelm, with the guide as the knowledge of this question; without one, show keys and commands."""
        if argument:
            self._send(argument, (GUIDE,))
        else:
            self._app.push_screen(HelpScreen(keymap_of(self._app).groups))

    async def _know(self, argument: str) -> None:
        verb, _, path = argument.partition(" ")
        if not argument:
            await self._list()
        elif verb == "off":
            await self._remove(path.strip())
        else:
            await self._add(argument)

    async def _add(self, argument: str) -> None:
        """Index a file or folder, and read it for the questions of this chat from now on."""
        session = self._workspace.session
        root = argument if argument == GUIDE else await asyncio.to_thread(absolute_path, argument)
        refreshed = await self._refresh((root,))
        left_out = f"; {len(refreshed.left_out):,} left out: /know shows why" if refreshed.left_out else ""
        if not refreshed.num_passages:
            reason = refreshed.left_out[0].reason if refreshed.left_out else "it is empty"
            raise RequestError(f"there is nothing to read in {root}: {reason}", "give text, Markdown or code")
        self._now(session).add_knowledge(root)
        self._notify(f"{names_of((root,))}: {size_words(refreshed)}{left_out}")

    async def _remove(self, path: str) -> None:
        session = self._workspace.session
        known = session.chat.knowledge
        if not known:
            raise RequestError("this chat has no knowledge", "/know PATH adds a file or folder")
        root = path if path in known else await asyncio.to_thread(absolute_path, path) if path else ""
        if root and root not in known:
            raise RequestError(f"{root} is no knowledge of this chat", "/know shows what is")
        self._forget(session, (root,) if root else known)

    def _forget(self, session: Session, roots: tuple[str, ...]) -> None:
        session.remove_knowledge(roots)
        self._notify(f"{names_of(roots)} will not be read any more")

    def _now(self, session: Session) -> Session:
        """Return the session of the same chat: while files were read, the user may have opened it again."""
        opened = self._workspace.session
        return opened if opened.chat.id == session.chat.id else session

    async def _list(self) -> None:
        session = self._workspace.session
        entries = [await self._look(root) for root in session.chat.knowledge]
        if not entries:
            raise RequestError("this chat has no knowledge", "/know PATH adds a file or folder")
        removed = await self._app.push_screen_wait(KnowledgeScreen(entries))
        if removed is not None:
            self._forget(self._now(session), (removed,))

    async def _look(self, root: str) -> Entry:
        try:
            return Entry(root, await self._refresh((root,)))
        except EdgeLMError as error:
            return Entry(root, error=str(error))

    async def _refresh(self, roots: tuple[str, ...]) -> Refreshed:
        """Index what is new and changed in roots, with a line of progress."""
        try:
            activity = f"reading {one_line(names_of(roots))}"
            return await self._reader.thread.run(
                lambda knowledge: knowledge.refresh(roots), self._view.show_reading, activity
            )
        finally:
            self._view.show_reading("")

    def _notify(self, text: str) -> None:
        self._app.notify(clean(text), markup=False)


@dataclass(frozen=True, slots=True)
class Entry:
    """A root of a chat, and what is read there or why nothing is."""

    root: str
    refreshed: Refreshed | None = None
    error: str = ""


class KnowledgeScreen(ModalScreen[str | None]):
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


class SendScreen(ModalScreen[bool]):
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
