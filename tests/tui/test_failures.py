"""Failures: one line says what to do, received text is kept, and the next message works."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgelm.base.config import load_config
from edgelm.base.errors import EdgeLMError
from edgelm.chats.clipboard import copy_text
from edgelm.chats.history import Chat, Message
from edgelm.chats.store import SCHEMA_VERSION, Store
from edgelm.client.link import Link
from edgelm.commands.chat import _run_screen
from edgelm.tui.app import ChatApp
from edgelm.tui.workspace import ChatDefaults
from tests.tui.conftest import Driver, Open
from tests.tui.fake_endpoint import ANSWER, FakeEndpoint


async def test_the_engine_dies_in_the_middle(open_chat: Open, tmp_path: Path) -> None:
    async with open_chat() as chat:
        chat.endpoint.die_after = 6
        await chat.ask("q1")
        await chat.sees("Quicksort picks a pivot and splits", "✗ the engine was ended by signal 9; your next")
        chat.endpoint.die_after = None
        await chat.ask("q2")
        assert chat.turns[-1] == ("assistant", ANSWER)
        sent = [message["content"] for message in chat.endpoint.requests[-1]["messages"]]
        assert sent == ["q1", "Quicksort picks a *pivot* and splits", "q2"]
    store = Store(tmp_path / "chats.db")
    assert [message.state for message in store.messages(store.chats()[0].id)] == ["done", "failed", "done", "done"]
    store.close()


async def test_the_engine_dies_before_the_first_word(open_chat: Open) -> None:
    async with open_chat() as chat:
        chat.endpoint.die_after = 0
        await chat.ask("q1")
        await chat.sees("✗ the engine was ended")
        chat.endpoint.die_after = None
        await chat.ask("q2")
        assert chat.endpoint.requests[-1]["messages"] == [{"role": "user", "content": "q1\n\nq2"}], "turns alternate"


async def test_a_bug_of_ours_fails_the_answer_and_not_the_chat(
    open_chat: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("one\ntwo")

    async with open_chat() as chat:
        with monkeypatch.context() as patch:
            patch.setattr("edgelm.tui.answers._append", fail)
            await chat.ask("q1")
            await chat.sees(r"✗ edgelm failed here: KeyError: 'one\ntwo'; this is")
        assert [record.exc_info and record.exc_info[0] for record in caplog.records] == [KeyError]
        await chat.ask("q2")
        assert chat.turns[-1] == ("assistant", ANSWER)


async def test_after_a_crash_one_line_is_left_and_a_log_without_values(
    tmp_path: Path, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def crash(self: ChatApp) -> None:
        secret_value = "of the " + "chat"
        raise KeyError(len(secret_value))

    monkeypatch.setattr(ChatApp, "on_mount", crash)
    run = ChatApp.run_async
    monkeypatch.setattr(ChatApp, "run", lambda self: asyncio.run(run(self, headless=True)))
    config = load_config({}, {f"EDGELM_{kind}_DIR": str(tmp_path / kind) for kind in ("CONFIG", "DATA", "CACHE")})
    link = Link(endpoint=endpoint.address, api_key=None, runtime=tmp_path / "run", log=tmp_path / "serve.log")
    log = tmp_path / "CACHE" / "chat.log"
    with pytest.raises(EdgeLMError) as caught:
        await asyncio.to_thread(_run_screen, config, link, ChatDefaults())
    assert str(caught.value) == f"the chat ended: KeyError: 11; this is a bug of edgelm: report it with {log}"
    assert "KeyError: 11" in log.read_text()
    assert "of the chat" not in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
    assert "".join(capfd.readouterr()).strip("\a") == ""


@pytest.mark.parametrize(("name", "copies"), [("SSH_CONNECTION", False), ("SSH_TTY", False), ("DISPLAY", True)])
def test_over_ssh_no_program_here_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, copies: bool
) -> None:
    run = run_screen(tmp_path, monkeypatch, name)
    assert (run["copy"] == copy_text) == copies


def test_the_size_is_that_of_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("LINES", "20")
    leader, follower = pty.openpty()
    termios.tcsetwinsize(leader, (30, 100))
    with open(follower, "w") as stream:  # noqa: PTH123 - a descriptor
        monkeypatch.setattr("sys.__stdout__", stream)
        assert run_screen(tmp_path, monkeypatch, "TERM")["size"] == (100, 30)
    os.close(leader)


def run_screen(folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> dict[str, object]:
    """Return how the application is made, and the size that it finds, where the environment has a variable."""
    made: dict[str, object] = {}

    def make(*_: object, **options: object) -> SimpleNamespace:
        made.update(options)
        return SimpleNamespace(run=lambda: made.update(size=shutil.get_terminal_size()), return_code=0, num_lost=0)

    monkeypatch.setattr("edgelm.tui.app.ChatApp", make)
    environment = {f"EDGELM_{kind}_DIR": str(folder / kind) for kind in ("CONFIG", "DATA", "CACHE", "RUNTIME")}
    link = Link(endpoint="http://127.0.0.1:9", api_key=None, runtime=folder, log=folder / "serve.log")
    _run_screen(load_config({}, environment | {variable: "1"}), link, ChatDefaults())
    return made


async def test_the_connection_drops(open_chat: Open) -> None:
    async with open_chat() as chat:
        chat.endpoint.drop_after = 4
        await chat.ask("q1")
        await chat.sees("Quicksort picks a pivot", "✗", "regenerate")
        chat.endpoint.drop_after = None
        await chat.press("ctrl+r")
        await chat.until(lambda: chat.turns[-1] == ("assistant", ANSWER))


async def test_an_endpoint_that_is_unreachable_at_first(open_chat: Open) -> None:
    async with FakeEndpoint().serve() as gone:
        address = gone.address
    async with open_chat(address=address) as chat:
        await chat.sees("cannot be reached")
        await chat.ask("q1")
        await chat.sees("✗ http://127.0.0.1", "start it, or give another", "not connected")
        port = int(address.rsplit(":", 1)[1])
        async with FakeEndpoint().serve(port) as back:
            await chat.ask("q2")
            assert chat.turns[-1] == ("assistant", ANSWER)
            assert len(back.requests) == 1
            assert chat.screen.status.status.activity == "ready"


async def test_a_refused_key_leaves_the_status_line_unconnected(open_chat: Open, endpoint: FakeEndpoint) -> None:
    endpoint.refuse_key = True
    async with open_chat(address=endpoint.address) as chat:
        await chat.sees("refuses the key")
        await chat.ask("q1")
        await chat.sees("✗ http://127.0.0.1", "refuses the key", "not connected")
        endpoint.refuse_key = False
        await chat.ask("q2")
        assert chat.screen.status.status.activity == "ready"


async def test_a_model_that_does_not_fit(open_chat: Open) -> None:
    async with open_chat() as chat:
        line = "starter needs 9.1 GB and 4.0 GB are free; choose a smaller model or --ctx 2048"
        chat.endpoint.refuse = (503, {"error": {"message": line, "code": "engine_died"}})
        await chat.ask("q1")
        await chat.sees("✗ starter needs 9.1 GB and 4.0 GB are free")


async def test_a_conversation_that_is_too_long(open_chat: Open) -> None:
    async with open_chat() as chat:
        chat.endpoint.refuse = (400, {"error": {"message": "5,000 tokens, and the context is 4,096",
                                                "code": "context_length_exceeded"}})  # fmt: skip
        await chat.ask("q1")
        await chat.sees("✗ 5,000 tokens, and the context is 4,096; F5 goes on")


async def test_loading_shows_how_far_it_is(open_chat: Open) -> None:
    async with open_chat() as chat:
        chat.endpoint.first_token_s = 1.0
        await chat.ready()
        chat.endpoint.loading = [0.4] * 8
        await chat.type("q")
        await chat.press("enter")
        await chat.sees("loading the model 40 %")
        await chat.answered()
        assert chat.turns[-1] == ("assistant", ANSWER)


async def test_a_locked_file_of_chats(open_chat: Open, tmp_path: Path) -> None:
    async with open_chat() as chat:
        await chat.ask("q1")
        other = sqlite3.connect(tmp_path / "chats.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        await chat.ask("q2")
        assert chat.turns[-1] == ("assistant", ANSWER)
        await chat.sees("✗ not saved: another program has locked")
        other.execute("COMMIT")
        other.close()
        await chat.sees("starter · ready")
    store = Store(tmp_path / "chats.db")
    assert len(store.messages(store.chats()[0].id)) == 4
    store.close()


@pytest.mark.parametrize("kind", ["newer", "damaged"])
async def test_a_file_of_chats_that_cannot_be_used(open_chat: Open, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "chats.db"
    if kind == "newer":
        store = Store(path)
        store._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
        store.close()
    else:
        path.write_bytes(b"not a database " * 100)
    before = path.read_bytes()
    async with open_chat() as chat:
        reason = "newer edgelm" if kind == "newer" else "damaged"
        await chat.until(lambda: reason in chat.screen.status.status.unsaved, reason)  # the line is cut on the screen
        await chat.sees("✗ not saved:")
        await chat.ask("q1")
        assert chat.turns[-1] == ("assistant", ANSWER)
        await chat.ask("q2")
        assert len(chat.turns) == 4
        await chat.sees("✗ not saved:")
    assert path.read_bytes() == before


async def test_quitting_with_unsaved_changes_asks(open_chat: Open, tmp_path: Path) -> None:
    async with open_chat() as chat:
        await chat.ask("q1")
        other = sqlite3.connect(tmp_path / "chats.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        await chat.ask("q2")
        await chat.sees("✗ not saved")
        await chat.press("ctrl+q")
        await chat.sees("Are you sure?", "changes are not saved")
        await chat.press("n")
        await chat.pilot.pause()
        assert chat.app.is_running
        other.execute("COMMIT")
        other.close()
        await chat.sees("starter · ready")


@pytest.mark.usefixtures("far")
async def test_an_answer_that_was_cut_off_by_a_kill_says_so(open_chat: Open, tmp_path: Path) -> None:
    store = Store(tmp_path / "chats.db")
    chat = Chat(title="killed")
    question = Message(chat=chat.id, parent=None, role="user", text="q")
    answer = Message(chat=chat.id, parent=question.id, role="assistant", state="streaming")
    store.put_chat(chat)
    store.put_message(question)
    store.put_message(answer)
    store.append(answer.id, "half of an ans")
    store.close()
    async with open_chat() as driver:
        await driver.sees("killed")
        await driver.press("ctrl+f", "down", "enter")
        await driver.sees("half of an ans", "edgelm was closed while this was written")
        await driver.press("ctrl+r")
        await driver.sees("Send this chat?")  # nobody knows where it was written
        await driver.press("down", "enter")
        await driver.until(lambda: driver.turns[-1] == ("assistant", ANSWER))


async def test_text_cannot_reach_the_terminal_as_control_codes(open_chat: Open) -> None:
    async with open_chat() as chat:
        evil = "a\x1b]52;c;ZXZpbA==\x07b \x9b2J `c\x1b[2J` \ud83d\n\n```x\x1b[1m\n\x1b[0;31mred\n```\n"
        chat.endpoint.answers = [evil]
        await chat.ask("\x1b[31mq")
        await chat.until(lambda: "red" in chat.text)
        assert not any(code in chat.text for code in "\x1b\x07\x9b")


async def test_a_field_cannot_send_control_codes_to_the_terminal(open_chat: Open, tmp_path: Path) -> None:
    evil = "a\x1b]52;c;ZXZpbA==\x07b \x9b2J \x1b]c\tend"
    store = Store(tmp_path / "chats.db")
    imported = Chat(title=evil, system=evil, tags=("t\x1b]d",))
    store.put_chat(imported)
    store.put_message(Message(chat=imported.id, parent=None, role="user", text=evil))
    store.close()

    def codes(chat: Driver) -> list[str]:
        return [code for code in chat.text if (ord(code) < 32 and code != "\n") or 127 <= ord(code) < 160]

    async with open_chat(size=(140, 40)) as chat:
        await chat.ready()
        chat.screen.open_chat(imported.id)
        await chat.sees("end")
        assert not codes(chat), "the list of chats, and the chat"
        await chat.press("up")
        assert chat.prompt.text == "ab \ufffd2J \ufffd]c\tend"
        assert not codes(chat), "an earlier message in the prompt"
        chat.prompt.put("")
        chat.app.copy_to_clipboard(evil)
        await chat.press("ctrl+v")
        assert "end" in chat.prompt.text
        assert not codes(chat), "what Ctrl+V puts"
        for command in ("title", "system", "tag", "params"):
            chat.screen.run_command(command, "")
            await chat.until(lambda: len(chat.app.screen_stack) == 2, command)
            await chat.pilot.pause()
            assert not codes(chat), command
            await chat.press("escape")
            await chat.until(lambda: len(chat.app.screen_stack) == 1)


CHAT = """
import sys
from pathlib import Path
from edgelm.tui.app import ChatApp
from edgelm.client.link import Link
from edgelm.tui.workspace import ChatDefaults
folder = Path(sys.argv[1])
link = Link(endpoint=sys.argv[2], api_key=None, runtime=folder, log=folder / "log")
ChatApp(folder / "chats.db", link, ChatDefaults()).run()
"""


async def test_a_kill_in_the_middle_of_an_answer_loses_at_most_a_second(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    import asyncio

    endpoint.answers, endpoint.tokens_per_second = [" ".join(map(str, range(3000)))], 200
    leader, follower = pty.openpty()
    with subprocess.Popen(  # noqa: ASYNC220 - it starts once, before anything waits
        [sys.executable, "-c", CHAT, str(tmp_path), endpoint.address],
        stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
    ) as process:  # fmt: skip
        os.close(follower)

        def read_until(words: bytes) -> None:
            seen, until = b"", time.monotonic() + 120
            while words not in seen:
                assert time.monotonic() < until, seen[-2000:]
                if select.select([leader], [], [], 0.1)[0]:
                    seen += os.read(leader, 1 << 16)

        await asyncio.to_thread(read_until, b"ready")
        os.write(leader, b"count\r")
        await asyncio.to_thread(read_until, b"600")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    os.close(leader)
    store = Store(tmp_path / "chats.db")
    (chat,) = store.chats()
    question, answer = store.messages(chat.id)
    store.close()
    assert question.text == "count"
    numbers = [int(word) for word in answer.text.split()]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 200  # the endpoint sends 200 a second, and text waits less than a second
