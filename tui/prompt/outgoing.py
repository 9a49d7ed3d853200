"""A message between Enter and sending, and its files.

Owns where it was written: it is sent there or not at all. Knows nothing of widgets.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from edgelm.base.errors import RequestError
from edgelm.chats.attachments import Attachment
from edgelm.chats.history import Message
from edgelm.client.session import Session


@dataclass(eq=False, slots=True)
class Item:
    """A file on the bar; `attachment` is None while it is read."""

    path: str
    attachment: Attachment | None = None
    is_taken: bool = False  # by a message that is sent as soon as its files are read
    failed: bool = False  # it cannot be read
    read: asyncio.Event = field(default_factory=asyncio.Event)  # or failed, or taken off


@dataclass(eq=False, slots=True)
class Outgoing:
    """A message that Enter took, with the files that stood above it and the place where it was written."""

    typed: str
    files: list[Item]
    session: Session
    leaf: int | None  # of the branch on screen
    edited: int | None  # the message that it is a new version of

    @property
    def text(self) -> str:
        """Return what the typed text means: // begins a message with a slash."""
        return self.typed.removeprefix("/") if self.typed.startswith("//") else self.typed

    @property
    def parent(self) -> int | None:
        """Return the message that it is sent below."""
        tree = self.session.tree
        return tree.leaf if self.edited is None else tree.messages[self.edited].parent

    def old_version(self, session: Session) -> Message | None:
        """Return the message of a chat that this is a new version of."""
        if self.edited is None or session.chat.id != self.session.chat.id:
            return None
        return session.tree.messages.get(self.edited)

    def require_place(self, session: Session) -> None:
        """Raise RequestError where `session`, which is on screen, is another chat, or shows another branch."""
        hint = "it came back: send it where it belongs"
        if session.chat.id != self.session.chat.id:
            raise RequestError("another chat was opened: the message is not sent", hint)
        self.session = session  # the chat may have been read again
        is_below = self.leaf is None or any(message.id == self.leaf for message in session.tree.path())
        if not is_below if self.edited is None else self.edited not in session.tree.messages:
            raise RequestError("another branch was opened: the message is not sent", hint)
