"""Files in the plain chat: attached by /attach PATH and by @PATH in a message, each told in a line.

Owns the attachments of the message being written. Knows nothing of how they are read and counted.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.chats.attached_files import Read, full_path, read_attachment, state_of
from edgelm.chats.attachments import Attachment
from edgelm.chats.clipboard import clipboard_picture
from edgelm.client.session import on_disk
from edgelm.tui.plain.lines import Writer, told
from edgelm.tui.prompt.paths import unquoted
from edgelm.tui.prompt.room import context_size, counted, require_sight, room
from edgelm.tui.transcript.attachment_rows import attachment_words
from edgelm.tui.transcript.passages import one_line
from edgelm.tui.workspace import Workspace

# @PATH at the beginning of a word, also in quotes, and with spaces behind a backslash.
_WORD = re.compile(r"""(?:^|(?<=\s))@("[^"\n]+"|'[^'\n]+'|(?:\\.|[^\s\\"'])+)""")


class PlainFiles:
    """The attachments of the next message."""

    def __init__(self, workspace: Workspace, writer: Writer) -> None:
        self._workspace = workspace
        self._writer = writer
        self._attached: list[Attachment] = []
        self._told: set[tuple[str, str]] = set()  # files that changed or are gone: path, digest

    async def attach(self, path: str) -> None:
        """Attach a file or folder; without a path, tell what is attached. Raises EdgeLMError."""
        if path:
            await self._add(path)
        elif not self._attached:
            raise RequestError("nothing is attached", "/attach PATH attaches a file or folder")
        else:
            self.tell(self._attached)

    async def attach_clipboard(self) -> None:
        """Attach the picture on the clipboard. Raises EdgeLMError."""
        number = 1 + sum(not attachment.path for attachment in (*self._sent(), *self._attached))
        picture = await asyncio.to_thread(clipboard_picture, number)
        await require_sight(self._workspace.link, self._workspace.model, (picture,))
        self._attached.append(picture)
        self.tell((picture,))

    async def add(self, attachment: Attachment) -> None:
        """Attach a text that has no file."""
        attachment = await counted(self._workspace.link, self._workspace.model, attachment)
        self._attached.append(attachment)
        self.tell((attachment,))

    def _sent(self) -> list[Attachment]:
        """Return the attachments of the conversation."""
        return [attachment for message in self._workspace.session.tree.path() for attachment in message.attachments]

    def tell(self, attachments: Sequence[Attachment]) -> None:
        """Tell what is attached."""
        for attachment in attachments:
            self._writer.line(f"attached: {attachment_words(attachment)}")

    async def take(self, text: str) -> tuple[str, tuple[Attachment, ...]]:
        """Attach the files that a message names, and return it without their @, with all attachments.

        Raises EdgeLMError.
        """
        await self._tell_changes()
        for match in _WORD.finditer(text):
            if path := _existing(match[1]):
                await self._add(path)
        text = _WORD.sub(lambda match: match[1] if _existing(match[1]) else match[0], text)
        await require_sight(self._workspace.link, self._workspace.model, self._attached)
        attached, self._attached = tuple(self._attached), []
        return text, attached

    async def _add(self, path: str) -> None:
        """Read a file or folder, and tell its tokens and what is left of the context."""
        workspace = self._workspace

        async def read() -> Read:
            read = await asyncio.to_thread(read_attachment, path)
            await require_sight(workspace.link, workspace.model, (read.attachment,))
            return Read(await counted(workspace.link, workspace.model, read.attachment), read.note)

        attachment, note = await told(self._writer, "reading", read())
        self._attached = [*(known for known in self._attached if known.path != path), attachment]
        size = await context_size(workspace.link, workspace.session, workspace.model)
        left = ""
        if size is not None:
            left = f", {room(size, workspace.session, workspace.session.tree.leaf, self._attached).words}"
        self._writer.line(f"attached: {attachment_words(attachment)}{left}")
        if note:
            self._writer.line(note)

    async def _tell_changes(self) -> None:
        """Tell which files of the conversation changed since they were sent."""
        for attachment in on_disk(self._workspace.session):
            state = await asyncio.to_thread(state_of, attachment)
            key = (attachment.path, attachment.digest)
            if state == "same" or key in self._told:
                continue
            self._told.add(key)
            name = one_line(attachment.name)
            if state == "gone":
                self._writer.line(f"{name} is gone; the version that was sent stays in the chat")
            else:
                path = one_line(attachment.path)
                self._writer.line(f"{name} has changed since it was sent; /attach {path} attaches it again")


def _existing(word: str) -> str:
    """Return the absolute path of a file that an @word names; empty if there is none."""
    name = unquoted(word)
    if name == word:
        name = re.sub(r"\\(.)", r"\1", word)
    for candidate in (name, name.rstrip(".,;:!?)")):  # the sentence may end behind it
        try:
            path = full_path(candidate) if candidate else ""
            if path and Path(path).exists():
                return path
        except (EdgeLMError, OSError):
            continue
    return ""
