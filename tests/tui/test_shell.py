"""Commands for the shell: only the key `!` leads to them, and what becomes of their processes and output."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from textual import events

from edgelm.base.errors import RequestError
from edgelm.tui.prompt import shell
from edgelm.tui.prompt.shell import run_shell, shown
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
        assert chat.screen._unsent == ""
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
        await chat.press("escape")
        await chat.until(lambda: "running echo" not in chat.text, "ended")
        assert await is_gone(int(written("pid")))
        assert chat.screen.files.attachments == ()


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
