"""Commands for the shell: only the key `!` leads to them, and what becomes of their processes and output."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from textual import events

from edgelm.base.errors import RequestError
from edgelm.tui import pane
from edgelm.tui.prompt import shell
from edgelm.tui.prompt.files_bar import FilesBar
from edgelm.tui.prompt.shell import run_shell, shown
from edgelm.tui.terminal_input import InputParser
from tests.tui.conftest import Driver, Open

ENVIRONMENT = {"PATH": os.environ["PATH"], "SHELL": "/bin/sh"}


@pytest.fixture(autouse=True)
def own_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Run the commands of the chat in a folder and a shell that every machine has."""
    monkeypatch.setenv("SHELL", "/bin/sh")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made() -> list[Path]:
    """Return what a command has made."""
    return list(Path().glob("*ed"))


def written(name: str) -> str:
    return Path(name).read_text().strip() if Path(name).exists() else ""


def make(name: str) -> None:
    Path(name).touch()


def num_open() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def output(chat: Driver) -> str:
    return "".join(attachment.text for attachment in chat.screen.files.attachments)


async def attached(chat: Driver, text: str) -> None:
    await chat.until(lambda: output(chat) == text, f"attached: {text!r}, not {output(chat)!r}")


async def is_gone(pid: int) -> bool:
    for _ in range(500):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        await asyncio.sleep(0.01)
    return False


async def test_a_command_is_run_and_its_output_is_sent(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.type("!echo one; echo two >&2; exit 3")
        await chat.sees("Shell: Enter runs it")
        assert chat.prompt.text == "echo one; echo two >&2; exit 3"
        await chat.press("enter")
        await attached(chat, "one\ntwo\n[exit code 3]\n")
        await chat.sees("$ echo one", "token")
        assert not chat.prompt.is_shell
        await chat.ask("What does it say?")
        sent = chat.endpoint.requests[-1]["messages"][-1]["content"]
        assert sent == "$ echo one; echo two >&2; exit 3:\n```\none\ntwo\n[exit code 3]\n```\n\nWhat does it say?"


async def test_nothing_but_the_key_makes_a_command(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("first")
        chat.app.post_message(events.Paste("!touch pasted"))
        await chat.until(lambda: chat.prompt.text == "!touch pasted", "the paste")
        await chat.press("enter")
        await chat.until(lambda: ("user", "!touch pasted") in chat.turns, "it is a message")
        await chat.answered()
        await chat.press("up")  # from the history
        assert (chat.prompt.text, chat.prompt.is_shell) == ("!touch pasted", False)
        chat.prompt.put("")
        await chat.press("f4")  # an edit
        await chat.until(lambda: chat.screen.pane.editing is not None, "editing")
        chat.prompt.put("")
        await chat.type("!touch edited")
        assert not chat.prompt.is_shell
        await chat.press("enter")
        await chat.until(lambda: ("user", "!touch edited") in chat.turns, "it is a message")
        await chat.answered()
        chat.prompt.put("say ")
        await chat.type("!now")
        assert (chat.prompt.text, chat.prompt.is_shell) == ("say !now", False)
        assert made() == []


@pytest.mark.parametrize("arrive", [
    lambda chat: chat.screen.view.put_prompt("touch arrived"),  # a server's prompt, the editor
    lambda chat: chat.prompt.give_back("touch arrived "),  # a message that is not sent
    lambda chat: chat.prompt.insert("touch arrived"),  # a text that was pasted before, and checked
    lambda chat: chat.prompt.replace("touch arrived", (0, 0), (0, 0)),  # the name of a file
])  # fmt: skip
@pytest.mark.parametrize("begun", ["!", "!true;"])
async def test_a_text_that_comes_after_the_key_is_no_command(
    open_chat: Open, begun: str, arrive: Callable[[Driver], None]
) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.type(begun)
        assert chat.prompt.is_shell
        arrive(chat)
        assert "touch arrived" in chat.prompt.text
        assert not chat.prompt.is_shell
        await chat.press("enter")
        await chat.until(lambda: chat.turns and "touch arrived" in chat.turns[0][1], "it is a message")
        await chat.answered()
        assert made() == []


async def test_a_pasted_text_on_the_bar_is_no_command(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        chat.app.post_message(events.Paste("touch pasted\n" * 100))
        await chat.sees("as text")
        await chat.type("!true;")
        chat.screen.pane.post_message(FilesBar.Used(0))
        await chat.until(lambda: "touch pasted" in chat.prompt.text, "put in")
        assert not chat.prompt.is_shell


async def test_a_paste_that_is_checked_is_no_command(open_chat: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = threading.Event()
    monkeypatch.setattr(pane, "existing_paths", lambda _: checked.wait(60) and [])
    async with open_chat() as chat:
        await chat.ready()
        chat.app.post_message(events.Paste("/bin/touch arrived"))
        chat.app.post_message(events.Key("exclamation_mark", "!"))
        checked.set()
        await chat.until(lambda: chat.prompt.text == "/bin/touch arrived!", "put in, before the key")
        assert not chat.prompt.is_shell


async def test_nothing_is_pasted_into_a_command(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.type("!true ")
        chat.app.post_message(events.Paste("; touch pasted"))
        await chat.hears("a command is typed, not pasted")
        chat.app.copy_to_clipboard("; touch copied")
        await chat.press("ctrl+v")
        assert (chat.prompt.text, chat.prompt.is_shell) == ("true ", True)


async def test_undo_brings_no_message_into_a_command(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        chat.app.post_message(events.Paste("touch pasted"))
        await chat.until(lambda: chat.prompt.text == "touch pasted", "the paste")
        await chat.press(*["backspace"] * len("touch pasted"), "exclamation_mark")
        assert (chat.prompt.text, chat.prompt.is_shell) == ("", True)
        chat.prompt.undo()
        assert chat.prompt.text == ""
        chat.prompt.redo()
        assert chat.prompt.text == ""


async def test_a_message_that_is_edited_is_no_command(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("touch edited")
        await chat.press("f4")
        await chat.until(lambda: chat.screen.pane.editing is not None, "editing")
        chat.screen.run_command("shell", "")
        await chat.hears("there is a message in the prompt")
        chat.prompt.put("")
        chat.screen.run_command("shell", "")
        await chat.until(lambda: len(chat.app._notifications) > 1, "refused")
        assert not chat.prompt.is_shell


@pytest.mark.parametrize("after", ["l", "/", " ", "é", "\r"])
def test_escape_and_a_key_in_one_read_leave_the_shell(after: str) -> None:
    parser = InputParser()
    keys = [event for event in (*parser.feed(f"\x1b{after}"), *parser.feed("")) if isinstance(event, events.Key)]
    assert [key.key.startswith("alt+") for key in keys] == [True], keys


@pytest.mark.parametrize(("key", "text"), [("alt+l", "ls"), ("alt+slash", "/s"), ("alt+enter", "\ns")])
async def test_a_key_with_alt_leaves_the_shell(open_chat: Open, key: str, text: str) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.press("exclamation_mark")
        character = None if text[0] == "\n" else text[0]
        chat.prompt.post_message(events.Key(key, character))
        await chat.type("s")
        assert (chat.prompt.text, chat.prompt.is_shell) == (text, False)


async def test_the_argument_of_the_command_shell_is_not_run(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        chat.app.post_message(events.Paste("/shell touch pasted"))
        await chat.until(lambda: chat.prompt.text.startswith("/shell"), "the paste")
        await chat.press("enter")
        await chat.until(lambda: chat.prompt.is_shell, "a command is written")
        assert chat.prompt.text == ""
        await chat.press("escape")
        assert not chat.prompt.is_shell
        assert made() == []


async def test_ways_out_of_the_shell(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.press("exclamation_mark", "backspace")
        assert not chat.prompt.is_shell
        await chat.type("!!")  # a message that begins so
        assert (chat.prompt.text, chat.prompt.is_shell) == ("!", False)
        chat.prompt.put("")
        await chat.type("!/bin/ec")
        assert "/new" not in chat.text
        assert chat.screen.pane.unsent == ""
        await chat.press("tab", "escape")
        assert (chat.prompt.text, chat.prompt.is_shell) == ("/bin/ec", False)


async def test_earlier_commands_come_back_in_the_shell_only(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("a message")
        await chat.type("!echo 1")
        await chat.press("enter")
        await attached(chat, "1\n")
        await chat.type("!")
        await chat.press("up")
        assert chat.prompt.text == "echo 1"
        await chat.press("escape")
        chat.prompt.put("")
        await chat.press("up")
        assert chat.prompt.text == "a message"


async def test_escape_ends_a_command(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.type("!echo $$ >pid; sleep 600")
        await chat.press("enter")
        await chat.sees("running echo")
        await chat.until(lambda: written("pid"), "it runs")
        await chat.type("!second")
        await chat.press("enter")
        await chat.hears("a command is running; Esc stops it")
        assert (chat.prompt.text, chat.prompt.is_shell) == ("second", True)  # it is not lost
        await chat.press("escape")
        await chat.until(lambda: "running echo" not in chat.text, "ended")
        assert await is_gone(int(written("pid")))
        assert chat.screen.files.attachments == ()


async def test_escape_twice_ends_a_command_that_ignores_it(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.type("!trap '' TERM; echo $$ >pid; while :; do sleep 1; done")
        await chat.press("enter")
        await chat.until(lambda: written("pid"), "it runs")
        await chat.press("escape", "escape")
        assert await is_gone(int(written("pid")))


async def test_the_end_of_the_chat_ends_a_command(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.type("!trap '' TERM; echo $$ >pid; while :; do sleep 1; done")
        await chat.press("enter")
        await chat.until(lambda: written("pid"), "it runs")
    assert await is_gone(int(written("pid")))


@pytest.mark.parametrize("turns", range(12))
async def test_a_command_that_is_cancelled_at_once_leaves_nothing(turns: int) -> None:
    num_files = num_open()
    running = asyncio.create_task(run_shell("echo $$ >pid; sleep 600", ENVIRONMENT))
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    if written("pid"):
        assert await is_gone(int(written("pid")))
    for _ in range(500):
        if num_open() <= num_files:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("a pipe is open")


async def test_output_stays_in_the_chat_that_it_was_begun_in(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("first")
        begun = chat.session.chat.id
        await chat.type("!until [ -e opened ]; do sleep 0.01; done; echo done")
        await chat.press("enter")
        await chat.sees("running until")
        await chat.press("ctrl+n")
        await chat.until(lambda: chat.session.chat.id != begun, "another chat")
        make("opened")
        await chat.hears("its output waits in")
        assert output(chat) == ""
        chat.screen.open_chat(begun)
        await attached(chat, "done\n")


async def test_output_is_for_the_new_message_while_another_is_edited(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("first")
        await chat.type("!until [ -e opened ]; do sleep 0.01; done; echo done")
        await chat.press("enter", "f4")
        await chat.until(lambda: chat.screen.pane.editing is not None, "editing")
        make("opened")
        await chat.until(lambda: "running until" not in chat.text, "ended")
        assert output(chat) == ""
        await chat.press("escape")
        await attached(chat, "done\n")


async def test_what_a_command_leaves_in_the_background_ends_with_it() -> None:
    got = await run_shell("sleep 600 & echo $!", ENVIRONMENT)
    assert await is_gone(int(got.text))


async def test_a_command_has_a_time() -> None:
    got = await run_shell("echo begun; trap '' TERM; sleep 600 & echo $!; wait; sleep 600", ENVIRONMENT, limit_s=0.5)
    begun, pid, note = got.text.splitlines()
    assert (begun, note) == ("begun", "[ended after 0.5 s]")
    assert await is_gone(int(pid))


async def test_output_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "MAX_OUTPUT", 64 * 2**10)
    got = await run_shell("yes", ENVIRONMENT)
    assert got.text.endswith("y\n[ended: these are the first 64 KiB of its output]\n")
    assert got.size == 64 * 2**10


async def test_a_command_reads_nothing_and_has_no_terminal() -> None:
    got = await run_shell("cat; tty; echo $TERM", ENVIRONMENT)
    assert got.text.splitlines()[-1] == "dumb"
    assert (await run_shell("true", ENVIRONMENT)).text == "[no output]\n"
    assert (await run_shell("printf x", ENVIRONMENT)).text == "x"


async def test_a_shell_that_is_none_is_not_used() -> None:
    assert (await run_shell("echo yes", {**ENVIRONMENT, "SHELL": "relative"})).text == "yes\n"


async def test_a_key_in_the_output_is_not_attached(own_shell: Path) -> None:
    (own_shell / "id").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaA\n")
    with pytest.raises(RequestError, match="holds a private key"):
        await run_shell("cat id", ENVIRONMENT)


def test_control_characters_are_shown() -> None:
    assert shown("a\x1b[31mb\r\nc\td\x07\x7f\x9b\u202e") == "a␛[31mb\nc\td␇␡\ufffd\ufffd"


async def test_a_signal_is_named() -> None:
    got = await run_shell("kill -KILL $$", ENVIRONMENT)
    assert got.text == f"[exit code {-signal.SIGKILL}]\n"
