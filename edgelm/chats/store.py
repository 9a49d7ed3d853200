"""The file of the chats: SQLite with a full-text index.

Owns all reads and writes, and the translation of SQLite's errors. Only one thread may use it at a time.
Knows nothing of threads, retries and screens.

A streaming answer is one row of `message` and one row of `piece` for each part of its text: a token costs one small
insert whatever the length of the answer, and no committed part is lost when the process is killed.
"""

# ruff: noqa: S608 - queries are built from the names of our own columns, never from values
from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgelm.chats.attachments import Attachment
from edgelm.chats.history import Chat, Hit, Message
from edgelm.chats.reading import reading_from_text, reading_to_text
from edgelm.chats.schema import MIGRATIONS, SCHEMA, SCHEMA_VERSION, statements
from edgelm.chats.tool_calls import calls_from_text, calls_to_text
from edgelm.errors import EdgeLMError

BUSY_MS = 250  # the caller retries; a longer wait here would only block it

_CHAT_COLUMNS = (
    "id, title, renamed, system, model, sampling, leaf, created, changed, knowledge, consents, summarized, preset,"
    " tools, tool_consents, pinned, archived, tags, deleted"
)
_CHAT = ", ".join(f"chat.{column}" for column in _CHAT_COLUMNS.split(", "))
_MESSAGE = "id, chat, parent, role, text, reasoning, state, note, model, stats, created, sent_from, reading, calls"
_ATTACHMENT = "kind, name, path, text, data, media_type, digest, size, mtime_ns"
_ATTACHMENT_OF = ", ".join(f"attachment.{column}" for column in _ATTACHMENT.split(", "))


class ChatsError(EdgeLMError):
    """The file of the chats cannot be read or written. `temporary`: the same call may succeed later."""

    def __init__(self, message: str, hint: str = "", *, temporary: bool = False) -> None:
        super().__init__(message, hint)
        self.temporary = temporary


class Store:
    """The chats in one file, or in memory where `path` is None. Every method raises ChatsError."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        with self._translated():
            if path is not None:
                _make_private(path)
            self._db = sqlite3.connect(
                path or ":memory:", timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False
            )
        try:
            with self._translated():
                self._prepare()
        except ChatsError:
            self._db.close()
            raise

    def _prepare(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise ChatsError(f"a newer edgelm wrote the chats in {self._path}", "update edgelm, or move the file away")
        # NORMAL in WAL mode: a commit does not wait for the disk. A killed process loses nothing; a power cut loses
        # the last moments.
        self._write_ahead()
        for pragma in ("synchronous = NORMAL", "foreign_keys = ON", "secure_delete = ON"):
            self._db.execute(f"PRAGMA {pragma}")
        if version < SCHEMA_VERSION:
            with self.transaction():
                version = self._db.execute("PRAGMA user_version").fetchone()[0]  # another process may have been faster
                while version < SCHEMA_VERSION:
                    for statement in statements(MIGRATIONS[version] if version else SCHEMA):
                        self._db.execute(statement)
                    version = version + 1 if version else SCHEMA_VERSION
                self._db.execute(f"PRAGMA user_version = {version}")
        # Pieces of a killed process become searchable as text of their message.
        if self._db.execute("SELECT EXISTS (SELECT 1 FROM piece)").fetchone()[0]:
            self._fold_pieces()

    def _write_ahead(self) -> None:
        """Choose the WAL mode. SQLite does not wait for another process that does the same, so we do."""
        deadline = time.monotonic() + BUSY_MS / 1000
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all writes of the block, or none."""
        with self._translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite rolls some failures back by itself
                    self._db.execute("ROLLBACK")
                raise

    def put_chat(self, chat: Chat) -> None:
        """Insert or replace a chat."""
        sampling = json.dumps(dict(chat.sampling))
        self._put("chat", _CHAT_COLUMNS, (
            chat.id, _clean(chat.title), chat.renamed, _clean(chat.system), _clean(chat.model), sampling, chat.leaf,
            chat.created, chat.changed, json.dumps(chat.knowledge), json.dumps(dict(chat.consents)), chat.summarized,
            _clean(chat.preset), json.dumps(chat.tools), json.dumps(chat.tool_consents), chat.pinned, chat.archived,
            json.dumps(chat.tags), chat.deleted,
        ))  # fmt: skip

    def put_message(self, message: Message) -> None:
        """Insert or replace a message. Its text must include all appended pieces."""
        self._put("message", _MESSAGE, (
            message.id, message.chat, message.parent, message.role, _clean(message.text), _clean(message.reasoning),
            message.state, _clean(message.note), _clean(message.model), message.stats, message.created,
            message.sent_from, reading_to_text(message.reading), calls_to_text(message.calls),
        ))  # fmt: skip
        with self._translated():
            self._db.execute("DELETE FROM piece WHERE message = ?", (message.id,))
            for place, attachment in enumerate(message.attachments):  # they never change
                self._db.execute(
                    f"INSERT OR IGNORE INTO attachment (message, place, {_ATTACHMENT}) VALUES ({', '.join('?' * 11)})",
                    (message.id, place, *_attachment_values(attachment)),
                )

    def append(self, message_id: int, text: str, reasoning: str = "") -> None:
        """Append text to a streaming answer."""
        with self._translated():
            self._db.execute(
                "INSERT INTO piece (message, text, reasoning) VALUES (?, ?, ?)",
                (message_id, _clean(text), _clean(reasoning)),
            )

    def delete_chat(self, chat_id: int) -> None:
        """Delete a chat and all its messages."""
        with self._translated():
            self._db.execute("DELETE FROM chat WHERE id = ?", (chat_id,))

    def put_setting(self, name: str, value: str) -> None:
        """Save a setting of the screen, such as its theme."""
        self._put("setting", "name, value", (name, value))

    def settings(self) -> dict[str, str]:
        return dict(self._rows("SELECT name, value FROM setting"))

    def purge(self, before: float) -> None:
        """Delete the chats for good that were put into the trash before a time, in seconds since 1970."""
        with self._translated():
            self._db.execute("DELETE FROM chat WHERE deleted < ?", (before,))

    def chats(self) -> list[Chat]:
        """Return all chats that are not in the trash, newest first."""
        sql = f"SELECT {_CHAT} FROM chat WHERE deleted IS NULL ORDER BY changed DESC, id DESC"
        return [_chat(row) for row in self._rows(sql)]

    def deleted_chats(self) -> list[Chat]:
        """Return the chats in the trash, the last one that was deleted first."""
        sql = f"SELECT {_CHAT} FROM chat WHERE deleted IS NOT NULL ORDER BY deleted DESC, id DESC"
        return [_chat(row) for row in self._rows(sql)]

    def figures(self) -> list[tuple[Any, ...]]:
        """Return model, time and statistics, as saved, of the answers of chats that are not in the trash."""
        return self._rows(
            "SELECT message.model, message.created, message.stats FROM message JOIN chat ON chat.id = message.chat"
            " WHERE message.stats != '' AND chat.deleted IS NULL"
        )

    def chat(self, chat_id: int) -> Chat | None:
        rows = self._rows(f"SELECT {_CHAT} FROM chat WHERE id = ?", chat_id)
        return _chat(rows[0]) if rows else None

    def messages(self, chat_id: int) -> list[Message]:
        """Return all messages of a chat, each after its parent."""
        rows = self._rows(f"SELECT {_MESSAGE} FROM message WHERE chat = ? ORDER BY id", chat_id)
        messages = [_message(row) for row in rows]
        by_id = {message.id: message for message in messages}
        for message_id, *values in self._rows(
            f"SELECT attachment.message, {_ATTACHMENT_OF} FROM attachment"
            " JOIN message ON message.id = attachment.message WHERE chat = ? ORDER BY attachment.message, place",
            chat_id,
        ):
            attachment = Attachment(**dict(zip(_ATTACHMENT.split(", "), values, strict=True)))
            by_id[message_id].attachments += (attachment,)
        if any(message.state == "streaming" for message in messages):
            for message_id, text, reasoning in self._rows(
                "SELECT message, piece.text, piece.reasoning FROM piece JOIN message ON message.id = piece.message"
                " WHERE chat = ? ORDER BY piece.id",
                chat_id,
            ):
                by_id[message_id].text += text
                by_id[message_id].reasoning += reasoning
        return messages

    def prompts(self, limit: int) -> list[str]:
        """Return the user's last messages, oldest first."""
        rows = self._rows("SELECT text FROM message WHERE role = 'user' ORDER BY id DESC LIMIT ?", limit)
        return [row[0] for row in reversed(rows)]

    def search(self, query: str, limit: int = 100) -> list[Hit]:
        """Return the chats with all words of a query in one message or in the title, newest first.

        Words match by prefix. Text that the index has no words for (signs, the middle of a word, scripts without
        spaces) is searched literally.
        """
        words = re.findall(r"\w+", query)
        hits: dict[int, Hit] = {}
        if words:
            match = " ".join(f'"{word}"*' for word in words)
            self._collect(hits, limit, f"""
                SELECT NULL, highlight(title_words, 0, char(2), char(3)), {_CHAT} FROM title_words
                JOIN chat ON chat.id = title_words.rowid AND deleted IS NULL WHERE title_words MATCH ?
                ORDER BY changed DESC LIMIT ?""",
                match)  # fmt: skip
            self._collect(hits, limit, f"""
                SELECT newest.id, snippet(message_words, 0, char(2), char(3), '…', 12), {_CHAT} FROM (
                    SELECT max(message.id) AS id FROM message_words JOIN message ON message.id = message_words.rowid
                    JOIN chat ON chat.id = message.chat AND deleted IS NULL
                    WHERE message_words MATCH ?1 GROUP BY message.chat ORDER BY id DESC LIMIT ?2) AS newest
                JOIN message_words ON message_words.rowid = newest.id
                JOIN message ON message.id = newest.id JOIN chat ON chat.id = message.chat
                WHERE message_words MATCH ?1""", match)  # fmt: skip
        if not hits and (text := query.strip()):
            # SQLite takes the other columns from the row with the maximum.
            for row in self._rows(
                f"SELECT max(message.id), message.text, {_CHAT} FROM message JOIN chat ON chat.id = message.chat"
                " WHERE deleted IS NULL AND message.text LIKE '%' || ? || '%' ESCAPE '\\'"
                " GROUP BY chat.id ORDER BY changed DESC LIMIT ?",
                re.sub(r"([%_\\])", r"\\\1", text), limit,
            ):  # fmt: skip
                hits[row[2]] = Hit(_chat(row[2:]), row[0], _snippet(row[1], text))
        return sorted(hits.values(), key=lambda hit: (hit.chat.changed, hit.chat.id), reverse=True)[:limit]

    def _collect(self, hits: dict[int, Hit], limit: int, sql: str, match: str) -> None:
        for row in self._rows(sql, match, limit):
            hits.setdefault(row[2], Hit(_chat(row[2:]), row[0], row[1]))

    def _rows(self, sql: str, *values: object) -> list[Any]:
        with self._translated():
            return self._db.execute(sql, values).fetchall()

    def _put(self, table: str, columns: str, values: tuple[object, ...]) -> None:
        names = columns.split(", ")
        updates = ", ".join(f"{name} = excluded.{name}" for name in names[1:])
        with self._translated():
            self._db.execute(
                f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(names))})"
                f" ON CONFLICT DO UPDATE SET {updates}",
                values,
            )

    def _fold_pieces(self) -> None:
        try:
            with self.transaction():
                for column in ("text", "reasoning"):
                    self._db.execute(
                        f"UPDATE message SET {column} = {column} || (SELECT coalesce(group_concat({column}, ''), '')"
                        " FROM (SELECT * FROM piece WHERE message = message.id ORDER BY id))"
                        " WHERE id IN (SELECT message FROM piece)"
                    )
                self._db.execute("DELETE FROM piece")
        except ChatsError as error:
            if not error.temporary:  # a locked file or a full disk: `messages` reads the pieces
                raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _translate(error, self._path) from error
        except OSError as error:
            raise ChatsError(f"the chats in {self._path} cannot be opened: {error.strerror}") from error


def _make_private(path: Path) -> None:
    """Create the file for its owner only: SQLite would make it readable for everybody."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.close(descriptor)


def _chat(row: Any) -> Chat:
    values = dict(zip(_CHAT_COLUMNS.split(", "), row, strict=True))
    for name in ("sampling", "consents"):
        values[name] = json.loads(values[name])
    for name in ("knowledge", "tools", "tool_consents", "tags"):
        values[name] = tuple(json.loads(values[name]))
    for name in ("renamed", "summarized", "pinned", "archived"):
        values[name] = bool(values[name])
    return Chat(**values)


def _message(row: Any) -> Message:
    values = dict(zip(_MESSAGE.split(", "), row, strict=True))
    reading, calls = reading_from_text(values["reading"]), calls_from_text(values["calls"])
    return Message(**values | {"reading": reading, "calls": calls})


def _attachment_values(attachment: Attachment) -> tuple[object, ...]:
    return (
        attachment.kind, _clean(attachment.name), _clean(attachment.path), _clean(attachment.text), attachment.data,
        attachment.media_type, attachment.digest, attachment.size, attachment.mtime_ns,
    )  # fmt: skip


def _clean(text: str) -> str:
    """Replace characters that SQLite cannot store as text: halves of surrogate pairs, and NUL."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def _snippet(text: str, match: str, context: int = 30) -> str:
    start = text.lower().find(match.lower())
    if start < 0:  # SQLite and Python disagree on the case of a letter
        return text[: 2 * context]
    end = start + len(match)
    before, after = text[max(0, start - context) : start], text[end : end + context]
    snippet = ("…" if start > context else "") + before + "\x02" + text[start:end] + "\x03" + after
    return snippet + ("…" if end + context < len(text) else "")


def _translate(error: sqlite3.Error, path: Path | None) -> ChatsError:
    """Translate an error of SQLite for the user."""
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return ChatsError(f"another program has locked the chats in {path}", "close it", temporary=True)
    if name.startswith("SQLITE_FULL"):
        return ChatsError(f"the disk with {path} is full", "make room on it", temporary=True)
    if name.startswith("SQLITE_IOERR"):
        return ChatsError(f"the chats in {path} cannot be read or written ({name})", "check the disk", temporary=True)
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return ChatsError(f"{path} is damaged", "move it away, or repair it with `sqlite3 FILE .recover`")
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return ChatsError(f"the chats in {path} cannot be written", "check the permissions of the file and its folder")
    if name.startswith("SQLITE_CONSTRAINT_FOREIGNKEY"):
        return ChatsError("this chat was deleted in another window", "it is not saved any more; export it to keep it")
    return ChatsError(f"the chats in {path}: {error}")
