"""The plain chat: its lines as a screen reader gets them, from the fake endpoint and from the real command."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from PIL import Image

from edgelm.chats import store_thread
from edgelm.chats.clipboard import copy_text
from edgelm.chats.history import Message
from edgelm.chats.store import ChatsError, Store
from edgelm.chats.tools.consents import Consents
from edgelm.chats.tools.settings import ToolServer
from edgelm.chats.tools.toolbox import Toolbox
from edgelm.client.link import Link
from edgelm.tui.commands.table import COMMANDS, PLAIN_COMMANDS
from edgelm.tui.plain import answer as plain_answer
from edgelm.tui.plain import chat as plain_chat
from edgelm.tui.plain import lines as plain_lines
from edgelm.tui.plain.chat import PlainChat
from edgelm.tui.plain.lines import LineReader, Writer
from edgelm.tui.workspace import ChatDefaults
from tests.tui.fake_endpoint import ANSWER, FakeEndpoint

STARTER = Path(__file__).resolve().parents[2] / "models" / "starter" / "starter.gguf"
PATIENCE_S = 60.0
RESEND_S = 3.0
# Every control character but the newline; in UTF-8, those of C1 are C2 80 to C2 9F.
CONTROL = re.compile(rb"[\x00-\x09\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")


class Output(io.StringIO):
    """Keeps every write apart."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


Talk = Callable[..., Awaitable[str]]


@pytest.fixture
def talk(endpoint: FakeEndpoint, tmp_path: Path) -> Talk:
    """Return a function that types lines into the chat, and returns its output after the first line."""

    async def run(*typed: str, output: Output | None = None, toolbox: Toolbox | None = None) -> str:
        output = output or Output()
        writer = Writer(output)
        lines = LineReader(io.StringIO("".join(f"{line}\n" for line in typed)), writer, edits=False)
        link = Link(endpoint=endpoint.address, api_key=None, runtime=tmp_path / "run", log=tmp_path / "serve.log")
        chat = PlainChat(
            tmp_path / "chats.db", link, ChatDefaults(), lines, writer, knowledge=tmp_path / "knowledge.db",
            toolbox=toolbox,
        )  # fmt: skip
        await asyncio.to_thread(chat.run)
        assert chat.num_lost == 0
        _head, _, text = output.getvalue().partition(", /help lists the commands\n")
        return text

    return run


async def test_a_gpu_that_is_not_used_is_one_line_once(talk: Talk, endpoint: FakeEndpoint) -> None:
    endpoint.unused_gpu = "NVIDIA GeForce RTX 3060 is not used: triton is not installed"
    assert (await talk("hello", "again", "/quit")).count(endpoint.unused_gpu) == 1


async def test_a_full_disk_at_the_start_is_told_and_the_chat_goes_on(
    endpoint: FakeEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path | None) -> Store:
        raise ChatsError(f"the disk with {path} is full", "make room on it", is_full=True)

    monkeypatch.setattr(store_thread, "Store", full)
    monkeypatch.setattr(plain_chat, "CLOSE_S", 0.1)
    output = Output()
    writer = Writer(output)
    lines = LineReader(io.StringIO("hello\n/chats\n/trash\n/search hello\n/stats\n/open 1\n"), writer, edits=False)
    link = Link(endpoint=endpoint.address, api_key=None, runtime=tmp_path / "run", log=tmp_path / "serve.log")
    chat = PlainChat(tmp_path / "chats.db", link, ChatDefaults(), lines, writer, knowledge=tmp_path / "knowledge.db")
    await asyncio.to_thread(chat.run)
    text = output.getvalue()
    assert f"error: not saved: the disk with {tmp_path / 'chats.db'} is full; make room on it\n" in text
    assert f"starter: {ANSWER}" in text
    assert text.count(f"error: the disk with {tmp_path / 'chats.db'} is full; make room on it\n") == 4
    assert chat.num_lost > 0


async def test_the_last_run_is_waited_for_while_the_file_is_locked(
    talk: Talk, endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    await talk("/model qwen3-4b-q4_k_m.gguf", "/quit")
    other = sqlite3.connect(tmp_path / "chats.db", isolation_level=None, check_same_thread=False)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")

    class Watched(Output):
        def write(self, text: str) -> int:
            if "has locked the chats" in text:  # told while it waits
                other.close()
            return super().write(text)

    output = Watched()
    await talk("hello", output=output)
    other.close()
    assert "error: not saved: another program has locked the chats" in output.getvalue()
    assert "edgelm, model qwen3-4b-q4_k_m.gguf, /help" in output.getvalue()
    assert endpoint.requests[-1]["model"] == "qwen3-4b-q4_k_m.gguf"


async def test_the_last_run_is_loaded_when_there_is_room(
    talk: Talk, endpoint: FakeEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await talk("/model qwen3-4b-q4_k_m.gguf", "earlier", "/quit")
    has_room = threading.Event()

    def opened(path: Path | None) -> Store:
        if not has_room.is_set():
            raise ChatsError(f"the disk with {path} is full", "make room on it", is_full=True)
        return Store(path)

    monkeypatch.setattr(store_thread, "Store", opened)
    monkeypatch.setattr(store_thread, "RETRY_S", 0.01)
    history: list[str] = []
    monkeypatch.setattr(LineReader, "load_history", lambda lines, messages: history.extend(messages))
    typed = iter(["/status", "hello"])

    def message(lines: LineReader, prompt: str, unsent: str = "") -> str:
        text = next(typed, None)
        if text is None:
            raise EOFError
        return text

    def make_room(chat: PlainChat, text: str) -> None:
        take(chat, text)
        has_room.set()
        while not chat._workspace.store.is_open:
            time.sleep(0.01)

    take = PlainChat._take
    monkeypatch.setattr(LineReader, "message", message)
    monkeypatch.setattr(PlainChat, "_take", make_room)
    text = await talk()
    assert text.startswith("model: starter\n")
    assert endpoint.requests[-1]["model"] == "qwen3-4b-q4_k_m.gguf"
    assert "the chats are saved again\n" in text
    assert "\nmodel qwen3-4b-q4_k_m.gguf\n" in text
    assert history == ["earlier"]


def saved_messages(folder: Path) -> list[Message]:
    """Return the messages of the newest chat."""
    store = Store(folder / "chats.db")
    try:
        return store.messages(store.chats()[0].id)
    finally:
        store.close()


def sent_texts(endpoint: FakeEndpoint) -> list[str]:
    """Return the last message of each request."""
    return [request["messages"][-1]["content"] for request in endpoint.requests]


# Messages and answers


async def test_a_message_is_answered_in_lines_and_saved(talk: Talk, tmp_path: Path) -> None:
    assert await talk("Explain quicksort") == f"starter: {ANSWER}"
    assert [(message.text, message.state) for message in saved_messages(tmp_path)] == [
        ("Explain quicksort", "done"),
        (ANSWER, "done"),
    ]


def test_a_text_that_streams_is_written_by_sentences_and_lines() -> None:
    output = Output()
    writer = Writer(output)
    for character in "One is first. Two (so they say.) follows! Is it 3.5?\r\n1. a point\n第一句。第二句":
        writer.stream(character)
    writer.end()
    assert output.writes == [
        "One is first. ",
        "Two (so they say.) ",
        "follows! ",
        "Is it 3.5?\n",
        "1. a point\n",
        "第一句。",
        "第二句",
        "\n",
    ]


async def test_an_answer_is_not_written_by_tokens(talk: Talk, endpoint: FakeEndpoint) -> None:
    endpoint.answers, endpoint.tokens_per_second = ["one two three four five six. seven eight nine ten"], 200
    output = Output()
    await talk("go", output=output)
    assert output.writes[1:] == ["starter: one two three four five six. ", "seven eight nine ten", "\n"]


async def test_an_answer_cannot_move_the_cursor(talk: Talk, endpoint: FakeEndpoint) -> None:
    endpoint.answers = ["a\x1b[2Jb\x07 c\td\r\ne\x9b31mf\x08"]
    text = await talk("go")
    assert "b" in text
    assert not CONTROL.search(text.encode())


async def test_a_message_of_several_lines(talk: Talk, endpoint: FakeEndpoint) -> None:
    endpoint.answers = ["yes"]
    await talk("one\\", "two\\", "three", '"""', "def f():", "    /new", '"""', '"""a', 'b"""', "//etc is here", "  ")
    assert sent_texts(endpoint) == ["one\ntwo\nthree", "def f():\n    /new", "a\nb", "/etc is here"]


async def test_a_message_that_the_end_of_the_input_cuts_is_sent(talk: Talk, endpoint: FakeEndpoint) -> None:
    endpoint.answers = ["yes"]
    await talk('"""', "one", "two")
    assert sent_texts(endpoint) == ["one\ntwo"]


async def test_a_thought_is_one_line_until_it_is_asked_for(talk: Talk, endpoint: FakeEndpoint) -> None:
    endpoint.answers, endpoint.reasoning = ["42."], "Six times seven. Yes."
    text = await talk("q1", "/reasoning", "q2")
    assert text == (
        "thought for a moment\nstarter: 42.\nreasoning is read\nreasoning: Six times seven. Yes.\nstarter: 42.\n"
    )


async def test_a_long_thought_is_told_from_time_to_time(
    talk: Talk, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_lines, "NOTICE_S", 0.0)
    endpoint.answers, endpoint.reasoning, endpoint.tokens_per_second = ["42."], "hm " * 20, 20
    text = await talk("q")
    assert re.search(r"^thinking, \d s$", text, flags=re.MULTILINE)
    assert re.search(r"\nthought for .*\nstarter: 42.\n$", text)
    assert "hm" not in text


async def test_loading_is_told_rarely(talk: Talk, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_answer, "LOADING_S", 0.0)
    endpoint.answers, endpoint.loading = ["42."], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    text = await talk("q")
    assert re.fullmatch(r"loading the model \d+ %.*\nstarter: 42.\n", text)


async def test_a_failure_is_one_line_and_the_next_message_works(talk: Talk, endpoint: FakeEndpoint) -> None:
    endpoint.die_after = 6
    text = await talk("q1")
    assert text.startswith("starter: Quicksort picks a *pivot* and splits\nerror: the engine was ended by signal 9")
    assert text.count("\n") == 2
    endpoint.die_after, endpoint.refuse = None, (400, {"error": {"message": "no\nway"}})
    text = await talk("q2")
    assert re.fullmatch(r"error: .*no way.*\n", text)
    endpoint.refuse, endpoint.answers = None, ["yes"]
    assert await talk("q3") == "starter: yes\n"


async def test_the_prompt_comes_where_nothing_is_connected(talk: Talk, endpoint: FakeEndpoint) -> None:
    endpoint.refuse_key = True
    output = Output()
    await talk("q", "/model", output=output)
    error = f"error: {endpoint.address} refuses the key: the API key is missing or wrong; give the right --api-key\n"
    again = "error: the same as at the start\n"
    assert output.getvalue() == f"{error}edgelm, model none yet, /help lists the commands\n{again}{again}"


async def test_a_full_context_names_a_command_and_no_key(talk: Talk, endpoint: FakeEndpoint) -> None:
    endpoint.answers, endpoint.finish_reason = ["cut"], "context"
    text = await talk("q1", "q2", "/shorten", "n", "/shorten", "y", "/whole")
    full = "starter: cut\nthe context is full; /shorten goes on without the oldest messages\n"
    left_out = "2 messages would be left out, up to the one before: q2\n"
    assert text == f"{full}{full}{left_out}{left_out}{full}the whole conversation is sent again\n"
    assert [len(request["messages"]) for request in endpoint.requests] == [1, 3, 1]


async def test_nothing_is_written_once_the_reader_has_left(talk: Talk, endpoint: FakeEndpoint, tmp_path: Path) -> None:
    class Left(Output):
        def write(self, text: str) -> int:
            if len(self.writes) > 1:
                raise BrokenPipeError
            return super().write(text)

    await talk("q1", "q2", output=Left())
    assert [message.state for message in saved_messages(tmp_path)] == ["done", "done"]  # the second is not sent


async def test_chats_that_cannot_be_saved_are_told(talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "chats.db").write_bytes(b"no database" * 1000)
    output = Output()
    await talk("q", output=output)
    assert output.getvalue().count("error: not saved: ") == 1
    assert f"starter: {ANSWER}" in output.getvalue()


# Commands


async def test_chats_are_listed_searched_opened_and_deleted(talk: Talk, endpoint: FakeEndpoint, tmp_path: Path) -> None:
    endpoint.answers = ["a red apple", "a blue sky"]
    await talk("first question", "/new", "second question")
    text = await talk("/chats", "/open 2", "/search red", "/open 1", "/title Fruit", "/tag a #B", "/pin", "/delete")
    date = r"\d{4}-\d\d-\d\d \d\d:\d\d"
    assert re.fullmatch(
        rf"1\. second question, {date}\n2\. first question, {date}\n"
        r"first question, messages: 2\nyou: first question\nstarter: a red apple\n"
        r"1\. first question: a red apple\n"
        r"first question, messages: 2\nyou: first question\nstarter: a red apple\n"
        r"title: Fruit\n"
        r"tags: #a #b\npinned: it is listed first\n"
        r"deleted, /undo brings it back; this is a new chat\n",
        text,
    )
    store = Store(tmp_path / "chats.db")
    assert [chat.title for chat in store.chats()] == ["second question"]
    store.close()


async def test_a_model_is_chosen_by_name_or_number(talk: Talk, endpoint: FakeEndpoint) -> None:
    endpoint.answers = ["yes"]
    text = await talk("/model", "/model 2", "q1", "/model star", "q2", "/model 7", "/model e")
    assert "1. starter, llama, Q8_0, 4 MB, 4,096 tokens, loaded, this chat's\n2. qwen3-4b-q4_k_m.gguf, " in text
    assert [request["model"] for request in endpoint.requests] == ["qwen3-4b-q4_k_m.gguf", "starter"]
    assert "qwen3-4b-q4_k_m.gguf: yes\n" in text
    assert text.endswith("error: there is no model 7; /model lists them\nerror: 2 models called e; /model shows all\n")


async def test_settings_of_the_chat_are_sent(talk: Talk, endpoint: FakeEndpoint) -> None:
    endpoint.answers = ["yes"]
    text = await talk("/system Be brief.", "/params temperature=0.2", "/think low", "/think huge", "/system", "q")
    (request,) = endpoint.requests
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (request["temperature"], request["reasoning_effort"]) == (0.2, "low")
    assert "error: there is no effort 'huge'; give auto, off, low, medium, high\nsystem prompt: Be brief.\n" in text


async def test_a_message_is_edited_and_answered_again(talk: Talk, endpoint: FakeEndpoint, tmp_path: Path) -> None:
    endpoint.answers = ["a1", "a2", "a3"]
    text = await talk("q1", "/regenerate", "/edit", "q2", "/read 2")
    assert text == ("starter: a1\nstarter: a2\nyour last message: q1\nstarter: a3\nyou: q2\nstarter: a3\n")
    assert [message.text for message in saved_messages(tmp_path)] == ["q1", "a1", "a2", "q2", "a3"]


async def test_knowledge_is_not_sent_elsewhere_without_a_person(
    talk: Talk, endpoint: FakeEndpoint, tmp_path: Path, far: None
) -> None:
    endpoint.answers = ["yes"]
    (tmp_path / "cats.md").write_text("# Cats\n\nA cat sleeps 15 hours a day.\n")
    text = await talk(f"/know {tmp_path}/cats.md", "/know", "How long does a cat sleep?", "/know off", "/know")
    assert "cats.md: 1 file, 1 passage\n" in text
    assert re.search(r"^this question would send \d+ characters of your files: cats.md.*$", text, flags=re.MULTILINE)
    assert "they are not sent: only a person at a terminal can agree\nread nothing: you said that nothing goes" in text
    assert "cats.md will not be read any more\n" in text
    assert text.endswith("error: this chat has no knowledge; /know PATH adds a file or folder\n")
    (request,) = endpoint.requests
    assert [message["content"] for message in request["messages"]] == ["How long does a cat sleep?"]


async def test_a_question_about_edgelm_reads_the_guide(talk: Talk, endpoint: FakeEndpoint) -> None:
    endpoint.models, endpoint.answers = ["other"], ["With pull."]
    text = await talk("/help How do I download a model?")
    assert re.fullmatch(r"read: 1 .*Download a model.*\nother: With pull\.\n", text)
    assert "edgelm pull MODEL" in str(endpoint.requests[0]["messages"])


async def test_a_chat_is_exported(talk: Talk, endpoint: FakeEndpoint, tmp_path: Path) -> None:
    endpoint.answers = ["yes"]
    file = tmp_path / "chat.md"
    text = await talk("q1", f"/export {file}", f"/export md {file}", "n", "/status")
    assert f"written to {file}\n" in text
    assert file.read_text() == "# q1\n\n## You\n\nq1\n\n## starter\n\nyes\n"
    assert text.count("written") == 1
    assert "41.3 tokens per second\n" in text


async def test_every_command_of_the_full_screen_is_there_or_says_why_not(talk: Talk, endpoint: FakeEndpoint) -> None:
    text = await talk("/help", "/theme dark", "/the", "/nothing", "/co")
    listed = set(re.findall(r"^/(\w+)", text, flags=re.MULTILINE))
    assert listed == {command.name for command in PLAIN_COMMANDS}
    assert listed > {"new", "model", "know", "quit", "chats", "read"}
    assert text.endswith(
        "error: /theme works on the full screen only\n"
        "error: /theme works on the full screen only\n"
        "error: there is no command /nothing; /help lists them\n"
        "error: /co may be /compare, /copy, /code\n"
    )
    for command in COMMANDS:
        if command.name not in listed:
            assert await talk(f"/{command.name}") == f"error: /{command.name} works on the full screen only\n"
    assert endpoint.requests == []


async def test_code_is_listed_saved_and_copied(
    talk: Talk, endpoint: FakeEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.answers = ["One:\n```py\na = 1\nb = 2\n```\nTwo:\n```sh\nls\n```"]
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert "error: nothing here copies" in await talk("q1", "/copy")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "pbcopy"
    program.write_text(
        f'#!/bin/sh\nwhile IFS= read -r line || [ "$line" ]; do echo "$line"; done >>{tmp_path}/copied\n'
    )
    program.chmod(0o755)
    file = tmp_path / "list.sh"
    text = await talk("q2", "/code", "/code 3", f"/code 2 {file}", "/code 1", "/copy")
    assert "1. a = 1, 2 lines\n2. ls, 1 line\n/code NUMBER copies one, /code NUMBER FILE saves it\n" in text
    assert "error: there is no block 3" in text
    assert f"written to {file}\n" in text
    assert file.read_text() == "ls\n"
    assert "copied, lines: 2\n" in text
    assert (tmp_path / "copied").read_text() == f"a = 1\nb = 2\n{endpoint.answers[0]}\n"


def put_program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_windows_gets_the_text_and_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clip.exe copies a byte order mark as text, and spoils some texts without one."""
    put_program(tmp_path, "clip.exe", f"{shutil.which('cat')} >{tmp_path}/clipped")
    put_program(tmp_path, "powershell.exe", f'{shutil.which("cat")} >{tmp_path}/copied; echo "$*" >{tmp_path}/asked')
    monkeypatch.setenv("PATH", str(tmp_path))
    copy_text("naïve 日本\ud83d")
    assert base64.b64decode((tmp_path / "copied").read_bytes(), validate=True).decode() == "naïve 日本?"
    assert "FromBase64String((-join $input))" in (tmp_path / "asked").read_text()
    assert not (tmp_path / "clipped").exists()
    put_program(tmp_path, "powershell.exe", "exit 1")  # as where an administrator has locked it
    copy_text("日本")
    assert (tmp_path / "clipped").read_bytes() == b"\xff\xfe" + "日本".encode("utf-16-le")


def test_macos_takes_the_text_for_utf_8_in_every_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_program(tmp_path, "pbcopy", f'echo "$LC_ALL $LC_CTYPE" >{tmp_path}/locale')
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("LC_ALL", "C")
    copy_text("—é")
    assert (tmp_path / "locale").read_text() == " UTF-8\n"


async def test_two_versions_are_compared(talk: Talk, endpoint: FakeEndpoint) -> None:
    endpoint.answers = ["the first", "the second", "the third"]
    text = await talk(
        "q1", "/compare", "/compare temperature=0.5", "y", "/read", "/compare temperature=0.7", "n", "/read"
    )
    assert "/compare MODEL answers again" in text
    assert re.search("again with temperature=0.5\n.*: the second\n.*the new answer stays\n.*: the second\n", text)
    assert re.search("again with temperature=0.7\n.*: the third\n.*the old answer stays\n.*: the second\n", text)
    assert [request.get("temperature") for request in endpoint.requests] == [None, 0.5, 0.7]


async def test_quit_leaves_the_rest_of_the_input(talk: Talk, endpoint: FakeEndpoint) -> None:
    assert await talk("/quit", "not sent") == ""
    assert endpoint.requests == []


async def test_a_pull_is_waited_for_and_its_model_answers(
    endpoint: FakeEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pulling"
    folder.mkdir()
    (folder / "go").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "front.json").write_text(json.dumps({"pid": os.getpid(), "address": endpoint.address}))
    endpoint.models, endpoint.answers = ["mine", "starter"], ["yes"]
    endpoint.paths = {"mine": str(folder / "pulled.gguf")}
    output = Output()
    writer = Writer(output)
    lines = LineReader(io.StringIO("/pull\n/pull o/n\nq\n"), writer, edits=False)
    link = Link(endpoint=None, api_key=None, runtime=tmp_path / "run", log=tmp_path / "serve.log")
    chat = PlainChat(
        tmp_path / "chats.db", link, ChatDefaults("starter"), lines, writer, knowledge=tmp_path / "knowledge.db",
        pull_command=(sys.executable, "-m", "tests.tui.fake_pulling", str(folder)),
    )  # fmt: skip
    await asyncio.to_thread(chat.run)
    told = output.getvalue().split("\n")[2:]
    assert told == [
        "/pull smollm2:135m-q4_1 gets a small model for a chat (98 MB)",
        "error: a pull needs a name; write /pull NAME; Ctrl+C stops it",
        "pulling o/n",
        "mine is here, and answers this chat from now on",
        "mine: yes",
        "",
    ]


# The real command


def environment(folder: Path, term: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("EDGELM_", "HF_"))}
    places = {f"EDGELM_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "CACHE", "RUNTIME")}
    return clean | places | {"HF_HOME": str(folder / "hf"), "TERM": term, "OMP_WAIT_POLICY": "passive"}


COMMAND = (sys.executable, "-m", "edgelm")


class Terminal:
    """The command in a pseudo-terminal. Waits on a thread of its own: the endpoint runs in the test's loop."""

    def __init__(self, process: subprocess.Popen[bytes], leader: int) -> None:
        self.process = process
        self._leader = leader
        self.output = b""
        self._read = 0

    async def sees(self, words: str) -> None:
        """Wait for words after those of the last call."""
        await asyncio.to_thread(self._wait, words.encode())

    async def type(self, text: str) -> None:
        await asyncio.to_thread(os.write, self._leader, text.encode())

    async def interrupt(self, words: str) -> None:
        """Send SIGINT as a terminal does for Ctrl+C, until these words come.

        Python's readline misses a signal in the moment between its prompt and its wait for a key.
        """
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            self.process.send_signal(signal.SIGINT)
            with suppress(TimeoutError):
                return await asyncio.to_thread(self._wait, words.encode(), RESEND_S)
        raise AssertionError(self.output.decode())

    async def ended(self) -> int:
        """Read the rest and return the exit code."""
        with suppress(EOFError):
            await asyncio.to_thread(self._wait, b"\0")
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)

    def _wait(self, words: bytes, patience_s: float = PATIENCE_S) -> None:
        """Wait for words. Raises TimeoutError, and EOFError where the process has ended."""
        until = time.monotonic() + patience_s
        while words not in self.output[self._read :]:
            if time.monotonic() > until:
                raise TimeoutError(self.output.decode())
            if select.select([self._leader], [], [], 0.1)[0]:
                try:
                    self.output += os.read(self._leader, 1 << 16)
                except OSError:  # the last process has closed the terminal
                    raise EOFError(self.output.decode()) from None
        self._read = self.output.index(words, self._read) + len(words)


@contextmanager
def terminal(folder: Path, *arguments: str, term: str) -> Iterator[Terminal]:
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, *arguments], env=environment(folder, term), stdin=follower, stdout=follower, stderr=follower,
        start_new_session=True,
    ) as process:  # fmt: skip
        os.close(follower)
        try:
            yield Terminal(process, leader)
        finally:
            process.kill()
            os.close(leader)


def is_plain(output: bytes) -> bool:
    """Tell whether a terminal got no control character; its driver makes CR LF of each newline."""
    return not CONTROL.search(output.replace(b"\r\n", b"\n"))


async def test_keys_stop_edit_and_quit(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    endpoint.answers, endpoint.stall_after = ["One. Two. Three"], 2
    with terminal(tmp_path, "--plain", "--endpoint", endpoint.address, term="xterm-256color") as chat:
        await chat.sees("you: ")
        await chat.type("q1\r")
        await chat.sees("starter: One. ")
        await chat.interrupt("stopped\r\nyou: ")
        await chat.type("/ti\tTried\r")
        await chat.sees("/title Tried\r\ntitle: Tried\r\nyou: ")
        endpoint.answers, endpoint.stall_after = ["a2"], None
        await chat.type("/edit\r")
        await chat.sees("new version: q1")
        await chat.type("!\r")
        await chat.sees("starter: a2\r\nyou: ")
        await chat.type("\x10\r")  # Ctrl+P: the message before, from the history
        await chat.sees("q1!\r\nstarter: a2\r\nyou: ")
        await chat.type("/edit\r")
        await chat.sees("new version: ")
        await chat.interrupt("stopped\r\nyou: ")
        await chat.interrupt("Ctrl+C once more quits\r\nyou: ")
        await chat.interrupt("\r\n")
        assert await chat.ended() == 0
    assert is_plain(chat.output), chat.output
    assert sent_texts(endpoint) == ["q1", "q1!", "q1!"]
    states = [(message.text, message.state) for message in saved_messages(tmp_path / "data")]
    assert states[:2] == [("q1", "done"), ("One. Two.", "stopped")]


async def test_earlier_messages_are_in_the_history_and_unsent_text_in_the_prompt(
    endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    endpoint.answers = ["yes"]

    async def send(prompt: str, keys: str) -> None:
        with terminal(tmp_path, "--plain", "--endpoint", endpoint.address, term="xterm-256color") as chat:
            await chat.sees(prompt)
            await chat.type(keys)
            await chat.sees("starter: yes\r\nyou: ")
            await chat.type("\x04")  # Ctrl+D
            assert await chat.ended() == 0
        assert is_plain(chat.output), chat.output

    await send("you: ", "hello\r")
    await send("you: ", "\x10\r")  # Ctrl+P: the message before
    store = Store(tmp_path / "data" / "chats.db")
    store.put_setting("draft", "half a")  # as the full screen leaves it
    store.close()
    await send("you: half a", " word\r")
    assert sent_texts(endpoint) == ["hello", "hello", "half a word"]


needs_starter = pytest.mark.skipif(not STARTER.exists(), reason="the built-in model is not here")


@needs_starter
async def test_a_dumb_terminal_gets_plain_lines_by_itself(tmp_path: Path, measured_cache: Path) -> None:
    shutil.copytree(measured_cache, tmp_path / "cache")
    with terminal(tmp_path, term="dumb") as chat:
        await chat.sees("this terminal is dumb (TERM): the chat is in plain lines, as with --plain\r\n")
        await chat.sees("edgelm, model starter, /help lists the commands\r\n")
        await chat.sees("you: ")
        await chat.type("What is edgelm?\n")
        await chat.sees("starter: ")
        await chat.sees("\r\nyou: ")
        await chat.type("\x04")
        assert await chat.ended() == 0
    assert is_plain(chat.output), chat.output


@needs_starter
def test_a_pipe_gets_an_answer_for_each_line(tmp_path: Path, measured_cache: Path) -> None:
    shutil.copytree(measured_cache, tmp_path / "cache")
    run = subprocess.run(
        [*COMMAND, "--plain"], env=environment(tmp_path, "xterm-256color"), timeout=2 * PATIENCE_S,
        input=b"How do I download a model?\n/status\n", capture_output=True, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, b"")
    shown = run.stdout.removeprefix(b"connecting\n")  # a slow machine is told that it waits
    assert shown.startswith(b"edgelm, model starter, /help lists the commands\n")
    assert b"\nstarter: " in run.stdout
    assert b"edgelm pull" in run.stdout
    assert b"\nmodel: starter\n" in run.stdout
    assert not CONTROL.search(run.stdout), run.stdout


# Files


async def test_pictures_are_sent_to_a_model_that_sees(
    talk: Talk, endpoint: FakeEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(folder))
    Image.new("RGB", (40, 30), "red").save(folder / "cat.png")
    endpoint.answers = ["red"]
    text = await talk("@cat.png, what is it?")
    assert "error: starter reads no images: cat.png is not sent; edgelm pull gemma3:4b gets a model that does" in text
    assert not endpoint.requests
    endpoint.seeing = ["starter"]
    text = await talk("/paste", "@cat.png, what is it?", "Which colour?")
    assert "error: no program here reads the clipboard" in text
    assert re.search(r"attached: cat.png · picture, \d+ B", text)
    first, second = ([message["content"] for message in request["messages"]] for request in endpoint.requests)
    assert [part["type"] for part in first[0]] == ["image_url", "text"]
    assert second == [first[0], "red", "Which colour?"]
    endpoint.seeing = []
    text = await talk("/chats", "/open 1", "And now?", "And then?")
    assert text.count("left out for starter, which reads no images: cat.png\n") == 1
    contents = [message["content"] for message in endpoint.requests[-1]["messages"]]
    assert contents[0] == "*cat.png (a picture)*\n\ncat.png, what is it?"
    assert contents[-1] == "And then?"
    endpoint.other_names = ["/models/blind.gguf", "/models/seeing.gguf"]
    endpoint.seeing = ["/models/seeing.gguf"]
    text = await talk("/chats", "/open 1", "/model /models/blind.gguf", "Whose?")
    assert text.count("left out for blind.gguf, which reads no images: cat.png\n") == 1
    assert endpoint.requests[-1]["messages"][0]["content"] == contents[0]
    text = await talk("/chats", "/open 1", "/model /models/seeing.gguf", "Which?")
    assert "left out" not in text
    assert endpoint.requests[-1]["messages"][0]["content"] == first[0]


async def test_files_are_attached_by_command_and_by_name(
    talk: Talk, endpoint: FakeEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "a.py").write_text("a = 1\n")
    (folder / "two words.txt").write_text("2")
    endpoint.answers = ["yes"]
    text = await talk(
        "/attach", "/attach none", "/attach a.py", 'Compare it with @"two words.txt", @nobody.', "@a.py?", "/read 2"
    )
    assert re.sub(r"[\d,]+ (?=tokens|of)", "", text).splitlines() == [
        "error: nothing is attached; /attach PATH attaches a file or folder",
        "error: none does not exist; name a file or folder that is there",
        "attached: a.py · tokens, of 4,096 left",
        "attached: two words.txt · tokens, of 4,096 left",
        "starter: yes",
        "attached: a.py · tokens, of 4,096 left",
        "starter: yes",
        "you: a.py?",
        "attached: a.py · tokens",
        "starter: yes",
    ]
    fences = "a.py:\n```\na = 1\n```\n\n"
    assert sent_texts(endpoint) == [
        f'{fences}two words.txt:\n```\n2\n```\n\nCompare it with "two words.txt", @nobody.',
        f"{fences}a.py?",
    ]
    (folder / "a.py").write_text("a = 22\n")
    (folder / "two words.txt").unlink()
    text = await talk("/chats", "/open 1", "Again?")
    assert f"a.py has changed since it was sent; /attach {folder / 'a.py'} attaches it again\n" in text
    assert "two words.txt is gone" in text


# Tools


async def test_calls_of_tools_in_lines_without_a_terminal_are_refused(
    talk: Talk, endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    server = ToolServer(
        name="small",
        command=sys.executable,
        args=("-S", str(Path(__file__).parents[1] / "chats" / "tools" / "server.py")),
    )
    toolbox = Toolbox(Consents(tmp_path / "consents.json"), {"small": server}, {}, tmp_path)
    function = {"name": "small__echo", "arguments": '{"text": "a\\u202eb"}'}
    endpoint.answers, endpoint.calls = ["I look.", "Then not."], [[{"index": 0, "id": "x", "function": function}]]
    text = await talk("/tools", "/tools small", "Go", toolbox=toolbox)
    assert text.startswith("small, off: ")
    assert "small: echo, environment, " in text
    assert text.partition("starter: ")[2] == (
        "I look.\n"
        "the model asks for the tool small/echo with the arguments:\n"
        '{\n  "text": "a\\u202eb"\n}\n'
        f"server: {' '.join((server.command, *server.args))}\n"
        "it is refused: only a person at a terminal can agree\n"
        'tool small/echo, text: "a\\u202eb", refused: The user refused this call. Go on without it, or ask the user.\n'
        "starter: Then not.\n"
    )
    assert [call.state for call in saved_messages(tmp_path)[-1].calls] == ["refused"]


def test_an_ignored_interrupt_stays_ignored_while_a_line_is_read() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a script
    try:
        with plain_lines.raised_interrupt():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("names_backend", [True, False])
async def test_libedit_shows_no_text_and_so_the_unsent_one_stays(
    endpoint: FakeEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, names_backend: bool
) -> None:
    """Python for macOS has it in place of readline: what its startup hook inserts is gone when the line begins."""
    libedit = MagicMock(backend="editline" if names_backend else None)
    libedit.__doc__ = "Importing this module enables command line editing using libedit readline."
    typed = iter(["hello", "/edit", "", "/quit"])
    monkeypatch.setattr(plain_lines, "_load_readline", lambda: libedit)
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    stream, output = io.StringIO(), Output()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    writer = Writer(output)
    store = Store(tmp_path / "chats.db")
    store.put_setting("draft", "half a")  # as the full screen leaves it
    store.close()
    link = Link(endpoint=endpoint.address, api_key=None, runtime=tmp_path / "run", log=tmp_path / "serve.log")
    lines = LineReader(stream, writer, edits=True)
    chat = PlainChat(tmp_path / "chats.db", link, ChatDefaults(), lines, writer, knowledge=tmp_path / "knowledge.db")
    await asyncio.to_thread(chat.run)
    assert "your last message: hello\nnot edited\n" in output.getvalue(), "as where no prompt can begin with a text"
    store = Store(tmp_path / "chats.db")
    assert "half a" in store.settings().values()
    store.close()
