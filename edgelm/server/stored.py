"""Stored responses: what GET /v1/responses/{id} returns, and the conversation behind `previous_response_id`.

Owns one SQLite file of mode 0600 and its limits. Each API key has responses of its own, and a share of the file. Safe
to call from several threads; a call may wait for the disk, so the event loop calls it in a thread. The file is opened
at the first call: one that cannot be used costs stored responses, and not the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from edgelm.base.errors import EdgeLMError

MAX_RESPONSES = 1000  # of one key; the oldest go first
MAX_RESPONSE_BYTES = 4 * 2**20  # of one response with its input
MAX_KEY_BYTES = 128 * 2**20  # of one key; its oldest go first
MAX_BYTES = 256 * 2**20  # of all; the key that has most gives its oldest
MAX_CHAIN = 1000  # responses of one conversation

_VERSION = 1  # of the tables: a file of another version is emptied
_SCHEMA = (
    "drop table if exists items",
    "drop table if exists responses",
    """create table responses (
        namespace text not null, id text not null, previous text, created real not null, nbytes integer not null,
        response text not null, -- with no output
        primary key (namespace, id)
    )""",
    "create index by_age on responses (namespace, created, nbytes)",
    """create table items ( -- the input of a response, then its output
        namespace text not null, response text not null, place integer not null, is_output integer not null,
        id text, item text not null,
        primary key (namespace, response, place),
        foreign key (namespace, response) references responses (namespace, id) on delete cascade
    )""",
    "create index by_id on items (namespace, id)",
    f"pragma user_version = {_VERSION}",
)


class ResponseStore:
    """The stored responses of a front. Every call raises EdgeLMError if the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._opened: sqlite3.Connection | None = None

    def put(self, namespace: str, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Store a response and its own input items. A full disk costs this response alone.

        Raises EdgeLMError, also for a response that is too large.
        """
        name, output = response["id"], response["output"]
        text = json.dumps({**response, "output": []}, ensure_ascii=False)
        texts = [json.dumps(item, ensure_ascii=False) for item in (*items, *output)]
        nbytes = len(text.encode()) + sum(len(item.encode()) for item in texts)
        if nbytes > MAX_RESPONSE_BYTES:
            message = f"it has {nbytes:,} bytes: at most {MAX_RESPONSE_BYTES:,} are allowed"
            raise EdgeLMError(message, "send the conversation itself in place of previous_response_id")
        ids = [_id_of(item) for item in (*items, *output)]
        rows = [
            (namespace, name, place, place >= len(items), *entry)
            for place, entry in enumerate(zip(ids, texts, strict=True))
        ]
        with self._connection() as connection, connection:
            connection.execute("begin immediate")
            connection.execute(
                "insert or replace into responses values (?, ?, ?, ?, ?, ?)",
                (namespace, name, response["previous_response_id"], time.time(), nbytes, text),
            )
            connection.executemany("insert into items values (?, ?, ?, ?, ?, ?)", rows)
            _trim(connection, namespace, MAX_KEY_BYTES)
            while (excess := connection.execute("select total(nbytes) from responses").fetchone()[0] - MAX_BYTES) > 0:
                largest, its_bytes = connection.execute(
                    "select namespace, total(nbytes) from responses group by namespace order by 2 desc limit 1"
                ).fetchone()
                _trim(connection, largest, its_bytes - excess)

    def get(self, namespace: str, response_id: str) -> dict[str, Any] | None:
        """Return a response of this key. Raises EdgeLMError."""
        found = self._read(namespace, response_id, "is_output")
        return found and {**found[0], "output": found[1]}

    def items(self, namespace: str, response_id: str) -> list[dict[str, Any]] | None:
        """Return the input items of a response of this key. Raises EdgeLMError."""
        found = self._read(namespace, response_id, "not is_output")
        return found and found[1]

    def items_of(self, namespace: str, ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return items of this key's stored responses by their ids; those that are not here are left out.

        Raises EdgeLMError.
        """
        query = (  # of an id that several have, the newest item alone is read
            "select id, item from items where rowid in (select max(rowid) from items"
            " where namespace = ? and id in (select value from json_each(?)) group by id)"
        )
        with self._connection() as connection:
            found = connection.execute(query, (namespace, json.dumps([*ids])))
            return {name: json.loads(item) for name, item in found}

    def conversation(self, namespace: str, response_id: str) -> list[dict[str, Any]] | None:
        """Return the items of the conversation that a response ends, oldest first; None: a part of it is not here.

        Raises EdgeLMError.
        """
        turns: list[list[dict[str, Any]]] = []
        current: str | None = response_id
        while current is not None:
            found = self._read(namespace, current)
            if found is None or len(turns) >= MAX_CHAIN:
                return None
            response, items = found
            turns.append(items)
            current = response["previous_response_id"]
        return [item for turn in reversed(turns) for item in turn]

    def delete(self, namespace: str, response_id: str) -> bool:
        """Delete a response; False: there is none of this key. Raises EdgeLMError."""
        with self._connection() as connection:
            names = (namespace, response_id)
            deleted = connection.execute("delete from responses where namespace = ? and id = ?", names).rowcount > 0
            if deleted:
                connection.execute("pragma wal_checkpoint(truncate)")  # nor does its text stay in the log
            return deleted

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened.close()
                self._opened = None

    def _read(
        self, namespace: str, response_id: str, condition: str = "true"
    ) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """Return a response without its output, and those of its items that meet a condition."""
        names = (namespace, response_id)
        items = f"select item from items where namespace = ? and response = ? and {condition} order by place"  # noqa: S608
        with self._connection() as connection:
            row = connection.execute("select response from responses where namespace = ? and id = ?", names).fetchone()
            return row and (json.loads(row[0]), [json.loads(item) for (item,) in connection.execute(items, names)])

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Give the open file to one thread at a time."""
        with self._lock:
            try:
                if self._opened is None:
                    self._opened = _open(self._path)
                yield self._opened
            except (OSError, sqlite3.Error, ValueError) as error:  # ValueError: a row that is no JSON any more
                hint = f"free disk space, or move {self._path} away"
                raise EdgeLMError(f"stored responses cannot be used: {error}", hint) from error


def _open(path: Path) -> sqlite3.Connection:
    """Open or create the file. Raises OSError, sqlite3.Error."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    path.chmod(0o600)
    connection = sqlite3.connect(path, timeout=5, check_same_thread=False, isolation_level=None)
    try:
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = normal")
        connection.execute("pragma secure_delete = on")
        connection.execute("pragma foreign_keys = on")
        with connection:
            connection.execute("begin immediate")  # another server may open the file at the same time
            if connection.execute("pragma user_version").fetchone()[0] != _VERSION:
                for statement in _SCHEMA:
                    connection.execute(statement)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _trim(connection: sqlite3.Connection, namespace: str, max_bytes: float) -> None:
    """Delete the oldest responses of a key until the others are within its limits."""
    connection.execute(
        "delete from responses where rowid in (select rowid from (select rowid,"
        " sum(nbytes) over newest as sum_bytes, row_number() over newest as place from responses where namespace = ?"
        " window newest as (order by rowid desc)) where sum_bytes > ? or place > ?)",
        (namespace, max_bytes, MAX_RESPONSES),
    )


def _id_of(item: dict[str, Any]) -> str | None:
    name = item.get("id")
    return name if isinstance(name, str) else None
