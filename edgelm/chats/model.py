"""The words of the history: chats, messages, and the tree that a chat's messages make.

Owns plain values and the walk over branches. Knows nothing of where they are stored or shown.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["user", "assistant"]
State = Literal["done", "streaming", "stopped", "failed"]

TITLE_LEN = 60
UNTITLED = "New chat"


class _Ids:
    """Ids that grow, even when the clock stands still or goes back."""

    def __init__(self) -> None:
        self._last = 0

    def make(self) -> int:
        made = (time.time_ns() // 1000 << 10) | secrets.randbits(10)
        self._last = max(made, self._last + 1)
        return self._last


_ids = _Ids()


def new_id() -> int:
    """Return an id that no other process has made: microseconds since 1970, then ten random bits."""
    return _ids.make()


@dataclass(slots=True, kw_only=True)
class Chat:
    """One conversation and how it is answered. `sampling` holds only what the user chose for this chat."""

    id: int = field(default_factory=new_id)
    title: str = UNTITLED
    renamed: bool = False  # the user gave the title
    system: str = ""
    model: str = ""  # empty: whatever the endpoint offers first
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    leaf: int | None = None  # the last message of the branch on screen
    created: float = field(default_factory=time.time)
    changed: float = field(default_factory=time.time)


@dataclass(slots=True, kw_only=True)
class Message:
    """One turn. `note` is the line that says why it failed; `stats` is JSON of whoever made the answer.

    `sent_from` shortens the conversation for this message and those below it: the model gets none of the messages of
    the branch that come before that one.
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
    created: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Hit:
    """One chat that a search found. `snippet` has a STX before and an ETX after each match."""

    chat: Chat
    message: int | None  # None: the title matched
    snippet: str


class Tree:
    """The messages of one chat. An edited or regenerated message is a sibling; nothing is ever overwritten."""

    def __init__(self, messages: Iterable[Message] = (), leaf: int | None = None) -> None:
        self.messages: dict[int, Message] = {}
        self.leaf: int | None = None
        self._children: dict[int | None, list[int]] = {}
        for message in messages:
            self._put(message)
        if leaf in self.messages:
            self.leaf = leaf

    def add(self, message: Message) -> None:
        """Put a message under its parent and show the branch that it ends."""
        assert message.parent is None or message.parent in self.messages
        self._put(message)

    def _put(self, message: Message) -> None:
        assert message.id not in self.messages
        self.messages[message.id] = message
        self._children.setdefault(message.parent, []).append(message.id)
        self.leaf = message.id

    def path(self) -> list[Message]:
        """Return the branch on screen, first message first."""
        return self.path_to(self.leaf)

    def path_to(self, message_id: int | None) -> list[Message]:
        """Return the messages from the first of the conversation to one."""
        found: list[Message] = []
        at = message_id
        while at is not None:
            found.append(self.messages[at])
            at = self.messages[at].parent
        return found[::-1]

    def siblings(self, message_id: int) -> list[int]:
        """Return the versions of a message, itself among them, oldest first."""
        return self._children[self.messages[message_id].parent]

    def show(self, message_id: int) -> None:
        """Show the branch of a message, down to the newest message below it."""
        at = message_id
        while below := self._children.get(at):
            at = below[-1]
        self.leaf = at

    def turn(self, message_id: int, by: int) -> bool:
        """Show the version before or after a message; say whether there is one."""
        versions = self.siblings(message_id)
        at = versions.index(message_id) + by
        if not 0 <= at < len(versions):
            return False
        self.show(versions[at])
        return True


def split_sent(path: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """Return the messages of a branch that are not sent to the model any more, and those that are."""
    sent_from = next((each.sent_from for each in reversed(path) if each.sent_from is not None), None)
    at = next((i for i, each in enumerate(path) if each.id == sent_from), 0)
    return path[:at], path[at:]


def make_title(text: str) -> str:
    """Return a title for a chat that begins with a text: its first words on one line."""
    line = next((line for each in text.splitlines() if (line := " ".join(each.split()).strip("#*_`> "))), "")
    if len(line) <= TITLE_LEN:
        return line or UNTITLED
    cut = line[:TITLE_LEN]
    words = re.sub(r"\s+\S*$", "", cut)
    return (words if len(words) > TITLE_LEN // 2 else cut) + "…"
