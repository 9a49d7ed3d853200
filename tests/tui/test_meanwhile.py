"""What comes while something else is under way: a message that is sent or comes back, another chat, a slow disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from edgelm.base.errors import EdgeLMError
from edgelm.base.runtime import birth
from edgelm.chats.attachments import Attachment
from edgelm.chats.store import Store
from edgelm.chats.unsent import own_name
from edgelm.tui.prompt.outgoing import Outgoing
from edgelm.tui.workspace import LastRun, Workspace
from tests.tui.conftest import Driver, Open
from tests.tui.test_editor import Script, script
from tests.tui.test_files import at_once, folder, held, names, waits

__all__ = ["folder", "held", "script"]  # fixtures


async def sent(chat: Driver, *texts: str) -> None:
    """Wait until these are the messages of the user in the open chat, and the last one is answered."""
    await chat.until(
        lambda: [text for role, text in chat.turns if role == "user"] == list(texts) and chat.answer is None,
        f"sent: {texts}",
    )


async def test_none_is_compared_while_a_message_is_answered_that_waited(
    open_chat: Open, folder: Path, held: threading.Event
) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("One")
        await at_once(chat, "@src/not\tTwo\r")
        await waits(chat, "Two")
        chat.endpoint.stall_after = 1
        await chat.press("f8")
        await chat.sees("Compare with")
        held.set()
        await chat.until(lambda: chat.answer is not None, "sent behind the dialog")
        await chat.press("enter")
        await chat.hears("an answer is being written")


async def test_none_is_compared_in_a_chat_that_was_left(open_chat: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = asyncio.Event()
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("One")
        models = chat.screen.workspace.link.models

        async def slow(*, again: bool = False) -> object:
            if again:
                await go_on.wait()
            return await models(again=again)

        monkeypatch.setattr(chat.screen.workspace.link, "models", slow)
        await chat.press("f8", "ctrl+n")
        await chat.until(lambda: chat.turns == [], "a new chat")
        go_on.set()
        await chat.sees("Compare with")
        await chat.press("enter")
        await chat.hears("another chat was opened meanwhile")


async def test_a_message_is_edited_in_no_chat_that_is_being_left(
    open_chat: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = asyncio.Event()
    read = Workspace.read

    async def slow(workspace: Workspace, work: Any) -> Any:
        await go_on.wait()  # a disk that has other writes to do
        return await read(workspace, work)

    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("first chat")
        first = chat.session.chat.id
        await chat.press("ctrl+n")
        await chat.ask("second chat")
        monkeypatch.setattr(Workspace, "read", slow)
        chat.screen.open_chat(first)
        await chat.type("written before")
        await chat.press("f4")
        await chat.until(lambda: chat.prompt.text == "second chat", "edited")
        go_on.set()
        await chat.until(lambda: chat.session.chat.id == first, "open")
        await chat.until(lambda: chat.prompt.text == "written before", "the edit was left")
        await chat.press("enter")
        await sent(chat, "first chat", "written before")


async def test_a_message_that_came_back_behind_the_editor_stays(
    open_chat: Open,
    folder: Path,
    held: threading.Event,
    script: Script,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    go_on = tmp_path / "go on"
    monkeypatch.setenv("EDITOR", script(f'while ! test -e "{go_on}"; do sleep 0.05; done; echo "Two more" > "$1"'))
    monkeypatch.delenv("VISUAL", raising=False)
    async with open_chat() as chat:
        await chat.ready()
        await at_once(chat, "@src/not\tOne\rTwo")
        await waits(chat, "One", typed="Two")
        chat.app.suspend = contextlib.nullcontext  # type: ignore[method-assign]
        await chat.press("f9")
        await chat.until(lambda: chat.app._batch_count, "the editor")
        (folder / "src" / "notes.md").unlink()
        held.set()
        await chat.until(lambda: chat.prompt.text == "One\nTwo", "it came back behind the editor")
        go_on.write_text("")
        await chat.until(lambda: chat.prompt.text == "One\nTwo more", "both")


async def test_a_message_that_begins_with_a_slash_is_no_command_when_it_comes_again(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("//new is a command")
        before = chat.session
        await chat.press("f4")
        await chat.until(lambda: chat.prompt.text == "//new is a command", "edited")
        await chat.press("enter")
        await chat.until(lambda: len(chat.endpoint.requests) == 2, "sent again")
        await sent(chat, "/new is a command")
        await chat.press("up", "enter")
        await sent(chat, "/new is a command", "/new is a command")
        assert chat.session is before
    async with open_chat() as chat:
        await chat.until(lambda: chat.screen.workspace.chats, "the state of the last time")
        await chat.press("up")
        assert chat.prompt.text == "//new is a command"


async def test_two_windows_have_each_their_own_unsent_text(open_chat: Open, tmp_path: Path) -> None:
    def put(name: str, text: str) -> None:
        store = Store(tmp_path / "chats.db")
        store.put_setting(name, text)
        store.close()

    put("draft", "of an older version")
    program = [sys.executable, "-c", "input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as other:  # noqa: ASYNC220 - before anything waits
        put(f"draft {other.pid} {birth(other.pid)}".rstrip(), "of another window")
        async with open_chat() as chat:
            await chat.until(lambda: chat.prompt.text == "of an older version", "not the other window's")
            await chat.type(", and more")
        other.communicate(b"\n")
    put(f"draft {os.getpid()} 1", "of an ended process whose id we have")
    async with open_chat() as chat:
        await chat.until(lambda: chat.prompt.text.count("\n") == 2, "the texts of all that have ended")
        assert sorted(chat.prompt.text.split("\n")) == [
            "of an ended process whose id we have", "of an older version, and more", "of another window",
        ]  # fmt: skip
    store = Store(tmp_path / "chats.db")
    assert [name for name in store.settings() if name.startswith("draft")] == [own_name()]
    store.close()


async def test_an_unsent_text_is_there_while_the_file_cannot_be_written(open_chat: Open, tmp_path: Path) -> None:
    store = Store(tmp_path / "chats.db")
    store.put_setting("draft", "words")
    with closing(sqlite3.connect(tmp_path / "chats.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with open_chat() as chat:
            await chat.until(lambda: chat.prompt.text == "words", "the text")
            other.execute("COMMIT")
            await chat.until(lambda: store.settings().get(own_name()) == "words", "saved as this process's")
            assert "draft" not in store.settings()
    store.close()


async def test_a_kept_draft_stays_where_keys_are_faster_than_the_disk(
    open_chat: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, may_load = Workspace.load, asyncio.Event()

    async def slow(workspace: Workspace) -> LastRun:
        await may_load.wait()
        return await load(workspace)

    async with open_chat() as chat:
        await chat.ready()
        await chat.type("a long message of yesterday")
    monkeypatch.setattr(Workspace, "load", slow)
    async with open_chat() as chat:  # ended before it is loaded
        await chat.type("x")
        await chat.pilot.pause(0.6)
    async with open_chat() as chat:
        await chat.type("y")
        may_load.set()
        await chat.until(lambda: chat.prompt.text == "a long message of yesterday\ny", "both")
    for typed in ("!ec", "/thin"):
        may_load.clear()
        async with open_chat() as chat:
            await chat.type(typed)
            may_load.set()
            await chat.until(lambda: chat.screen._is_loaded, "loaded")
            assert chat.prompt.text == typed.removeprefix("!"), "a command stays one"
    async with open_chat() as chat:  # ended with /thin in the prompt
        await chat.until(lambda: chat.prompt.text == "a long message of yesterday\ny\n/thin", "both")
        chat.prompt.put("/think")
        await chat.pilot.pause()
        chat.screen._draft = "later"
        await chat.press("enter")
        await chat.until(lambda: chat.prompt.text == "later", "behind the command")


async def test_what_is_written_survives_the_walk_through_earlier_messages(
    open_chat: Open, folder: Path, held: threading.Event
) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("Old")
        await at_once(chat, "@src/not\tOne\r")
        await waits(chat, "One")
        await chat.type("my next message")
        await chat.press("up")
        await chat.until(lambda: chat.prompt.text == "Old", "an earlier one")
        assert chat.screen.pane.unsent == "my next message", "it is the draft"
        held.set()
        await sent(chat, "Old", "One")
        await chat.press("down")
        assert chat.prompt.text == "One"
        await chat.press("down")
        assert chat.prompt.text == "my next message"
        await chat.press("up", "f4")
        await chat.until(lambda: chat.screen.pane.editing is not None, "edited")
        await chat.press("escape")
        await chat.until(lambda: chat.prompt.text == "my next message", "as before the walk")
        await chat.press("up", "enter")
        await sent(chat, "Old", "One", "One")
        assert chat.prompt.text == "my next message", "another one was sent"


async def test_a_message_that_comes_back_ends_the_walk_through_earlier_ones(
    open_chat: Open, folder: Path, held: threading.Event
) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("Old")
        await at_once(chat, "@src/not\tOne\r")
        await waits(chat, "One")
        await chat.type("next")
        await chat.press("up")
        (folder / "src" / "notes.md").unlink()
        held.set()
        await chat.until(lambda: chat.prompt.text == "One\nnext", "it came back above what is written")
        await chat.press("down", "up", "up")
        assert chat.prompt.text == "Old"
        await chat.press("down")
        assert chat.prompt.text == "One\nnext"


async def test_a_message_is_sent_where_a_file_of_its_chat_is_on_a_disk_that_hangs(
    open_chat: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = threading.Event()

    def hang(_: Attachment) -> str:
        dead.wait()
        return "same"

    monkeypatch.setattr("edgelm.tui.prompt.attaching.LOOK_WAIT_S", 0.1)
    async with open_chat() as chat:
        await chat.ready()
        await at_once(chat, "@src/add\tOne\r")
        await sent(chat, "One")
        monkeypatch.setattr("edgelm.tui.prompt.attaching.state_of", hang)
        await at_once(chat, "Two\r")
        try:
            await sent(chat, "One", "Two")
        finally:
            dead.set()


@pytest.mark.parametrize("has_picture", [True, False])
async def test_a_picture_is_of_the_message_before_whose_enter_it_was_asked_from_the_clipboard(
    open_chat: Open, monkeypatch: pytest.MonkeyPatch, has_picture: bool
) -> None:
    may_end = threading.Event()

    def slow(number: int) -> Attachment:
        may_end.wait()
        if not has_picture:
            raise EdgeLMError("there is no picture on the clipboard")
        return Attachment(kind="text", name=f"picture {number}", text="p", size=1)

    monkeypatch.setattr("edgelm.tui.prompt.attaching.clipboard_picture", slow)
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask_only("/paste")
        await chat.sees("picture is read")
        await chat.ask_only("What is this?")
        await waits(chat, "What is this?")
        may_end.set()
        if not has_picture:
            await chat.hears("there is no picture on the clipboard")
            await chat.until(lambda: chat.prompt.text == "What is this?", "it came back")
            return
        await sent(chat, "What is this?")
        assert names(chat) == []
        assert [file.name for file in chat.session.tree.path()[0].attachments] == ["picture 1"]


async def test_a_prompt_of_a_server_is_no_shell_command(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.type("!rm -i x")
        assert chat.prompt.is_shell
        await chat.screen._face.propose("/Sum it up")  # /SERVER:PROMPT, asked before
        assert (chat.prompt.text, chat.prompt.is_shell) == ("//Sum it up", False)
        await chat.screen._face.propose("First")
        assert chat.prompt.text == "First\n/Sum it up", "only the begin of a message needs two"
        await chat.ask("//Old")
        await chat.press("f4")
        await chat.until(lambda: chat.prompt.text.endswith("Old"), "edited")
        await chat.screen._face.propose("Next")
        await chat.hears("it is in the prompt when the edit ends")
        await chat.press("escape")
        assert chat.prompt.text == "Next"


async def test_a_message_that_waits_is_sent_into_its_chat_where_that_was_read_again(
    open_chat: Open, folder: Path, held: threading.Event
) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("Old")
        first = chat.session
        await at_once(chat, "@src/not\tOne\r")
        await waits(chat, "One")
        await chat.press("ctrl+n")
        chat.screen.open_chat(first.chat.id)
        await chat.until(lambda: chat.session.chat.id == first.chat.id and chat.session is not first, "read again")
        held.set()
        await sent(chat, "Old", "One")


@pytest.mark.parametrize("edited", [None, 2**40])
async def test_a_message_goes_to_no_branch_that_is_gone_in_a_chat_that_was_read_again(
    open_chat: Open, edited: int | None
) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("Old")
        message = Outgoing("One", [], chat.session, None if edited else 2**40, edited)
        with pytest.raises(EdgeLMError, match="another branch was opened"):
            message.require_place(chat.session)
