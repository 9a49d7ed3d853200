"""Tags of chats, as the user types them, and what is searched for with them.

Owns the form of a tag. Knows nothing of where tags are stored and shown.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from edgelm.chats.history import Chat
from edgelm.tui.commands.table import Suggestion
from edgelm.tui.lines import clean

MAX_LEN = 30
_CALL = re.compile(r"(/tag\s+(?:\S+\s+)*)(-?#?)(\S*)", re.DOTALL)


class Query(NamedTuple):
    """A search: words, and tags that a chat must have, possibly only their beginnings."""

    words: str
    tags: tuple[str, ...]

    def fits(self, chat: Chat) -> bool:
        """Tell whether a chat has all the tags."""
        return all(any(tag.startswith(start) for tag in chat.tags) for start in self.tags)


def split_query(text: str) -> Query:
    """Split a typed search: `#work regex` searches for the word in the chats with the tag."""
    words: list[str] = []
    tags: list[str] = []
    for word in text.split():
        (tags if word.startswith("#") else words).append(word)
    return Query(" ".join(words), tuple(tag[1:].lower() for tag in tags))


def tag_names(text: str) -> list[str]:
    """Return the tags of a line: lower case, without # before them, in their order."""
    names = (clean(word).strip(",").removeprefix("#").lower()[:MAX_LEN] for word in text.split())
    return list(dict.fromkeys(filter(None, names)))


def changed_tags(tags: Collection[str], text: str) -> tuple[str, ...]:
    """Return tags after a change: `a b` adds two, `-a` takes one away."""
    removed = {name for word in text.split() if word.startswith("-") for name in tag_names(word[1:])}
    added = tag_names(" ".join(word for word in text.split() if not word.startswith("-")))
    return tuple(tag for tag in dict.fromkeys((*tags, *added)) if tag not in removed)


def known_tags(chats: Iterable[Chat]) -> list[str]:
    """Return all tags, those of most chats first."""
    counts: dict[str, int] = {}
    for chat in chats:
        for tag in chat.tags:
            counts[tag] = counts.get(tag, 0) + 1
    return sorted(counts, key=lambda tag: (-counts[tag], tag))


def suggest_tags(text: str, known: Iterable[str]) -> list[Suggestion]:
    """Return the tags that the end of a `/tag` call may become."""
    match = _CALL.fullmatch(text)
    if match is None:
        return []
    call, sign, typed = match.groups()
    return [Suggestion(f"{call}{sign}{tag}", tag) for tag in known if tag.startswith(typed.lower())]


def with_marks(tags: Iterable[str]) -> str:
    """Return tags as they are shown."""
    return " ".join(f"#{clean(tag)}" for tag in tags)
