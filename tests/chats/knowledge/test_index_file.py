"""The file of the index: private, made again when it is damaged, and used by two processes at once."""

from __future__ import annotations

import multiprocessing
import sqlite3
import stat
import time
from contextlib import suppress
from pathlib import Path

import pytest

from edgelm.base.errors import EdgeLMError
from edgelm.chats.knowledge import index, tables
from edgelm.chats.knowledge.files import File, Root, Text
from edgelm.chats.knowledge.index import Knowledge
from tests.chats.knowledge.conftest import Write
from tests.chats.knowledge.test_index import ALL, find


def test_the_file_is_private(tmp_path: Path, folder: Path, write: Write, knowledge: Knowledge) -> None:
    write("a.md", "apples")
    knowledge.refresh([str(folder)])
    found = sorted((tmp_path / "cache").iterdir())
    assert [stat.S_IMODE(path.stat().st_mode) for path in found] == [0o600] * len(found)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


@pytest.mark.parametrize("gone", ["file", "text", "root"])
def test_nothing_stays_of_a_deleted_file(
    tmp_path: Path, folder: Path, write: Write, knowledge: Knowledge, gone: str
) -> None:
    write("a.md", "unforgettable words")
    write("b.md", "others")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "c.md").write_text("more")
    knowledge.refresh([str(tmp_path / "more"), str(folder)])
    if gone == "file":
        (folder / "a.md").unlink()
    elif gone == "text":
        write("a.md", "other words")
    else:
        folder.rename(tmp_path / "moved")
    with suppress(EdgeLMError):  # the root is gone
        knowledge.refresh([str(folder)])
    knowledge.close()
    for path in (tmp_path / "cache").iterdir():
        assert b"unforg" not in path.read_bytes()  # neither the text nor a word of the index


@pytest.mark.parametrize("damage", ["no database", "cut", "bytes", "empty", "no table", "other version"])
@pytest.mark.parametrize("when", ["closed", "open"])
def test_a_damaged_index_is_made_again(tmp_path: Path, folder: Path, write: Write, damage: str, when: str) -> None:
    for number in range(50):
        write(f"{number}.md", f"# Apples {number}\n\n" + "red " * 200)
    file = tmp_path / "k.db"
    knowledge = Knowledge(file)
    knowledge.refresh([str(folder)])
    if when == "closed":
        knowledge.close()
    else:
        with sqlite3.connect(file) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    if damage in ("no table", "other version"):
        with sqlite3.connect(file) as other:
            other.execute("DROP TABLE passage" if damage == "no table" else "PRAGMA user_version = 999")
    else:
        size = file.stat().st_size
        with file.open("r+b") as damaged:
            if damage == "no database":
                damaged.write(b"no database " * 1_000)
            elif damage == "bytes":
                damaged.seek(4096)
                damaged.write(b"\xa5" * (size - 4096))
            else:
                damaged.truncate(0 if damage == "empty" else size // 2)
    assert len(knowledge.search([str(folder)], "apples", max_chars=ALL)) == 8 or damage == "empty"
    assert knowledge.refresh([str(folder)])[:2] == (50, 50)
    assert len(knowledge.search([str(folder)], "apples", max_chars=ALL)) == 8
    knowledge.close()


def test_a_full_disk_is_one_line(folder: Path, write: Write, tmp_path: Path) -> None:
    knowledge = Knowledge(tmp_path / "k.db")
    write("a.md", "apples")
    knowledge.refresh([str(folder)])
    knowledge._database._db.execute("PRAGMA max_page_count = 1")  # SQLite's way to be full
    write("b.md", "\n\n".join(f"word{n} " * 50 for n in range(500)))
    with pytest.raises(EdgeLMError, match="is full; make room"):
        knowledge.refresh([str(folder)])
    assert find(knowledge, folder, "apples") == ["a.md"]
    knowledge.close()


def test_a_disk_without_room_for_shared_memory_is_one_line(
    folder: Path, write: Write, knowledge: Knowledge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite reports an I/O error where a full disk has no room for the file beside the index."""

    def fails(_: Path) -> sqlite3.Connection:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode, error.sqlite_errorname = sqlite3.SQLITE_IOERR_SHMSIZE, "SQLITE_IOERR_SHMSIZE"
        raise error

    write("a.md", "apples")
    monkeypatch.setattr(tables, "_open", fails)
    with pytest.raises(EdgeLMError, match="disk I/O error; it may be full"):
        knowledge.refresh([str(folder)])


def test_a_locked_index_is_one_line(
    folder: Path, write: Write, tmp_path: Path, knowledge: Knowledge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "BUSY_MS", 50)
    write("a.md", "apples")
    knowledge.refresh([str(folder)])
    other = sqlite3.connect(tmp_path / "cache" / "knowledge.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(EdgeLMError, match="another program has locked"):
        knowledge.refresh([str(folder)])
    assert find(knowledge, folder, "apples") == ["a.md"]  # reading goes on
    other.close()


def test_an_index_that_cannot_be_opened_is_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "k.db").mkdir()
    (tmp_path / "file").write_text("")
    for file in (tmp_path / "k.db", tmp_path / "file" / "k.db"):
        with pytest.raises(EdgeLMError, match="cannot be"):
            Knowledge(file).refresh([str(folder)])


def index_often(file: Path, root: Path, question: str, results: multiprocessing.Queue[int]) -> None:
    for _ in range(5):
        knowledge = Knowledge(file)
        knowledge.refresh([str(root)])
        results.put(len(knowledge.search([str(root)], question, max_chars=ALL)))
        (root / "own.md").write_text(f"apples {time.time_ns()}")
        knowledge.close()


def test_two_processes_index_at_once(folder: Path, write: Write, tmp_path: Path) -> None:
    for number in range(200):
        write(f"{number}.md", f"# Apples {number}\n\n" + "red " * 100)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (tmp_path / "cache" / "k.db", folder, "apples", results)
    processes = [context.Process(target=index_often, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    counts = [results.get(timeout=60) for _ in range(10)]
    for process in processes:
        process.join(timeout=60)
    assert counts == [8] * 10
    assert [process.exitcode for process in processes] == [0, 0]


def test_a_root_that_another_process_forgets_meanwhile_is_not_mixed_with_the_next_one(
    tmp_path: Path, folder: Path, write: Write, knowledge: Knowledge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is renamed while this process reads it; SQLite gives the id of its row to the next root."""
    for number in range(4):
        write(f"{number}.md", f"private words {number}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "o.md").write_text("words")
    other = Knowledge(tmp_path / "cache" / "knowledge.db")
    reading = Root.read

    def renamed_meanwhile(opened: Root, file: File) -> Text | None:
        if file.name == "2.md":
            folder.rename(tmp_path / "moved")
            with pytest.raises(EdgeLMError, match="does not exist"):
                other.refresh([str(folder)])
            other.refresh([str(tmp_path / "other")])
            monkeypatch.undo()
        return reading(opened, file)

    monkeypatch.setattr(index, "BATCH_BYTES", 1)
    monkeypatch.setattr(Root, "read", renamed_meanwhile)
    knowledge.refresh([str(folder)])
    assert find(other, tmp_path / "other", "private words") == ["o.md"]
    other.close()
