"""The chat history: all that was written can be read, whatever happens between."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from edgelm.base.passages import Passage
from edgelm.chats.attachments import Attachment, images, with_attachments
from edgelm.chats.export_json import to_json
from edgelm.chats.export_md import to_markdown
from edgelm.chats.exports import file_name
from edgelm.chats.history import UNTITLED, Chat, Message, Tree, make_title, new_id, split_sent
from edgelm.chats.reading import Reading
from edgelm.chats.schema import SCHEMA_VERSION
from edgelm.chats.store import PAGE_BYTES, ChatsError, Store
from edgelm.chats.store_thread import StoreThread
from edgelm.chats.tool_calls import ToolCall, tool_name
from tests.counts import Count

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "chats.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    opened = Store(path)
    yield opened
    opened.close()


def add_chat(store: Store, *texts: str, title: str = "A chat") -> tuple[Chat, list[Message]]:
    """Write a chat of turns in one branch."""
    chat, messages = Chat(title=title), []
    store.put_chat(chat)
    for i, text in enumerate(texts):
        parent = messages[-1].id if messages else None
        messages.append(Message(chat=chat.id, parent=parent, role="assistant" if i % 2 else "user", text=text))
        store.put_message(messages[-1])
    chat.leaf = messages[-1].id if messages else None
    store.put_chat(chat)
    return chat, messages


class ChatsMachine(RuleBasedStateMachine):
    """Any order of writes, with the file closed and opened anywhere, against plain dictionaries."""

    @initialize(folder=st.just(None))
    def start(self, folder: None) -> None:
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.store = Store(Path(self.folder.name) / "chats.db")
        self.chats: dict[int, Chat] = {}
        self.messages: dict[int, Message] = {}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.folder.cleanup()

    def pick(self, data: st.DataObject, values: list[int]) -> int | None:
        return data.draw(st.sampled_from(values)) if values else None

    @rule(title=TEXTS, system=TEXTS)
    def add_chat(self, title: str, system: str) -> None:
        chat = Chat(title=title, system=system, sampling={"temperature": 0.5}, knowledge=("/a", title))
        chat.consents = {"http://gpu.example": True, system: False}
        self.chats[chat.id] = replace(chat)
        self.store.put_chat(chat)

    @rule(data=st.data(), text=TEXTS, role=st.sampled_from(["user", "assistant"]))
    def add_message(self, data: st.DataObject, text: str, role: str) -> None:
        chat = self.pick(data, list(self.chats))
        if chat is None:
            return
        parent = data.draw(
            st.sampled_from([None, *(message.id for message in self.messages.values() if message.chat == chat)])
        )
        message = Message(chat=chat, parent=parent, role=role, text=text, state="streaming")  # type: ignore[arg-type]
        message.reading = Reading(("/a",), (Passage("a.md", text, text),), text) if role == "user" else None
        self.messages[message.id] = replace(message)
        self.store.put_message(message)

    @rule(data=st.data(), text=TEXTS)
    def append(self, data: st.DataObject, text: str) -> None:
        message = self.pick(data, [message.id for message in self.messages.values() if message.state == "streaming"])
        if message is not None:
            self.messages[message].text += text
            self.store.append(message, text)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        message = self.pick(data, list(self.messages))
        if message is not None:
            self.messages[message].state = "done"
            self.store.put_message(self.messages[message])

    @rule(data=st.data(), title=TEXTS)
    def rename(self, data: st.DataObject, title: str) -> None:
        chat = self.pick(data, list(self.chats))
        if chat is not None:
            self.chats[chat].title = title
            self.chats[chat].changed += data.draw(st.floats(-100, 100))
            self.store.put_chat(self.chats[chat])

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        chat = self.pick(data, list(self.chats))
        if chat is not None:
            del self.chats[chat]
            self.messages = {id_: message for id_, message in self.messages.items() if message.chat != chat}
            self.store.delete_chat(chat)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = Store(Path(self.folder.name) / "chats.db")

    @rule(data=st.data())
    def search_finds_words(self, data: st.DataObject) -> None:
        self.reopen()  # what is still streaming is searchable then
        message = self.pick(data, list(self.messages))
        words = [] if message is None else [word for word in self.messages[message].text.split() if word.isalpha()]
        if words and message is not None:
            word = data.draw(st.sampled_from(words))
            if word.isascii():  # how other scripts are cut into words is SQLite's business
                hits = self.store.search(word)
                assert self.messages[message].chat in [hit.chat.id for hit in hits]

    @invariant()
    def everything_is_there(self) -> None:
        if not hasattr(self, "store"):
            return
        newest_first = sorted(self.chats.values(), key=lambda chat: (chat.changed, chat.id), reverse=True)
        assert self.store.chats() == newest_first
        for chat in self.chats:
            expected = [message for message in self.messages.values() if message.chat == chat]
            assert self.store.messages(chat) == expected
        self.store._db.execute("INSERT INTO message_words (message_words) VALUES ('integrity-check')")
        self.store._db.execute("INSERT INTO title_words (title_words) VALUES ('integrity-check')")


ChatsMachine.TestCase.settings = settings(
    max_examples=Count(test=25, soak=1_000), stateful_step_count=30, deadline=None
)
TestChats = ChatsMachine.TestCase


def test_ids_grow_and_differ() -> None:
    ids = [new_id() for _ in range(10_000)]
    assert ids == sorted(set(ids))


@pytest.mark.parametrize(
    ("query", "matches"),
    [
        ("rust", True), ("RUS", True), ("unicode", True), ("borrow rust", True), ("rust python", False),
        ("--ctx", True), ("c++", True), ("本語", True), ("100%", True), ("%_%", False), ('"', False), ("*", False),
        ("NEAR(", False), ("", False), ("   ", False),
    ],
)  # fmt: skip
def test_search(store: Store, query: str, matches: bool) -> None:
    add_chat(store, "The borrow checker of Rust, --ctx and C++, 100% Ünïcode, 日本語のテキスト")
    assert bool(store.search(query)) is matches


def test_search_gives_one_hit_a_chat_newest_first_and_marks_what_it_found(store: Store) -> None:
    old, _ = add_chat(store, "pivot one", "pivot two")
    new, messages = add_chat(store, "nothing", "the pivot is here")
    titled, _ = add_chat(store, "nothing", title="A pivot")
    for i, chat in enumerate([old, new, titled]):
        store.put_chat(replace(chat, changed=float(i)))
    hits = store.search("pivot")
    assert [hit.chat.id for hit in hits] == [titled.id, new.id, old.id]
    assert hits[0].message is None
    assert hits[1].message == messages[1].id
    assert hits[1].snippet == "the \x02pivot\x03 is here"


def test_search_follows_changes(store: Store) -> None:
    chat, (message,) = add_chat(store, "before")
    store.put_message(replace(message, text="after"))
    assert not store.search("before")
    assert store.search("after")
    store.put_chat(replace(chat, title="renamed"))
    assert store.search("renamed")
    store.delete_chat(chat.id)
    assert not store.search("after")
    assert not store.search("renamed")


def test_the_file_is_for_its_owner_alone(store: Store, path: Path) -> None:
    add_chat(store, "secret")
    files = list(path.parent.iterdir())
    assert len(files) >= 2, "the write-ahead log lies beside the file"
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_text_that_sqlite_cannot_hold_is_kept_as_far_as_it_goes(store: Store) -> None:
    chat, _ = add_chat(store, "a\0b\ud83dc")
    assert store.messages(chat.id)[0].text == "a\ufffdb?c"


WRITER = """
import sys
from pathlib import Path
from types import SimpleNamespace
from edgelm.chats.store_thread import StoreThread
from edgelm.chats.history import Chat, Message
thread = StoreThread(Path(sys.argv[1]), lambda problem: None)
chat = Chat(title="t")
message = Message(chat=chat.id, parent=None, role="assistant", state="streaming")
thread.write(lambda store: store.put_chat(chat), lambda store: store.put_message(message))
i = 0
while True:
    thread.write(lambda store, i=i: store.append(message.id, f"{i} "))
    thread.read(lambda store: None).result()
    print(i, flush=True)  # this token is saved
    i += 1
"""


def test_a_killed_process_loses_at_most_the_token_being_written(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(200):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        printed = [int(line) for line in process.stdout.read().split()]
    last = printed[-1] if printed else 199
    store = Store(path)
    (chat,) = store.chats()
    (message,) = store.messages(chat.id)
    numbers = [int(word) for word in message.text.split()]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) in (last + 1, last + 2)
    assert message.state == "streaming"
    assert store.search(str(last)), "the text of the killed process can be searched"
    store.close()


ADDED = {  # columns, by the version that has them first
    2: ("message.sent_from",),
    3: ("message.reading", "chat.knowledge", "chat.consents"),
    4: (
        "chat.summarized", "chat.preset", "chat.tools", "chat.tool_consents", "chat.pinned", "chat.archived",
        "chat.tags", "chat.deleted", "message.calls",
    ),
}  # fmt: skip


def make_older(store: Store, version: int) -> None:
    """Turn the file into one of an older version, and close it."""
    for later in range(version + 1, SCHEMA_VERSION + 1):
        for name in ADDED[later]:
            table, _, column = name.partition(".")
            store._db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    if version < 4:
        store._db.execute("DROP TABLE attachment")
    store._db.execute(f"PRAGMA user_version = {version}")
    store.close()


def test_a_file_of_the_first_version_is_taken_over(store: Store, path: Path) -> None:
    chat, _ = add_chat(store, "kept")
    make_older(store, 1)
    for _ in range(2):
        again = Store(path)
        assert again._db.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION
        assert [message.sent_from for message in again.messages(chat.id)] == [None]
        again.close()


def test_a_file_without_knowledge_is_taken_over(store: Store, path: Path) -> None:
    chat, (message,) = add_chat(store, "kept")
    make_older(store, 2)
    again = Store(path)
    assert again.chats() == [chat]
    assert again.messages(chat.id) == [message]
    chat.knowledge, chat.consents = ("/notes",), {"http://gpu.example": False}
    message.reading = Reading(("/notes",), (Passage("gpu.md", "Memory", "It has the word pelican."),))
    again.put_chat(chat)
    again.put_message(message)
    again.close()
    for _ in range(2):
        again = Store(path)
        assert again.chats() == [chat]
        assert again.messages(chat.id) == [message]
        assert again.search("kept")
        assert not again.search("pelican"), "only what was written in the chat is searched"
        again.close()


def test_a_file_without_attachments_and_calls_is_taken_over(store: Store, path: Path) -> None:
    chat, messages = add_chat(store, "look at this", "I did")
    make_older(store, 3)
    again = Store(path)
    assert again.chats() == [chat]
    assert again.messages(chat.id) == messages
    chat.pinned, chat.archived, chat.tags, chat.deleted = True, True, ("work", "2026"), 5.0
    chat.summarized, chat.preset, chat.tools, chat.tool_consents = True, "brief", ("files",), ("abc",)
    picture = Attachment(kind="image", name="a.png", path="/a.png", data=b"\0\xff", media_type="image/png", mtime_ns=7)
    messages[0].attachments = (Attachment(kind="text", name="a.py", text="a = 1\n", digest="0f", size=6), picture)
    messages[1].calls = (
        ToolCall(id="c1", server="files", tool="read", arguments="{}", at=2, state="done", result="x"),
    )
    again.put_chat(chat)
    for message in messages:
        again.put_message(message)
        again.put_message(message)  # written twice, kept once
    again.close()
    for _ in range(2):
        again = Store(path)
        assert again.deleted_chats() == [chat]
        assert again.messages(chat.id) == messages
        again.close()


def test_what_is_attached_stands_before_the_message_in_a_fence_of_its_own() -> None:
    pasted = Attachment(kind="text", name="notes.md", text="```\ncode\n```")
    picture = Attachment(kind="image", name="a.png", data=b"\1", media_type="image/png")
    text = with_attachments("Explain it", (pasted, picture))
    assert text == "notes.md:\n````\n```\ncode\n```\n````\n\nExplain it"
    assert images((pasted, picture)) == ("data:image/png;base64,AQ==",)


def test_names_of_tools_fit_every_endpoint() -> None:
    assert tool_name("files", "read_text") == "files__read_text"
    same = [tool_name("files", name) for name in ("read_text", "read.text", "read/text")]
    assert len({*same}) == 3
    assert all(re.fullmatch(r"[\w-]{1,64}", name) for name in same)
    long = [tool_name("a b/c", "x" * 70 + end) for end in "12"]
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) for name in long)
    assert long[0] != long[1]


def test_what_is_not_sent_any_more_is_kept(store: Store) -> None:
    chat, path = add_chat(store, "q0", "a0", "q1", "a1", "q2", "a2")
    assert split_sent([]) == ([], [])
    assert split_sent(path) == ([], path)
    path[3].sent_from = path[2].id
    assert split_sent(path) == (path[:2], path[2:])
    path[5].sent_from = path[4].id
    assert split_sent(path) == (path[:4], path[4:]), "the last one holds"
    assert split_sent(path[:4]) == (path[:2], path[2:4]), "messages above it are not affected"
    for message in path:
        store.put_message(message)
    assert store.messages(chat.id) == path


def test_a_newer_file_is_refused_and_left_alone(store: Store, path: Path) -> None:
    add_chat(store, "kept")
    store._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    store.close()
    before = path.read_bytes()
    with pytest.raises(ChatsError, match="newer edgelm"):
        Store(path)
    assert path.read_bytes() == before


def test_a_damaged_file_is_one_line(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"This is no database. " * 100)
    with pytest.raises(ChatsError, match="damaged; move it away") as caught:
        Store(path)
    assert not caught.value.temporary


@pytest.mark.parametrize(
    ("name", "free", "is_full"),
    [
        ("SQLITE_IOERR_SHMSIZE", 4096, True),  # of an existing file, on tmpfs
        ("SQLITE_IOERR_WRITE", 0, True),
        ("SQLITE_IOERR_WRITE", 2**30, False),
        ("SQLITE_IOERR_READ", 0, False),
    ],
)
def test_an_input_output_error_of_a_full_disk_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, free: int, is_full: bool
) -> None:
    def fails(*_: object) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode, error.sqlite_errorname = getattr(sqlite3, name), name
        raise error

    monkeypatch.setattr("edgelm.chats.store.write_ahead", fails)
    monkeypatch.setattr("edgelm.chats.store.shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(ChatsError, match="is full; make room" if is_full else name) as caught:
        Store(path)
    assert (caught.value.is_full, caught.value.temporary) == (is_full, True)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ChatsError, match=r"cannot be opened: .*; .*EDGELM_DATA_DIR"):
        Store(tmp_path / "file" / "chats.db")


class Reports:
    """The reports of a store thread."""

    def __init__(self) -> None:
        self.all: list[ChatsError | None] = []
        self._came = threading.Condition()

    def __call__(self, problem: ChatsError | None) -> None:
        with self._came:
            self.all.append(problem)
            self._came.notify_all()

    def wait(self, count: int) -> None:
        with self._came:
            assert self._came.wait_for(lambda: len(self.all) >= count, 20), self.all


def test_a_locked_file_is_waited_for_and_nothing_is_lost(path: Path) -> None:
    Store(path).close()
    reports = Reports()
    thread = StoreThread(path, reports)
    assert thread.read(Store.chats).result(20) == []
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    chats = [Chat(title=str(i)) for i in range(3)]
    for chat in chats:
        thread.write(lambda store, chat=chat: store.put_chat(chat))
    reports.wait(1)
    assert "locked" in str(reports.all[0])
    assert thread.num_unsaved == 3
    started = time.monotonic()
    assert thread.read(Store.chats).result(20) == []  # reads do not wait for the lock
    assert time.monotonic() - started < 10
    other.execute("COMMIT")
    other.close()
    reports.wait(2)
    assert reports.all[1] is None
    assert {chat.title for chat in thread.read(Store.chats).result(20)} == {"0", "1", "2"}
    assert thread.close(20) == 0


def streamed(path: Path) -> tuple[Chat, Message, Store]:
    """Return a chat in a file with an answer that is being written."""
    store, chat = Store(path), Chat(title="Streams")
    answer = Message(chat=chat.id, parent=None, role="assistant", state="streaming")
    store.put_chat(chat)
    store.put_message(answer)
    return chat, answer, store


def test_streamed_text_waits_for_more_but_not_for_what_follows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgelm.chats.store_thread.GATHER_S", 3600.0)
    chat, answer, store = streamed(path)
    store.close()
    thread = StoreThread(path, Reports())
    for i in range(100):
        thread.append(answer.id, f"{i} ", "thought ")
    assert thread.num_unsaved == 1
    (saved,) = thread.read(lambda store: store.messages(chat.id)).result(20)
    assert saved.text == "".join(f"{i} " for i in range(100))
    assert saved.reasoning == "thought " * 100
    thread.append(answer.id, "more", "")
    thread.write(lambda store: store.put_setting("theme", "dark"))
    with closing(Store(path)) as other:
        while other.settings().get("theme") != "dark":
            time.sleep(0.01)
    thread.append(answer.id, " and more", "")
    assert thread.close(20) == 0
    with closing(Store(path)) as other:
        assert other.messages(chat.id)[0].text.endswith("99 more and more")


def test_streamed_text_is_saved_though_nothing_follows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgelm.chats.store_thread.GATHER_S", 0.02)
    chat, answer, store = streamed(path)
    thread = StoreThread(path, Reports())
    for text in ("one ", "two "):
        thread.append(answer.id, text, "")
        while not store.messages(chat.id)[0].text.endswith(text):
            time.sleep(0.01)
    assert store.messages(chat.id)[0].text == "one two "
    store.close()
    assert thread.close(20) == 0


def test_short_parts_are_written_into_one_piece(path: Path) -> None:
    chat, answer, store = streamed(path)
    parts = [f"part {i} " for i in range(400)]
    for part in parts:
        store.append(answer.id, part)
    assert store._rows("SELECT count(*) FROM piece")[0][0] <= 5
    assert store.messages(chat.id)[0].text == "".join(parts)
    store.close()


@pytest.mark.skipif(not Path("/proc/thread-self/io").exists(), reason="only Linux counts what a thread writes")
@pytest.mark.parametrize("page_bytes", [4096, PAGE_BYTES], ids=["older file", "new file"])
def test_a_slow_answer_of_6_kb_writes_a_third_of_a_megabyte(
    path: Path, page_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """15 tokens per second for 100 s: 111 times what came within GATHER_S."""
    written_by(path, page_bytes, monkeypatch)
    store = Store(path)

    def num_written() -> int:
        fields = dict(line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines())
        return int(fields["wchar"])

    chat, (question,) = add_chat(store, "Tell me everything")
    answer = Message(chat=chat.id, parent=question.id, role="assistant", state="streaming")
    before = num_written()
    store.put_message(answer)
    for part in range(111):
        text = f"{part} is one of those numbers that come in a long line, each, "
        answer.text += text
        with store.transaction():
            store.append(answer.id, text)
    answer.state = "done"
    with store.transaction():
        store.put_message(answer)
        store.put_chat(chat)
    assert len(answer.text) > 6000
    assert num_written() - before < 400 * 1024
    store.close()


def written_by(path: Path, page_bytes: int, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Write a file with pages of that size, and a chat into it."""
    with monkeypatch.context() as patch:
        patch.setattr("edgelm.chats.store.PAGE_BYTES", page_bytes)
        store = Store(path)
    chat, _ = add_chat(store, *(f"question {number} about elephants" for number in range(50)))
    store.close()
    return chat


def page_bytes(store: Store) -> tuple[int, str]:
    return store._rows("PRAGMA page_size")[0][0], store._rows("PRAGMA journal_mode")[0][0]


def test_an_older_file_gets_the_pages_of_a_new_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = written_by(path, 4096, monkeypatch)
    store = Store(path)
    assert page_bytes(store) == (PAGE_BYTES, "wal")
    assert [message.text for message in store.messages(chat.id)] == [
        f"question {number} about elephants" for number in range(50)
    ]
    assert [hit.chat.id for hit in store.search("elephants")] == [chat.id]
    assert store._rows("PRAGMA integrity_check") == [("ok",)]
    store.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_older_file_that_is_open_elsewhere_or_too_large_stays_as_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = written_by(path, 4096, monkeypatch)
    with closing(sqlite3.connect(path)) as other:
        other.execute("SELECT count(*) FROM chat").fetchone()
        store = Store(path)
        assert page_bytes(store) == (4096, "wal")
        assert len(store.messages(chat.id)) == 50
        store.close()
    monkeypatch.setattr("edgelm.chats.store.MAX_REPACKED_BYTES", 8192)
    store = Store(path)
    assert page_bytes(store) == (4096, "wal")
    store.close()


def test_a_file_locked_from_the_start_is_waited_for(path: Path) -> None:
    Store(path).close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    reports = Reports()
    thread = StoreThread(path, reports)
    thread.write(lambda store: store.put_chat(Chat(title="waits")))
    reports.wait(1)
    other.execute("COMMIT")
    other.close()
    reports.wait(2)
    assert [chat.title for chat in thread.read(Store.chats).result(20)] == ["waits"]
    assert thread.close(20) == 0


def test_a_full_disk_is_waited_for_and_nothing_is_lost(path: Path) -> None:
    reports = Reports()
    thread = StoreThread(path, reports)

    def limit(store: Store, pages: int) -> None:
        store._db.execute(f"PRAGMA max_page_count = {pages}")

    thread.read(lambda store: limit(store, 1)).result(20)  # SQLite takes the size it has
    chat = Chat(title="big")
    message = Message(chat=chat.id, parent=None, role="user", text="word " * 50_000)
    thread.write(lambda store: store.put_chat(chat), lambda store: store.put_message(message))
    reports.wait(1)
    assert "is full; make room" in str(reports.all[0])
    assert thread.read(Store.chats).result(20) == []
    thread.read(lambda store: limit(store, 1_000_000)).result(20)
    reports.wait(2)
    assert thread.read(lambda store: store.messages(chat.id)).result(20) == [message]
    assert thread.close(20) == 0


def test_writes_that_cannot_be_saved_are_counted_at_the_end(path: Path) -> None:
    Store(path).close()
    other = sqlite3.connect(path, isolation_level=None)
    thread = StoreThread(path, Reports())
    thread.read(Store.chats).result(20)
    other.execute("BEGIN IMMEDIATE")
    thread.write(lambda store: store.put_chat(Chat()))
    assert thread.close(0.1) == 1
    other.execute("COMMIT")
    other.close()


def test_a_write_that_always_fails_does_not_block_the_others(path: Path) -> None:
    reports = Reports()
    thread = StoreThread(path, reports)
    chat = Chat(title="kept")
    lost = Message(chat=new_id(), parent=None, role="user", text="of a chat that was deleted elsewhere")
    thread.write(lambda store: store.put_message(lost), lambda store: store.put_chat(chat))
    assert thread.read(Store.chats).result(20) == [chat]
    assert "deleted in another window" in str(reports.all[0])
    assert thread.close(20) == 0


def test_writes_keep_their_order_whatever_fails(path: Path) -> None:
    done: list[str] = []
    gate = threading.Event()

    def fail(store: Store) -> None:
        raise ChatsError("this one never works")

    def fail_twice(store: Store) -> None:
        done.append("tried")
        if done.count("tried") <= 2:
            raise ChatsError("not now", temporary=True)

    thread = StoreThread(path, Reports())
    thread.read(lambda store: None).result(20)
    reading = thread.read(lambda store: gate.wait(20))  # so that the writes come as one batch
    thread.write(fail, fail_twice, lambda store: done.append("last"))
    gate.set()
    reading.result(20)
    assert thread.close(20) == 0
    assert done == ["tried", "tried", "tried", "last"]


def test_a_file_that_can_never_be_read_leaves_the_chat_in_memory(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"no database " * 100)
    reports = Reports()
    thread = StoreThread(path, reports)
    chat = Chat(title="here")
    thread.write(lambda store: store.put_chat(chat))
    assert thread.read(Store.chats).result(20) == [chat]
    assert len(reports.all) == 1
    assert "damaged" in str(reports.all[0])
    thread.close(20)
    assert path.read_bytes() == b"no database " * 100


def test_two_processes_write_at_the_same_time(path: Path) -> None:
    reports = Reports(), Reports()
    threads = [StoreThread(path, report) for report in reports]
    for i in range(100):
        for thread in threads:
            thread.write(lambda store, i=i: store.put_chat(Chat(title=str(i))))
    for thread in threads:
        assert thread.close(30) == 0
    store = Store(path)
    assert len(store.chats()) == 200
    store.close()


def tree_of(*parents: int | None) -> Tree:
    """Return a tree of messages 1, 2, … below these."""
    roles = {None: "user"}
    messages = []
    for i, parent in enumerate(parents, 1):
        roles[i] = "assistant" if roles[parent] == "user" and parent else "user"
        messages.append(Message(id=i, chat=0, parent=parent, role=roles[i], text=str(i)))  # type: ignore[arg-type]
    return Tree(messages)


def test_branches_are_kept_and_each_leads_to_its_newest_end() -> None:
    tree = tree_of(None, 1, 2, 3, 1, 5)  # 1-2-3-4 and 1-5-6
    tree.show(6)
    assert [message.id for message in tree.path()] == [1, 5, 6]
    assert tree.siblings(5) == [2, 5]
    assert tree.turn(5, -1)
    assert [message.id for message in tree.path()] == [1, 2, 3, 4]
    assert not tree.turn(2, -1)
    tree.add(Message(id=7, chat=0, parent=3, role="user"))
    assert [message.id for message in tree.path()] == [1, 2, 3, 7]
    tree.turn(2, 1)
    tree.turn(5, -1)
    assert [message.id for message in tree.path()] == [1, 2, 3, 7]


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("How do I sort?", "How do I sort?"),
        ("\n\n  # Sort   this\nplease", "Sort this"),
        ("", UNTITLED),
        ("```\n```", UNTITLED),
        ("word " * 30, "word word word word word word word word word word word word…"),
        ("x" * 100, "x" * 60 + "…"),
    ],
)
def test_a_title_is_the_beginning_of_the_first_message(text: str, title: str) -> None:
    assert make_title(text) == title


def test_export() -> None:
    chat = Chat(title="Sorting: a/b?", system="Be brief.\nBe kind.")
    messages = [
        Message(chat=chat.id, parent=None, role="user", text="Sort"),
        Message(chat=chat.id, parent=None, role="user", text="Sort 3 1 2", created=0.0),
    ]
    messages.append(Message(chat=chat.id, parent=messages[1].id, role="assistant", text="1 2 3\n", model="starter"))
    tree = Tree(messages, messages[-1].id)
    text = to_markdown(chat, tree)
    assert text == (
        "# Sorting: a/b?\n\n> Be brief.\n> Be kind.\n\n## You\n\nSort 3 1 2\n\n## starter\n\n1 2 3\n"
    )  # the branch on screen alone
    document = json.loads(to_json(chat, tree))
    assert [message["text"] for message in document["messages"]] == ["Sort", "Sort 3 1 2", "1 2 3\n"]
    assert document["messages"][1]["created"] == "1970-01-01T00:00:00+00:00"
    assert document["title"] == "Sorting: a/b?"
    assert file_name(chat, "md") == "sorting-a-b.md"
    assert file_name(Chat(title="../.."), "json") == "chat.json"


def test_deleted_chats_wait_in_the_trash_and_are_not_found(store: Store) -> None:
    kept, _ = add_chat(store, "pelican one", title="kept")
    old, _ = add_chat(store, "pelican two", title="A pelican")
    new, _ = add_chat(store, "pelican three ++", title="new")
    old.deleted, new.deleted = 100.0, 200.0
    store.put_chat(old)
    store.put_chat(new)
    assert [chat.id for chat in store.chats()] == [kept.id]
    assert {chat.id for chat in store.deleted_chats()} == {old.id, new.id}
    assert [hit.chat.id for hit in store.search("pelican")] == [kept.id]
    assert not store.search("elican tw"), "not by the text itself either"
    assert not store.search("++")
    assert store.purge(150.0) == 1
    assert store.deleted_chats() == [new]
    assert store.chat(old.id) is None
    assert not store.messages(old.id)
    new.deleted = None
    store.put_chat(new)
    assert {hit.chat.id for hit in store.search("pelican")} == {kept.id, new.id}


def test_archived_chats_are_found_if_asked_for(store: Store) -> None:
    chat, _ = add_chat(store, "pelican")
    chat.archived = True
    store.put_chat(chat)
    assert store.chats() == [chat]
    assert store.search("pelican")
    for query in ("pelican", "elica"):
        assert not store.search(query, archived=False)


def test_a_search_ends_with_the_chats_that_it_may_return(store: Store) -> None:
    chats = [add_chat(store, "pelican", "pelican", title=f"{i}")[0] for i in range(5)]
    for query in ("pelican", "elica"):
        hits = store.search(query, limit=2)
        assert [hit.chat.id for hit in hits] == [chats[4].id, chats[3].id]


def test_a_literal_search_finds_titles_too(store: Store) -> None:
    chat, _ = add_chat(store, "nothing", title="Überraschung (!?)")
    (hit,) = store.search("!?")
    assert (hit.chat.id, hit.message) == (chat.id, None)
    assert hit.snippet == "Überraschung (\x02!?\x03)"
