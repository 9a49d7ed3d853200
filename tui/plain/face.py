"""Plain lines as the face of commands: what is told is a line, and what is asked is read from one.

Owns how each is done with the reader and the writer. Knows nothing of single commands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from edgelm.base.errors import EdgeLMError
from edgelm.chats.attachments import Attachment
from edgelm.chats.clipboard import copy_text
from edgelm.chats.history import Message
from edgelm.chats.store import ChatsError
from edgelm.client.reader import Reader
from edgelm.client.work import TaskWork
from edgelm.tui.commands.face import Part
from edgelm.tui.commands.keymap import KeyMap
from edgelm.tui.commands.messages import offer_pages
from edgelm.tui.plain.files import PlainFiles
from edgelm.tui.plain.lines import LineReader, Notices, Writer, raised_interrupt, told
from edgelm.tui.pulls import Pull, Pulls
from edgelm.tui.workspace import Workspace

if TYPE_CHECKING:
    from textual.screen import ModalScreen

FIRST_S = 3.0  # to the first line about the progress of a pull

T = TypeVar("T")


class PlainFace:
    """Commands in plain lines. Ctrl+C at a line cancels the command that asks for it."""

    def __init__(
        self, workspace: Workspace, reader: Reader, lines: LineReader, writer: Writer, pull_command: Sequence[str]
    ) -> None:
        self.workspace = workspace
        self.reader = reader
        self.lines = lines
        self.writer = writer
        self.files = PlainFiles(workspace, writer)
        self.pulls = Pulls(TaskWork, self._tell_pulls, lambda _: self._pull_ended.set(), pull_command)
        self.listed: dict[str, list[str]] = {}
        self.messages: list[int | None] = []  # the message of each chat of the told list that a search has found
        self.reads_reasoning = False
        self.has_left = False
        self._notices = Notices(writer)
        self._pull_ended = asyncio.Event()

    @property
    def keymap(self) -> KeyMap:
        return KeyMap()

    def either(self, on_screen: T, in_lines: T) -> T:
        return in_lines

    def tell(self, text: str) -> None:
        self.writer.line(text)

    def mention(self, text: str) -> None:
        self.writer.line(text)

    def tell_deleted(self, title: str) -> None:
        self.writer.line("deleted, /undo brings it back; this is a new chat")

    def complain(self, error: EdgeLMError) -> None:
        self.writer.error(error)

    def show(self, *parts: Part) -> None:
        pass

    def show_activity(self, activity: str) -> None:
        pass  # `wait` tells it

    async def connect(self, work: Coroutine[Any, Any, T]) -> T:
        return await told(self.writer, "connecting", work)

    async def wait(self, activity: str, work: Coroutine[Any, Any, T]) -> T:
        return await told(self.writer, activity, work)

    async def ask(self, dialog: Callable[[], ModalScreen[T]], in_lines: Callable[[], Awaitable[T]]) -> T:
        return await in_lines()

    async def line(self, title: str, text: str, prompt: str = "") -> str | None:
        if not prompt:
            return text
        if not self.lines.can_prefill:
            return None
        with suppress(EOFError):
            return self._read(lambda: self.lines.line(prompt, text).strip())
        return None

    async def confirm(self, in_line: str, question: str = "", yes: str = "Yes") -> bool:
        return self._read(lambda: self.lines.confirm(in_line))

    async def send(self, text: str, roots: tuple[str, ...] = (), edited: int | None = None) -> None:
        attached: tuple[Attachment, ...] = ()
        if not roots and self.lines.is_terminal:
            await offer_pages(self, text, self.add)
        if not roots:
            text, attached = await self.files.take(text)
        if edited is not None:
            attached = (*self.workspace.session.tree.messages[edited].attachments, *attached)
        with suppress(ChatsError):
            if note := await self.workspace.adopt(self.workspace.session):
                self.tell(note)
        self.workspace.send(text, edited, roots, attached)

    async def edit(self, message: Message) -> None:
        if not self.lines.can_prefill:
            self.tell(f"your last message: {message.text}")
        text = ""
        with suppress(EOFError):
            text = self._read(lambda: self.lines.message("new version: ", message.text))
        if text.strip():
            await self.send(text, edited=message.id)
        else:
            self.tell("not edited")

    async def attach(self, path: str) -> None:
        await self.files.attach(path)

    async def add(self, attachment: Attachment) -> None:
        await self.files.add(attachment)

    async def propose(self, text: str) -> None:
        self.tell(f"the message: {text}")
        if await self.confirm("send it?"):
            await self.send(text)

    async def copy(self, text: str) -> None:
        await asyncio.to_thread(copy_text, text)
        self.tell(f"copied, lines: {text.count(chr(10)) + 1:,}")

    async def attach_clipboard(self) -> None:
        await self.files.attach_clipboard()

    async def leave(self) -> None:
        self.has_left = True

    async def pull(self, model: str) -> Pull:
        """Pull a model to its end, and tell from time to time how far it is; Ctrl+C stops it."""
        self._notices = Notices(self.writer)
        self._pull_ended.clear()
        pull = self.pulls.start(model, self.workspace.session.chat.id)
        with suppress(asyncio.CancelledError):
            await self._pull_ended.wait()
        await self.pulls.end()
        return pull

    def _tell_pulls(self) -> None:
        for pull in self.pulls.running:
            self._notices.show(", ".join(pull.progress), FIRST_S)

    def _read(self, read: Callable[[], T]) -> T:
        """Read from the user; nothing else runs meanwhile. Ctrl+C cancels the command. Raises EOFError."""
        try:
            with raised_interrupt():
                return read()
        except KeyboardInterrupt:
            raise asyncio.CancelledError from None
