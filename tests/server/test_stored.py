"""Stored responses: each key has its own, conversations are put together, old ones go first."""

from __future__ import annotations

import sqlite3
import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgelm.base.errors import EdgeLMError
from edgelm.server import stored
from edgelm.server.stored import ResponseStore


def response(name: str, previous: str | None = None) -> dict[str, Any]:
    output = [{"type": "message", "role": "assistant", "content": f"answer of {name}"}]
    return {"id": name, "previous_response_id": previous, "model": "m", "output": output}


def question(name: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"question of {name}"}]


@pytest.fixture
def store(tmp_path: Path) -> ResponseStore:
    return ResponseStore(tmp_path / "data" / "responses.sqlite")


def test_a_conversation_is_its_items_in_order(store: ResponseStore) -> None:
    store.put("a", response("r1"), question("r1"))
    store.put("a", response("r2", "r1"), question("r2"))
    assert store.conversation("a", "r2") == [
        *question("r1"), *response("r1")["output"], *question("r2"), *response("r2")["output"],
    ]  # fmt: skip
    assert store.items("a", "r2") == question("r2")
    assert store.get("a", "r1") == response("r1")


def test_another_key_sees_nothing(store: ResponseStore) -> None:
    store.put("a", response("r1"), question("r1"))
    assert store.get("b", "r1") is None
    assert store.items("b", "r1") is None
    assert store.conversation("b", "r1") is None
    assert not store.delete("b", "r1")
    assert store.get("a", "r1")


def test_what_is_deleted_is_gone(store: ResponseStore, tmp_path: Path) -> None:
    store.put("a", response("r1"), question("secretquestion"))
    store.put("a", response("r2", "r1"), question("r2"))
    assert store.delete("a", "r1")
    assert not store.delete("a", "r1")
    assert store.get("a", "r1") is None
    assert store.conversation("a", "r2") is None
    store.close()
    assert b"secretquestion" not in (tmp_path / "data" / "responses.sqlite").read_bytes()


def test_the_oldest_go_first(store: ResponseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_RESPONSES", 3)
    for index in range(5):
        store.put("a", response(f"r{index}"), question("q"))
        store.put("b", response(f"r{index}"), question("q"))
    assert [bool(store.get("a", f"r{index}")) for index in range(5)] == [False, False, True, True, True]


def test_a_clock_that_is_set_back_deletes_no_new_one(store: ResponseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_RESPONSES", 3)
    for name, created in (("a", 900), ("b", 901), ("c", 902), ("d", 100)):
        monkeypatch.setattr(stored, "time", SimpleNamespace(time=lambda created=created: created))
        store.put("me", response(name), question(name))
    assert [store.get("me", name) is not None for name in "abcd"] == [False, True, True, True]


def test_a_key_that_stores_much_loses_its_own(store: ResponseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_KEY_BYTES", 3000)
    store.put("b", response("mine"), question("q"))
    for index in range(20):
        store.put("a", response(f"r{index}"), [{"role": "user", "content": "x" * 800}])
    assert [index for index in range(20) if store.get("a", f"r{index}")] == [17, 18, 19]
    assert store.get("b", "mine")


def test_the_key_with_most_gives_room(store: ResponseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_BYTES", 6600)
    for index in range(4):
        store.put("b", response(f"r{index}"), question("q"))
    for index in range(5):
        store.put("a", response(f"r{index}"), [{"role": "user", "content": "x" * 900}])
    store.put("c", response("r0"), [{"role": "user", "content": "x" * 900}])
    assert [bool(store.get("a", f"r{index}")) for index in range(5)] == [False, True, True, True, True]
    assert all(store.get("b", f"r{index}") for index in range(4))
    assert store.get("c", "r0")


def test_a_large_response_is_not_stored(store: ResponseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_RESPONSE_BYTES", 1000)
    with pytest.raises(EdgeLMError, match=r"at most 1,000 are allowed"):
        store.put("a", response("r1"), [{"role": "user", "content": "x" * 1000}])
    assert store.get("a", "r1") is None


def test_a_file_of_another_version_is_emptied(store: ResponseStore, tmp_path: Path) -> None:
    path = tmp_path / "data" / "responses.sqlite"
    store.put("a", response("r1"), question("r1"))
    store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("drop table items")
        connection.execute("pragma user_version = 0")
    connection.close()
    assert store.get("a", "r1") is None
    store.put("a", response("r1"), question("r1"))
    store.close()
    assert store.get("a", "r1") == response("r1")


def test_the_file_is_private_and_survives(store: ResponseStore, tmp_path: Path) -> None:
    path = tmp_path / "data" / "responses.sqlite"
    store.put("a", response("r1"), question("r1"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    store.close()
    assert ResponseStore(path).get("a", "r1") == response("r1")


def test_threads_share_a_store(store: ResponseStore) -> None:
    def work(key: str) -> None:
        for index in range(20):
            store.put(key, response(f"r{index}"), question(key))

    threads = [threading.Thread(target=work, args=(key,)) for key in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(store.items(key, f"r{index}") == question(key) for key in "abc" for index in range(20))


def test_a_file_that_is_no_database_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    path.write_bytes(b"no database at all" * 100)
    store = ResponseStore(path)
    with pytest.raises(EdgeLMError, match="cannot be used"):
        store.put("a", response("r1"), question("r1"))
    path.unlink()
    store.put("a", response("r1"), question("r1"))
    assert store.get("a", "r1") == response("r1")


def test_a_damaged_row_is_one_line(store: ResponseStore, tmp_path: Path) -> None:
    store.put("a", response("r1"), question("r1"))
    with sqlite3.connect(tmp_path / "data" / "responses.sqlite") as connection:
        connection.execute("update responses set response = '{'")
        connection.execute("update items set item = 'x', id = 'i'")
    for read in (store.get, store.items, store.conversation):
        with pytest.raises(EdgeLMError, match="cannot be used"):
            read("a", "r1")
    with pytest.raises(EdgeLMError, match="cannot be used"):
        store.items_of("a", {"i"})


def test_a_full_disk_costs_one_response(store: ResponseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", response("r1"), question("r1"))
    assert store._opened
    store._opened.execute("pragma max_page_count = 10")
    with pytest.raises(EdgeLMError, match="full"):
        store.put("a", response("r2"), [{"role": "user", "content": "x" * 100_000}])
    store.put("a", response("r3"), question("r3"))
    assert store.get("a", "r1")
    assert store.get("a", "r2") is None
    assert store.get("a", "r3")


def test_items_are_found_by_their_id(store: ResponseStore) -> None:
    output = [{"type": "message", "id": "msg_1", "role": "assistant", "content": "a"}]
    store.put("a", response("r1") | {"output": output}, [{"role": "user", "id": "msg_0", "content": "q"}])
    newer = {"role": "user", "id": "msg_0", "content": "newer"}
    store.put("a", response("r2"), [newer])
    assert store.items_of("a", {"msg_0", "msg_1", "msg_2"}) == {"msg_0": newer, "msg_1": output[0]}
    assert store.items_of("b", {"msg_0", "msg_1"}) == {}
    store.delete("a", "r2")
    store.delete("a", "r1")
    assert store.items_of("a", {"msg_0", "msg_1"}) == {}


def test_a_deleted_text_is_in_no_file(store: ResponseStore, tmp_path: Path) -> None:
    store.put("a", response("r1"), question("secretquestion"))
    store.delete("a", "r1")
    assert not any(b"secretquestion" in file.read_bytes() for file in (tmp_path / "data").iterdir())
