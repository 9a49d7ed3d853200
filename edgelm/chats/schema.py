"""The tables of the chats' file, the statements that bring an older file up to date, and how SQLite files are begun."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator

SCHEMA_VERSION = 4

SCHEMA = """
CREATE TABLE chat (
    id INTEGER PRIMARY KEY, title TEXT NOT NULL, renamed INTEGER NOT NULL, system TEXT NOT NULL, model TEXT NOT NULL,
    sampling TEXT NOT NULL, leaf INTEGER, created REAL NOT NULL, changed REAL NOT NULL,
    knowledge TEXT NOT NULL DEFAULT '[]', consents TEXT NOT NULL DEFAULT '{}',
    summarized INTEGER NOT NULL DEFAULT 0, preset TEXT NOT NULL DEFAULT '', tools TEXT NOT NULL DEFAULT '[]',
    tool_consents TEXT NOT NULL DEFAULT '[]', pinned INTEGER NOT NULL DEFAULT 0, archived INTEGER NOT NULL DEFAULT 0,
    tags TEXT NOT NULL DEFAULT '[]', deleted REAL);
CREATE INDEX chat_changed ON chat (changed);
CREATE TABLE message (
    id INTEGER PRIMARY KEY, chat INTEGER NOT NULL REFERENCES chat ON DELETE CASCADE,
    parent INTEGER REFERENCES message ON DELETE CASCADE, role TEXT NOT NULL, text TEXT NOT NULL,
    reasoning TEXT NOT NULL, state TEXT NOT NULL, note TEXT NOT NULL, model TEXT NOT NULL, stats TEXT NOT NULL,
    created REAL NOT NULL, sent_from INTEGER, reading TEXT NOT NULL DEFAULT '', calls TEXT NOT NULL DEFAULT '');
CREATE INDEX message_chat ON message (chat);
CREATE INDEX message_parent ON message (parent);
CREATE TABLE attachment (
    message INTEGER NOT NULL REFERENCES message ON DELETE CASCADE, place INTEGER NOT NULL, kind TEXT NOT NULL,
    name TEXT NOT NULL, path TEXT NOT NULL, text TEXT NOT NULL, data BLOB NOT NULL, media_type TEXT NOT NULL,
    digest TEXT NOT NULL, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (message, place));
CREATE TABLE piece (
    id INTEGER PRIMARY KEY, message INTEGER NOT NULL REFERENCES message ON DELETE CASCADE,
    text TEXT NOT NULL, reasoning TEXT NOT NULL);
CREATE INDEX piece_message ON piece (message);
CREATE TABLE setting (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE VIRTUAL TABLE message_words USING fts5 (
    text, content=message, content_rowid=id, tokenize='unicode61 remove_diacritics 2');
CREATE TRIGGER message_added AFTER INSERT ON message BEGIN
    INSERT INTO message_words (rowid, text) VALUES (new.id, new.text); END;
CREATE TRIGGER message_changed AFTER UPDATE OF text ON message WHEN old.text IS NOT new.text BEGIN
    INSERT INTO message_words (message_words, rowid, text) VALUES ('delete', old.id, old.text);
    INSERT INTO message_words (rowid, text) VALUES (new.id, new.text); END;
CREATE TRIGGER message_removed AFTER DELETE ON message BEGIN
    INSERT INTO message_words (message_words, rowid, text) VALUES ('delete', old.id, old.text); END;
CREATE VIRTUAL TABLE title_words USING fts5 (
    title, content=chat, content_rowid=id, tokenize='unicode61 remove_diacritics 2');
CREATE TRIGGER chat_added AFTER INSERT ON chat BEGIN
    INSERT INTO title_words (rowid, title) VALUES (new.id, new.title); END;
CREATE TRIGGER chat_renamed AFTER UPDATE OF title ON chat WHEN old.title IS NOT new.title BEGIN
    INSERT INTO title_words (title_words, rowid, title) VALUES ('delete', old.id, old.title);
    INSERT INTO title_words (rowid, title) VALUES (new.id, new.title); END;
CREATE TRIGGER chat_removed AFTER DELETE ON chat BEGIN
    INSERT INTO title_words (title_words, rowid, title) VALUES ('delete', old.id, old.title); END;
"""

# The statements that turn a file of this version into one of the next version.
MIGRATIONS = {
    1: "ALTER TABLE message ADD COLUMN sent_from INTEGER;",
    2: """
    ALTER TABLE chat ADD COLUMN knowledge TEXT NOT NULL DEFAULT '[]';
    ALTER TABLE chat ADD COLUMN consents TEXT NOT NULL DEFAULT '{}';
    ALTER TABLE message ADD COLUMN reading TEXT NOT NULL DEFAULT '';
    """,
    3: """
    ALTER TABLE chat ADD COLUMN summarized INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE chat ADD COLUMN preset TEXT NOT NULL DEFAULT '';
    ALTER TABLE chat ADD COLUMN tools TEXT NOT NULL DEFAULT '[]';
    ALTER TABLE chat ADD COLUMN tool_consents TEXT NOT NULL DEFAULT '[]';
    ALTER TABLE chat ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE chat ADD COLUMN archived INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE chat ADD COLUMN tags TEXT NOT NULL DEFAULT '[]';
    ALTER TABLE chat ADD COLUMN deleted REAL;
    ALTER TABLE message ADD COLUMN calls TEXT NOT NULL DEFAULT '';
    CREATE TABLE attachment (
        message INTEGER NOT NULL REFERENCES message ON DELETE CASCADE, place INTEGER NOT NULL, kind TEXT NOT NULL,
        name TEXT NOT NULL, path TEXT NOT NULL, text TEXT NOT NULL, data BLOB NOT NULL, media_type TEXT NOT NULL,
        digest TEXT NOT NULL, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, tokens INTEGER NOT NULL,
        PRIMARY KEY (message, place));
    """,
}


def statements(script: str) -> Iterator[str]:
    """Split a script into its statements, which may contain semicolons themselves."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def write_ahead(connection: sqlite3.Connection, busy_s: float) -> None:
    """Choose the WAL mode. SQLite does not wait for another process that does the same, so we do."""
    deadline = time.monotonic() + busy_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
