"""Chats, messages, and the tree that a chat's messages form.

Owns plain values and the walk over branches. Knows nothing of where they are stored, shown and written.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from edgelm.chats.attachments import Attachment
from edgelm.chats.reading import Reading
from edgelm.chats.tool_calls import ToolCall

Role = Literal["user", "assistant"]
State = Literal["done", "streaming", "stopped", "failed"]

TITLE_LEN = 60
UNTITLED = "New chat"


class _Ids:
    """Ids that grow even when the clock stands still or goes back."""

    def __init__(self) -> None:
        self._last = 0

    def make(self) -> int:
        candidate = (time.time_ns() // 1000 << 10) | secrets.randbits(10)
        self._last = max(candidate, self._last + 1)
        return self._last


_ids = _Ids()


def new_id() -> int:
    """Return an id that is unique across processes: microseconds since 1970, then ten random bits."""
    return _ids.make()


@dataclass(slots=True, kw_only=True)
class Chat:
    """One conversation and how it is answered. `sampling` holds only the user's choices for this chat.

    `knowledge` are the files and folders that are searched for each question. `consents` says for an endpoint whether
    passages of them may be sent to it, and after "history" whether the chat may; what is missing is asked. `tools` are
    the servers of tools in use, by their names in the settings; `tool_consents` are fingerprints of tools that may run
    without a question here.
    """

    id: int = field(default_factory=new_id)
    title: str = UNTITLED
    renamed: bool = False  # the user gave the title
    summarized: bool = False  # a model gave the title
    system: str = ""
    model: str = ""  # empty: the first model that the endpoint offers
    sampling: Mapping[str, float | int | str] = field(default_factory=dict)
    knowledge: tuple[str, ...] = ()
    consents: Mapping[str, bool] = field(default_factory=dict)
    preset: str = ""  # the name of the preset that was chosen last
    tools: tuple[str, ...] = ()
    tool_consents: tuple[str, ...] = ()
    pinned: bool = False
    archived: bool = False
    tags: tuple[str, ...] = ()
    deleted: float | None = None  # since when it waits for its end, where it can be restored
    leaf: int | None = None  # the last message of the branch on screen
    created: float = field(default_factory=time.time)
    changed: float = field(default_factory=time.time)


@dataclass(slots=True, kw_only=True)
class Message:
    """One turn. `note` is the reason why it failed, in one line; `stats` is the answer's statistics as JSON.

    `sent_from` shortens the conversation for this message and those below it: the messages of the branch before that
    one are not sent to the model. `reading` are the passages that are sent before this question, of the user.
    `attachments` belong to a message of the user, `calls` to an answer.
    """

    id: int = field(default_factory=new_id)
    chat: int
    parent: int | None
    role: Role
    text: str = ""
    reasoning: str = ""
    state: State = "done"
    note: str = ""
    model: str = ""
    stats: str = ""
    sent_from: int | None = None
    reading: Reading | None = None
    attachments: tuple[Attachment, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    created: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Hit:
    """One chat that a search found. `snippet` has a STX before and an ETX after each match."""

    chat: Chat
    message: int | None  # None: the title matched
    snippet: str


class Tree:
    """The messages of one chat. An edited or regenerated message is a sibling; no message is overwritten."""

    def __init__(self, messages: Iterable[Message] = (), leaf: int | None = None) -> None:
        self.messages: dict[int, Message] = {}
        self.leaf: int | None = None
        self._children: dict[int | None, list[int]] = {}
        for message in messages:
            self._insert(message)
        if leaf in self.messages:
            self.leaf = leaf

    def add(self, message: Message) -> None:
        """Add a message below its parent, and show the branch that it ends."""
        assert message.parent is None or message.parent in self.messages
        self._insert(message)

    def adopt(self, messages: Iterable[Message]) -> int:
        """Add messages that another program wrote, and keep the branch on screen; return their number."""
        leaf, count = self.leaf, 0
        for message in messages:
            if message.id not in self.messages and (message.parent is None or message.parent in self.messages):
                self._insert(message)
                self._children[message.parent].sort()  # the older version first, as from the file
                count += 1
        self.leaf = leaf
        return count

    def _insert(self, message: Message) -> None:
        assert message.id not in self.messages
        self.messages[message.id] = message
        self._children.setdefault(message.parent, []).append(message.id)
        self.leaf = message.id

    def remove(self, message_id: int) -> None:
        """Remove a message that is the last of its branch and not on screen."""
        assert message_id != self.leaf
        assert not self._children.get(message_id)
        self._children[self.messages.pop(message_id).parent].remove(message_id)

    def path(self) -> list[Message]:
        """Return the branch on screen, first message first."""
        return self.path_to(self.leaf)

    def path_to(self, message_id: int | None) -> list[Message]:
        """Return the messages from the first of the conversation to the given one."""
        path: list[Message] = []
        while message_id is not None:
            path.append(self.messages[message_id])
            message_id = self.messages[message_id].parent
        return path[::-1]

    def siblings(self, message_id: int) -> list[int]:
        """Return the versions of a message, oldest first; it is one of them."""
        return self._children[self.messages[message_id].parent]

    def show(self, message_id: int) -> None:
        """Show the branch of a message, down to the newest message below it."""
        leaf = message_id
        while children := self._children.get(leaf):
            leaf = children[-1]
        self.leaf = leaf

    def turn(self, message_id: int, by: int) -> bool:
        """Show the previous (-1) or next (1) version of a message; return whether there is one."""
        versions = self.siblings(message_id)
        index = versions.index(message_id) + by
        if not 0 <= index < len(versions):
            return False
        self.show(versions[index])
        return True


def split_sent(path: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """Split a branch into the messages that are not sent to the model any more, and those that are."""
    sent_from = next((message.sent_from for message in reversed(path) if message.sent_from is not None), None)
    start = next((i for i, message in enumerate(path) if message.id == sent_from), 0)
    return path[:start], path[start:]


def make_title(text: str) -> str:
    """Return a title for a chat that begins with a text: its first words on one line."""
    stripped = (" ".join(line.split()).strip("#*_`> ") for line in text.splitlines())
    line = next(filter(None, stripped), "")
    if len(line) <= TITLE_LEN:
        return line or UNTITLED
    cut = line[:TITLE_LEN]
    words = re.sub(r"\s+\S*$", "", cut)
    return (words if len(words) > TITLE_LEN // 2 else cut) + "…"
