"""The conversations of Ollama's desktop app: it has no export, but keeps them in an SQLite file, `db.sqlite`.

The file is read and never written, also while the app is open. `ollama run` keeps no conversations; what its `/save`
puts into a model, `/api/show` returns as a list of messages.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from edgelm.base.errors import RequestError
from edgelm.chats.attachments import Attachment
from edgelm.chats.imports.draft import DraftChat, Said, image, key_of, linear, seconds, text, tool_text

_CHATS = "id", "title", "created_at"
_MESSAGES = "id", "role", "content", "thinking", "stream", "model_name", "created_at"
_CALLS = "message_id", "function_name", "function_arguments", "function_result"
_FILES = "message_id", "filename", "data"


def read_ollama(path: Path) -> Iterator[DraftChat]:
    """Yield the conversations, oldest first. Raises RequestError for a file that is not Ollama's."""
    try:
        with closing(_open(path)) as db:
            for row in _rows(db, "chats", _CHATS, "ORDER BY rowid"):
                yield _chat(db, row)
    except sqlite3.Error as error:
        raise RequestError(f"{path} cannot be read as Ollama's chats: {error}", "name its db.sqlite") from None


def _open(path: Path) -> sqlite3.Connection:
    address = path.absolute().as_uri()
    for mode in ("mode=ro", "immutable=1"):  # the second, where its folder cannot be written
        db = sqlite3.connect(f"{address}?{mode}", uri=True, timeout=5)
        try:
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            db.close()
            if mode == "immutable=1":
                raise
        else:
            db.text_factory = lambda raw: raw.decode("utf-8", "replace")
            return db
    raise AssertionError


def _rows(
    db: sqlite3.Connection, name: str, wanted: tuple[str, ...], rest: str, *values: object
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table. A column that this version of the app does not have yet is None."""
    there = {row[1] for row in db.execute(f"PRAGMA table_info({name})")}
    columns = ", ".join(column if column in there else f"NULL AS {column}" for column in wanted)
    for row in db.execute(f"SELECT {columns} FROM {name} {rest}", values):  # noqa: S608 - names of ours
        yield dict(zip(wanted, row, strict=True))


def _chat(db: sqlite3.Connection, row: dict[str, Any]) -> DraftChat:
    key = key_of(row["id"]) or ""
    rows = list(_rows(db, "messages", _MESSAGES, "WHERE chat_id = ? ORDER BY id", row["id"]))
    inside = "WHERE message_id IN (SELECT id FROM messages WHERE chat_id = ?) ORDER BY id"
    calls: dict[Any, list[str]] = {}
    for call in _rows(db, "tool_calls", _CALLS, inside, row["id"]):
        words = tool_text(text(call["function_name"]), text(call["function_arguments"]), text(call["function_result"]))
        calls.setdefault(call["message_id"], []).append(words)
    files: dict[Any, list[Attachment]] = {}
    if _has(db, "attachments"):
        for file in _rows(db, "attachments", _FILES, inside, row["id"]):
            if (attachment := _attachment(text(file["filename"]) or "file", file["data"])) is not None:
                files.setdefault(file["message_id"], []).append(attachment)
    said = [_said(message, calls.get(message["id"], []), files.get(message["id"], [])) for message in rows]
    system, messages = linear(said)
    times = [message.created for message in said if message.created]
    created = seconds(row["created_at"])
    return DraftChat(
        key=f"ollama:{key}",
        messages=messages,
        leaf=messages[-1].key if messages else None,
        title=text(row["title"]),
        system=system,
        created=created,
        changed=max(times, default=created),
    )


def _has(db: sqlite3.Connection, name: str) -> bool:
    return db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)).fetchone() is not None


def _said(row: dict[str, Any], calls: list[str], files: list[Attachment]) -> Said:
    role, written = text(row["role"]), text(row["content"])
    if role == "tool":
        written = tool_text("", "", written)
    return Said(
        role=role,
        text="\n\n".join(filter(None, [written, *calls])),
        reasoning=text(row["thinking"]),
        model=text(row["model_name"]) if role == "assistant" else "",
        created=seconds(row["created_at"]),
        state="stopped" if row["stream"] == 1 else "done",
        attachments=tuple(files),
    )


def _attachment(name: str, data: object) -> Attachment | None:
    if not isinstance(data, bytes):
        return None
    if (picture := image(data, name)) is not None:
        return picture
    try:
        return Attachment(kind="text", name=name, text=data.decode(), size=len(data))
    except UnicodeDecodeError:
        return None
