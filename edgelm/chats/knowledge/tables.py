"""The file of the index: its tables, and what happens when it is damaged, locked or full.

Owns the schema, all reads and writes, and the translation of SQLite's errors. Knows nothing of folders, headings and
rankings.
"""

# ruff: noqa: S608 - queries are built from our own constants and question marks, never from values
from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from edgelm.base.errors import EdgeLMError
from edgelm.chats.schema import statements, write_ahead

VERSION = 2  # of the tables and of the splitting: another version's file is made again
BUSY_MS = 10_000

_SCHEMA = """
CREATE TABLE root (id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, used REAL NOT NULL);
CREATE TABLE file (
    id INTEGER PRIMARY KEY, root INTEGER NOT NULL, name TEXT NOT NULL, stamp TEXT NOT NULL, digest BLOB NOT NULL,
    reason TEXT NOT NULL, UNIQUE (root, name));
CREATE TABLE passage (
    id INTEGER PRIMARY KEY, root INTEGER NOT NULL, file INTEGER NOT NULL, title TEXT NOT NULL, heading TEXT NOT NULL,
    text TEXT NOT NULL, digest BLOB NOT NULL, asked TEXT NOT NULL);
CREATE INDEX passage_root ON passage (root);
CREATE INDEX passage_file ON passage (file);
CREATE INDEX passage_digest ON passage (digest);
CREATE TABLE vector (digest BLOB NOT NULL, model TEXT NOT NULL, data BLOB NOT NULL, PRIMARY KEY (digest, model));
CREATE VIRTUAL TABLE words USING fts5 (
    title, heading, text, asked, content=passage, content_rowid=id, tokenize='porter unicode61 remove_diacritics 2');
CREATE VIRTUAL TABLE stem USING fts5vocab (words, row);
CREATE TRIGGER passage_added AFTER INSERT ON passage BEGIN
    INSERT INTO words (rowid, title, heading, text, asked)
    VALUES (new.id, new.title, new.heading, new.text, new.asked); END;
CREATE TRIGGER passage_removed AFTER DELETE ON passage BEGIN
    INSERT INTO words (words, rowid, title, heading, text, asked)
    VALUES ('delete', old.id, old.title, old.heading, old.text, old.asked); END;
"""

Done = TypeVar("Done")


class KnownFile(NamedTuple):
    """A file as it was read last."""

    stamp: str
    digest: bytes


class Row(NamedTuple):
    """A passage in the index."""

    id: int
    source: str
    heading: str
    text: str
    digest: bytes


class NewPassage(NamedTuple):
    """A passage for the index. `title` is what the words of its file's name and title are; `asked`: questions that it
    answers, which are searched and never quoted.
    """

    title: str
    heading: str
    text: str
    digest: bytes
    asked: str = ""


class Database:
    """The tables in one file, which is opened by the first `retried`. All other methods belong inside its work."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: sqlite3.Connection | None = None

    def retried(self, work: Callable[[], Done], refill: Callable[[], object] | None = None) -> Done:
        """Do some work with the tables; if they are damaged, once more with new ones, behind `refill`.

        Raises EdgeLMError: the disk is full, or the file cannot be used.
        """
        try:
            try:
                return work()
            except sqlite3.Error as error:
                if not _is_damage(error):
                    raise
            self._remove()
            if refill:
                refill()
            return work()
        except sqlite3.Error as error:
            raise _translated(error, self._path) from error

    def close(self) -> None:
        if self._opened:
            self._opened.close()
            self._opened = None

    @property
    def _db(self) -> sqlite3.Connection:
        if self._opened is None:
            try:
                self._opened = _open(self._path)
            except OSError as error:
                raise EdgeLMError(f"the index {self._path} cannot be opened: {error.strerror}", _HINT) from None
        return self._opened

    def _remove(self) -> None:
        """Remove the file; the next access makes a new one."""
        self.close()
        for ending in ("", "-wal", "-shm", "-journal"):
            with suppress(OSError):  # opening tells
                self._path.with_name(self._path.name + ending).unlink()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all writes of the block, or none."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                if self._db.in_transaction:  # SQLite rolls some failures back by itself
                    self._db.execute("ROLLBACK")
            raise

    # -- roots and files -----------------------------------------------------------------------------------------------

    def root(self, path: str) -> int:
        """Return the id of a root, which is used now."""
        self._db.execute(
            "INSERT INTO root (path, used) VALUES (?, ?) ON CONFLICT DO UPDATE SET used = excluded.used",
            (path, time.time()),
        )
        return int(self._db.execute("SELECT id FROM root WHERE path = ?", (path,)).fetchone()[0])

    def forget_root(self, path: str) -> None:
        self._forget("path = ?", path)

    def forget_unused(self, since: float) -> None:
        """Forget the roots that have not been used since a time."""
        self._forget("used < ?", since)

    def _forget(self, condition: str, value: object) -> None:
        roots = self._db.execute(f"SELECT id FROM root WHERE {condition}", (value,)).fetchall()
        for table, column in (("passage", "root"), ("file", "root"), ("root", "id")):
            self._db.executemany(f"DELETE FROM {table} WHERE {column} = ?", roots)
        if roots:
            self.prune()

    def files(self, root: int) -> dict[str, KnownFile]:
        """Return the files of a root, by name."""
        rows = self._db.execute("SELECT name, stamp, digest FROM file WHERE root = ?", (root,))
        return {name: KnownFile(stamp, digest) for name, stamp, digest in rows}

    def left_out(self, root: int) -> list[tuple[str, str]]:
        """Return name and reason of the files that were read and are no knowledge."""
        return self._db.execute(
            "SELECT name, reason FROM file WHERE root = ? AND reason != '' ORDER BY name", (root,)
        ).fetchall()

    def count(self, paths: Sequence[str]) -> tuple[int, int]:
        """Return the number of files and passages of some roots."""
        roots = f"(SELECT id FROM root WHERE path IN ({_marks(paths)}))"
        query = (
            f"SELECT (SELECT count(*) FROM file WHERE reason = '' AND root IN {roots}),"
            f" (SELECT count(*) FROM passage WHERE root IN {roots})"
        )
        num_files, num_passages = self._db.execute(query, (*paths, *paths)).fetchone()
        return num_files, num_passages

    def stamp(self, root: int, name: str, stamp: str) -> None:
        """Note that a file has new times and the same content."""
        self._db.execute("UPDATE file SET stamp = ? WHERE root = ? AND name = ?", (stamp, root, name))

    def put(self, root: int, name: str, known: KnownFile, reason: str, passages: Iterable[NewPassage]) -> None:
        """Replace a file and its passages."""
        self.remove(root, [name])
        file = self._db.execute(
            "INSERT INTO file (root, name, stamp, digest, reason) VALUES (?, ?, ?, ?, ?)", (root, name, *known, reason)
        ).lastrowid
        self._db.executemany(
            "INSERT INTO passage (root, file, title, heading, text, digest, asked) VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(root, file, *passage) for passage in passages],
        )

    def remove(self, root: int, names: Iterable[str]) -> None:
        """Remove files and their passages."""
        keys = [(root, name) for name in names]
        self._db.executemany("DELETE FROM passage WHERE file = (SELECT id FROM file WHERE root = ? AND name = ?)", keys)
        self._db.executemany("DELETE FROM file WHERE root = ? AND name = ?", keys)

    # -- words ---------------------------------------------------------------------------------------------------------

    def ranked(
        self, paths: Sequence[str], query: str, weights: tuple[float, float, float, float], limit: int
    ) -> list[tuple[int, float]]:
        """Return the ids of the passages that fit a query of FTS5 best, and their scores; higher is better."""
        rows = self._db.execute(
            "SELECT passage.id, -bm25(words, ?, ?, ?, ?) AS score FROM words JOIN passage ON passage.id = words.rowid"
            f" WHERE words MATCH ? AND passage.root IN (SELECT id FROM root WHERE path IN ({_marks(paths)}))"
            " ORDER BY score DESC, passage.id LIMIT ?",
            (*weights, query, *paths, limit),
        )
        return rows.fetchall()

    def has(self, word: str) -> bool:
        """Tell whether a word, or one that begins with it, is in a passage."""
        query = "SELECT EXISTS (SELECT 1 FROM words WHERE words MATCH ?)"
        return bool(self._db.execute(query, (f'"{word}"*',)).fetchone()[0])

    def which(self, stems: Iterable[str]) -> set[str]:
        """Return those of some stems that the index has."""
        asked = sorted(set(stems))
        found: set[str] = set()
        for begin in range(0, len(asked), 500):  # SQLite limits the values of a statement
            part = asked[begin : begin + 500]
            rows = self._db.execute(f"SELECT term FROM stem WHERE term IN ({_marks(part)})", part)
            found |= {term for (term,) in rows}
        return found

    def rows(self, ids: Sequence[int]) -> list[Row]:
        """Return passages by their ids, in that order."""
        found = {
            row[0]: Row(*row)
            for row in self._db.execute(
                "SELECT passage.id, file.name, heading, text, passage.digest FROM passage"
                f" JOIN file ON file.id = passage.file WHERE passage.id IN ({_marks(ids)})",
                ids,
            )
        }
        return [found[passage] for passage in ids if passage in found]

    # -- vectors -------------------------------------------------------------------------------------------------------

    def unembedded(self, paths: Sequence[str], model: str, limit: int) -> list[Row]:
        """Return the passages without a vector of a model."""
        rows = self._db.execute(
            "SELECT passage.id, file.name, heading, text, passage.digest"
            " FROM passage JOIN file ON file.id = passage.file"
            f" WHERE passage.root IN (SELECT id FROM root WHERE path IN ({_marks(paths)})) AND NOT EXISTS"
            " (SELECT 1 FROM vector WHERE vector.digest = passage.digest AND model = ?) ORDER BY passage.id LIMIT ?",
            (*paths, model, limit),
        )
        return [Row(*row) for row in rows]

    def put_vectors(self, model: str, vectors: Iterable[tuple[bytes, bytes]]) -> None:
        """Keep vectors by the digests of their passages."""
        self._db.executemany(
            "INSERT OR REPLACE INTO vector (model, digest, data) VALUES (?, ?, ?)",
            [(model, digest, data) for digest, data in vectors],
        )

    def vectors(self, paths: Sequence[str], model: str, num_bytes: int) -> list[tuple[int, bytes]]:
        """Return the ids and vectors of passages; a vector of another width is another model's of the same name."""
        return self._db.execute(
            "SELECT passage.id, data FROM passage JOIN vector ON vector.digest = passage.digest AND model = ?"
            f" WHERE length(data) = ? AND passage.root IN (SELECT id FROM root WHERE path IN ({_marks(paths)}))"
            " ORDER BY passage.id",
            (model, num_bytes, *paths),
        ).fetchall()

    def forget_vectors(self, model: str, num_bytes: int) -> None:
        """Remove a model's vectors of another width."""
        self._db.execute("DELETE FROM vector WHERE model = ? AND length(data) != ?", (model, num_bytes))

    # -- what is gone --------------------------------------------------------------------------------------------------

    def prune(self) -> None:
        """Remove the vectors and the words of passages that are gone."""
        self._db.execute("DELETE FROM vector WHERE digest NOT IN (SELECT digest FROM passage)")
        self._db.execute("INSERT INTO words (words) VALUES ('optimize')")  # FTS5 keeps deleted words until it merges


_HINT = "check the permissions of its folder, or move it with EDGELM_CACHE_DIR"


def _open(path: Path) -> sqlite3.Connection:
    """Open or create the file, for its owner alone. Raises OSError, sqlite3.Error."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    path.chmod(0o600)
    connection = sqlite3.connect(path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False)
    try:
        write_ahead(connection, BUSY_MS / 1000)
        connection.execute("PRAGMA synchronous = OFF")  # a cache: what a power cut damages is made again
        connection.execute("PRAGMA secure_delete = ON")  # of a file that is gone nothing stays here
        connection.execute("BEGIN IMMEDIATE")  # another process may open the file at the same time
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and not connection.execute("SELECT EXISTS (SELECT 1 FROM sqlite_schema)").fetchone()[0]:
            for statement in statements(_SCHEMA):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {VERSION}")
        elif version != VERSION:
            raise _OtherVersionError
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


class _OtherVersionError(sqlite3.DatabaseError):
    """Another version of edgelm wrote the file."""


def _marks(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))


def _is_damage(error: sqlite3.Error) -> bool:
    """Tell whether a new file helps: this one is no database, has wrong bytes, or lacks a table."""
    name = getattr(error, "sqlite_errorname", "")
    # An error without a name is our own, of another version, or of sqlite3: text that is no UTF-8.
    return not name or name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR"))


def _translated(error: sqlite3.Error, path: Path) -> EdgeLMError:
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith("SQLITE_FULL"):
        return EdgeLMError(f"the disk with {path} is full", "make room on it")
    if name.startswith("SQLITE_IOERR"):  # also of a full disk, where SQLite makes its file for shared memory
        return EdgeLMError(f"the disk with {path} fails: {error}", "it may be full: make room on it")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return EdgeLMError(f"another program has locked {path}", "try again later")
    return EdgeLMError(f"the index {path} cannot be used: {error}", _HINT)
