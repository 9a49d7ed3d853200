"""The file of the chats: SQLite with a full-text index.

Owns all reads and writes, and the translation of SQLite's errors. Only one thread may use it at a time.
Knows nothing of threads, retries and screens.

A streaming answer is one row of `message` and rows of `piece` for the parts of its text: a part costs a page or two of
the file whatever the length of the answer, and no committed part is lost when the process is killed.
"""

# ruff: noqa: S608 - queries are built from the names of our own columns, never from values
from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from edgelm.base.errors import EdgeLMError
from edgelm.chats.history import Chat, Hit, Message
from edgelm.chats.rows import (
    ATTACHMENT_COLUMNS,
    CHAT_COLUMNS,
    MESSAGE_COLUMNS,
    PLACE_COLUMNS,
    attachment_from_row,
    attachment_values,
    chat_from_row,
    chat_values,
    clean,
    message_from_row,
    message_values,
)
from edgelm.chats.schema import MIGRATIONS, SCHEMA, SCHEMA_VERSION, statements, write_ahead
from edgelm.chats.search import search_chats
from edgelm.chats.unsent import is_left, own_name

PAGE_BYTES = 2048  # of a new file: what a second of streamed text writes; SQLite's own 4096 cost twice that
MAX_REPACKED_BYTES = 64 * 2**20  # of an older file: about a second of a slow disk
PIECE_CHARS = 1000  # a new piece costs two pages, a longer one costs them all again
TRASH_DAYS = 30
BUSY_MS = 250  # the chat retries; a longer wait here would only block it

_ATTACHMENT_OF = ", ".join(f"attachment.{column}" for column in ATTACHMENT_COLUMNS.split(", "))


class ChatsError(EdgeLMError):
    """The file of the chats cannot be read or written. `temporary`: the same call may succeed later; `is_full`: only
    when the user has made room on the disk.
    """

    def __init__(self, message: str, hint: str = "", *, temporary: bool = False, is_full: bool = False) -> None:
        super().__init__(message, hint)
        self.temporary = temporary or is_full
        self.is_full = is_full


class Store:
    """The chats in one file, or in memory where `path` is None. Every method raises ChatsError."""

    def __init__(self, path: Path | None, *, busy_ms: int = BUSY_MS) -> None:
        """Open the file, and wait so long for another program that writes to it."""
        self._path = path
        self._busy_s = busy_ms / 1000
        with self._translated():
            if path is not None:
                _make_private(path)
            self._db = sqlite3.connect(
                path or ":memory:", timeout=self._busy_s, isolation_level=None, check_same_thread=False
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
        self._db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        self._repack()
        write_ahead(self._db, self._busy_s)
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

    def _repack(self) -> None:
        """Write an older file, whose pages are larger, once more, where nothing else has it open and the disk has room.

        SQLite does that by a journal: a killed process loses nothing, and the next one tries again.
        """
        size, num_pages = (self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "page_count"))
        if self._path is None or size == PAGE_BYTES or num_pages * size > MAX_REPACKED_BYTES:
            return
        with suppress(sqlite3.Error, OSError):
            has_room = shutil.disk_usage(self._path.parent).free > 4 * num_pages * size
            # Not in WAL mode, which is left only while no other process has the file open.
            if has_room and self._db.execute("PRAGMA journal_mode = DELETE").fetchone()[0] == "delete":
                self._db.execute("VACUUM")

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
        self._put("chat", CHAT_COLUMNS, chat_values(chat))

    def put_open_chat(self, chat: Chat) -> None:
        """Replace a saved chat, but for its place in the list, which another program may have changed.

        Raises ChatsError if it was deleted for good.
        """
        names = CHAT_COLUMNS.split(", ")
        new = {name: value for name, value in zip(names, chat_values(chat), strict=True) if name not in PLACE_COLUMNS}
        updates = ", ".join(f"{name} = :{name}" for name in new)
        with self._translated():
            if not self._db.execute(f"UPDATE chat SET {updates} WHERE id = :id", new).rowcount:
                raise deleted_elsewhere()

    def restore_chat(self, chat_id: int) -> None:
        """Take a chat out of the trash, if it is there."""
        with self._translated():
            self._db.execute("UPDATE chat SET deleted = NULL WHERE id = ?", (chat_id,))

    def put_message(self, message: Message) -> None:
        """Insert or replace a message. Its text must include all appended pieces."""
        self._put("message", MESSAGE_COLUMNS, message_values(message))
        with self._translated():
            self._db.execute("DELETE FROM piece WHERE message = ?", (message.id,))
            for place, attachment in enumerate(message.attachments):  # they never change
                self._db.execute(
                    f"INSERT OR IGNORE INTO attachment (message, place, {ATTACHMENT_COLUMNS})"
                    f" VALUES ({', '.join('?' * 12)})",
                    (message.id, place, *attachment_values(attachment)),
                )

    def append(self, message_id: int, text: str, reasoning: str = "") -> None:
        """Append text to a streaming answer: to its last piece, while that is short."""
        with self._translated():
            if self._db.execute(
                "UPDATE piece SET text = text || ?, reasoning = reasoning || ?"
                " WHERE id = (SELECT max(id) FROM piece WHERE message = ?) AND length(text) + length(reasoning) < ?",
                (clean(text), clean(reasoning), message_id, PIECE_CHARS),
            ).rowcount:
                return
            self._db.execute(
                "INSERT INTO piece (message, text, reasoning) VALUES (?, ?, ?)",
                (message_id, clean(text), clean(reasoning)),
            )

    def delete_chat(self, chat_id: int) -> None:
        """Delete a chat and all its messages."""
        with self._translated():
            self._db.execute("DELETE FROM chat WHERE id = ?", (chat_id,))

    def delete_message(self, message_id: int) -> None:
        """Delete a message and all below it."""
        with self._translated():
            self._db.execute("DELETE FROM message WHERE id = ?", (message_id,))

    def put_setting(self, name: str, value: str) -> None:
        """Save a setting of the screen, such as its theme."""
        self._put("setting", "name, value", (name, value))

    def put_unsent(self, text: str) -> None:
        """Save what this process has not sent."""
        self.put_setting(own_name(), text)

    def unsent(self) -> str:
        """Return what ended processes have not sent, each in lines of its own."""
        return "\n".join(text for name, text in self.settings().items() if text and is_left(name))

    def adopt_unsent(self) -> str:
        """Let what ended processes have not sent be this one's, and return it. In a transaction, no other does so."""
        text = self.unsent()
        with self._translated():
            self._db.executemany(
                "DELETE FROM setting WHERE name = ?", [(name,) for name in self.settings() if is_left(name)]
            )
        if text:
            self.put_unsent(text)
        return text

    def settings(self) -> dict[str, str]:
        return dict(self._rows("SELECT name, value FROM setting ORDER BY rowid"))

    def chats(self) -> list[Chat]:
        """Return the chats that are not deleted, newest first; archived ones are among them."""
        return self._chats("deleted IS NULL")

    def deleted_chats(self) -> list[Chat]:
        """Return the chats that are deleted and can be restored, the last one that was deleted first."""
        return self._chats("deleted IS NOT NULL", "deleted")

    def purge(self, before: float) -> int:
        """Remove the chats that were deleted before a time, for good; return their number."""
        with self._translated():
            return self._db.execute("DELETE FROM chat WHERE deleted < ?", (before,)).rowcount

    def empty_trash(self) -> None:
        """Remove the chats that have been in the trash for more than TRASH_DAYS, for good."""
        before = time.time() - TRASH_DAYS * 86_400
        if self._rows("SELECT 1 FROM chat WHERE deleted < ? LIMIT 1", before):  # to read waits for no other program
            self.purge(before)

    def _chats(self, condition: str, order: str = "changed") -> list[Chat]:
        rows = self._rows(f"SELECT {CHAT_COLUMNS} FROM chat WHERE {condition} ORDER BY {order} DESC, id DESC")
        return [chat_from_row(row) for row in rows]

    def figures(self) -> list[tuple[Any, ...]]:
        """Return model, time and statistics, as saved, of the answers of chats that are not in the trash."""
        return self._rows(
            "SELECT message.model, message.created, message.stats FROM message JOIN chat ON chat.id = message.chat"
            " WHERE message.stats != '' AND chat.deleted IS NULL"
        )

    def chat(self, chat_id: int) -> Chat | None:
        """Return a chat, also a deleted one; None if there is none with this id."""
        rows = self._rows(f"SELECT {CHAT_COLUMNS} FROM chat WHERE id = ?", chat_id)
        return chat_from_row(rows[0]) if rows else None

    def messages(self, chat_id: int) -> list[Message]:
        """Return all messages of a chat, each after its parent."""
        rows = self._rows(f"SELECT {MESSAGE_COLUMNS} FROM message WHERE chat = ? ORDER BY id", chat_id)
        messages = [message_from_row(row) for row in rows]
        by_id = {message.id: message for message in messages}
        for message_id, *values in self._rows(
            f"SELECT attachment.message, {_ATTACHMENT_OF} FROM attachment"
            " JOIN message ON message.id = attachment.message WHERE chat = ? ORDER BY attachment.message, place",
            chat_id,
        ):
            by_id[message_id].attachments += (attachment_from_row(values),)
        if any(message.state == "streaming" for message in messages):
            for message_id, text, reasoning in self._rows(
                "SELECT message, piece.text, piece.reasoning FROM piece JOIN message ON message.id = piece.message"
                " WHERE chat = ? ORDER BY piece.id",
                chat_id,
            ):
                by_id[message_id].text += text
                by_id[message_id].reasoning += reasoning
        return messages

    def num_messages(self, chat_id: int) -> int:
        """Return the number of messages of a chat."""
        rows = self._rows("SELECT count(*) FROM message WHERE chat = ?", chat_id)
        return int(rows[0][0])

    def version(self) -> int:
        """Return a number that changes when another connection has written to the file."""
        return int(self._rows("PRAGMA data_version")[0][0])

    def owner_of(self, message_id: int) -> int | None:
        """Return the chat of a message; None if there is no message with this id."""
        rows = self._rows("SELECT chat FROM message WHERE id = ?", message_id)
        return rows[0][0] if rows else None

    def prompts(self, limit: int) -> list[str]:
        """Return the user's last messages, oldest first."""
        rows = self._rows("SELECT text FROM message WHERE role = 'user' AND text <> '' ORDER BY id DESC LIMIT ?", limit)
        return [row[0] for row in reversed(rows)]

    def search(self, query: str, limit: int = 100, *, archived: bool = True) -> list[Hit]:
        """Return the chats with all words of a query in one message or in the title, newest first; none that is
        deleted, and archived ones if asked for. `search_chats` says how words match.
        """
        with self._translated():
            return search_chats(self._db, query, limit, archived=archived)

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
            message = f"the chats in {self._path} cannot be opened: {error.strerror}"
            raise ChatsError(message, "make its folder writable, or set EDGELM_DATA_DIR") from error


def _make_private(path: Path) -> None:
    """Create the file for its owner only: SQLite would make it readable for everybody."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.close(descriptor)


def _is_full(path: Path | None) -> bool:
    try:
        return path is not None and shutil.disk_usage(path.parent).free < PAGE_BYTES
    except OSError:
        return False


def deleted_elsewhere() -> ChatsError:
    """Return the error for a chat that is not in the file any more."""
    return ChatsError("this chat was deleted in another window", "it is not saved any more; export it to keep it")


def _translate(error: sqlite3.Error, path: Path | None) -> ChatsError:
    """Translate an error of SQLite for the user."""
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return ChatsError(f"another program has locked the chats in {path}", "close it", temporary=True)
    # SHMSIZE: a full disk has no room for the file of shared memory beside the chats.
    if name.startswith(("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE")) or (name == "SQLITE_IOERR_WRITE" and _is_full(path)):
        return ChatsError(f"the disk with {path} is full", "make room on it", is_full=True)
    if name.startswith("SQLITE_IOERR"):
        return ChatsError(f"the chats in {path} cannot be read or written ({name})", "check the disk", temporary=True)
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return ChatsError(f"{path} is damaged", "move it away, or repair it with `sqlite3 FILE .recover`")
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return ChatsError(f"the chats in {path} cannot be written", "check the permissions of the file and its folder")
    if name.startswith("SQLITE_CONSTRAINT_FOREIGNKEY"):
        return deleted_elsewhere()
    return ChatsError(f"the chats in {path}: {error}")
