"""The search over the titles and messages of all chats.

Owns the queries to the full-text index and the order of the hits. Knows nothing of files and errors.
"""

# ruff: noqa: S608 - queries are built from the names of our own columns, never from values
from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator

from edgelm.chats.history import Hit
from edgelm.chats.rows import CHAT, chat_from_row

_CONTEXT = 30  # characters before and after a literal match


def search_chats(db: sqlite3.Connection, query: str, limit: int, *, archived: bool) -> list[Hit]:
    """Return the chats with all words of a query in one message or in the title, newest first.

    A word of several letters matches by prefix. Text that the index has no words for (signs, the middle of a word,
    scripts without spaces) is searched literally: that reads all messages, the newest first.
    """
    kept = "chat.deleted IS NULL" if archived else "chat.deleted IS NULL AND NOT chat.archived"
    words = re.findall(r"\w+", query)
    hits: dict[int, Hit] = {}
    if words:
        # A single letter stands for itself: collecting all words that begin with it takes 0.1 s.
        match = " ".join(f'"{word}"' + "*" * (len(word) > 1) for word in words)
        for hit in (*_titles(db, match, kept, limit), *_messages(db, match, kept, limit)):
            hits.setdefault(hit.chat.id, hit)
    if not hits and (text := query.strip()):
        for hit in _literal(db, text, kept, limit):
            hits.setdefault(hit.chat.id, hit)
    return sorted(hits.values(), key=lambda hit: (hit.chat.changed, hit.chat.id), reverse=True)[:limit]


def _titles(db: sqlite3.Connection, match: str, kept: str, limit: int) -> Iterator[Hit]:
    """Yield the newest chats whose title matches."""
    rows = db.execute(
        f"SELECT {CHAT} FROM title_words JOIN chat ON chat.id = title_words.rowid"
        f" WHERE title_words MATCH ? AND {kept} ORDER BY changed DESC LIMIT ?",
        (match, limit),
    ).fetchall()
    # The title is highlighted for the chosen rows alone, by a second query: sorting would highlight all.
    ids = ", ".join(str(row[0]) for row in rows)
    marked = dict(
        db.execute(
            "SELECT rowid, highlight(title_words, 0, char(2), char(3)) FROM title_words"
            f" WHERE title_words MATCH ? AND +rowid IN ({ids})",
            (match,),
        )
    )
    for row in rows:
        yield Hit(chat_from_row(row), None, marked[row[0]])


def _messages(db: sqlite3.Connection, match: str, kept: str, limit: int) -> Iterator[Hit]:
    """Yield the chats with the newest messages that match, with the newest one of them."""
    seen: set[int] = set()

    def is_first(chat_id: int) -> bool:
        if chat_id in seen:
            return False
        seen.add(chat_id)
        return True

    # The index gives the newest messages first, so this ends with the last chat that is needed. CROSS JOIN keeps that
    # order: a frequent word has a hundred thousand messages, of which a few are read.
    db.create_function("is_first", 1, is_first)
    for row in db.execute(
        f"""SELECT message.id, snippet(message_words, 0, char(2), char(3), '…', 12), {CHAT} FROM message_words
        CROSS JOIN message ON message.id = message_words.rowid CROSS JOIN chat ON chat.id = message.chat
        WHERE message_words MATCH ? AND {kept} AND is_first(message.chat) ORDER BY message_words.rowid DESC LIMIT ?""",
        (match, limit),
    ):
        yield Hit(chat_from_row(row[2:]), row[0], row[1])


def _literal(db: sqlite3.Connection, text: str, kept: str, limit: int) -> Iterator[Hit]:
    """Yield the chats with a text in their title, and those with the newest messages that have it."""
    pattern = "%" + re.sub(r"([%_\\])", r"\\\1", text) + "%"
    for row in db.execute(
        f"SELECT {CHAT} FROM chat WHERE title LIKE ? ESCAPE '\\' AND {kept} ORDER BY changed DESC LIMIT ?",
        (pattern, limit),
    ):
        chat = chat_from_row(row)
        yield Hit(chat, None, _snippet(chat.title, text, len(chat.title)))
    seen: set[int] = set()
    for message_id, written, *row in db.execute(
        f"SELECT message.id, message.text, {CHAT} FROM message CROSS JOIN chat ON chat.id = message.chat"
        f" WHERE message.text LIKE ? ESCAPE '\\' AND {kept} ORDER BY message.id DESC",
        (pattern,),
    ):
        if row[0] not in seen:
            seen.add(row[0])
            yield Hit(chat_from_row(row), message_id, _snippet(written, text))
        if len(seen) >= limit:
            return


def _snippet(text: str, match: str, context: int = _CONTEXT) -> str:
    start = text.lower().find(match.lower())
    if start < 0:  # SQLite and Python disagree on the case of a letter
        return text[: 2 * context]
    end = start + len(match)
    before, after = text[max(0, start - context) : start], text[end : end + context]
    snippet = ("…" if start > context else "") + before + "\x02" + text[start:end] + "\x03" + after
    return snippet + ("…" if end + context < len(text) else "")
