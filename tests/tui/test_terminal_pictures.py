"""Pictures in terminals that draw them, and that no other terminal gets anything but half blocks."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
import zlib
from pathlib import Path

import pytest
from PIL import Image
from textual.drivers.linux_driver import LinuxDriver

from edgelm.base.workers.pictures import Picture
from edgelm.tui.terminal_input import TerminalName
from edgelm.tui.transcript.kitty import MAX_SENT, KittyPictures, can_draw
from tests.tui.conftest import Driver, Open
from tests.tui.fake_endpoint import FakeEndpoint
from tests.tui.test_failures import CHAT
from tests.tui.test_sent_pictures import HALF, folder

__all__ = ["folder"]

KITTY = "\x1bP>|kitty(0.35.2)\x1b\\"
CELL = "\U0010eeee"
COMMAND = re.compile(r"\x1b_G([^;\x1b]*)(?:;([^\x1b]*))?\x1b\\")


def commands(output: str) -> list[dict[str, str]]:
    """Return the keys of the commands of kitty's protocol; those of one picture's chunks are one."""
    found: list[dict[str, str]] = []
    for keys, data in COMMAND.findall(output):
        command = dict(key.split("=") for key in keys.split(","))
        if set(command) == {"m"}:
            found[-1]["data"] += data
        else:
            found.append({**command, "data": data})
    return found


@pytest.mark.parametrize(
    ("answer", "draws"),
    [
        (KITTY, True),
        ("\x1bP>|ghostty 1.1.3\x1b\\", True),
        ("\x1bP>|kitty(0.26.5)\x1b\\", False),
        ("\x1bP>|WezTerm 20240203-110809-5046fc22\x1b\\", False),
        ("\x1bP>|tmux 3.4\x1b\\", False),
        ("\x1bP>|XTerm(390)\x1b\\", False),
    ],
)
def test_only_terminals_with_placeholders_draw(answer: str, draws: bool) -> None:
    assert can_draw(answer) == draws


def test_a_terminal_keeps_so_many_pictures() -> None:
    written: list[str] = []
    pictures = KittyPictures(written.append)
    ids = []
    for place in range(MAX_SENT + 1):
        (text,) = pictures.lines(Picture(1, 1, bytes(3), str(place)), 1, 1)
        ids.append(str(text.style))
    sent = commands("".join(written))
    assert ids[:MAX_SENT] == sorted(set(ids))
    assert ids[-1] == ids[0]
    assert [command["a"] for command in sent] == ["T"] * MAX_SENT + ["d", "T"]
    assert sent[-2]["i"] == sent[0]["i"] == sent[-1]["i"]


async def sent_picture(chat: Driver) -> list[str]:
    """Send a picture of 400 x 300 pixels in a terminal that draws them; return what is written to it from then on."""
    written: list[str] = []
    assert chat.app._driver is not None
    chat.app._driver.write = written.append  # type: ignore[method-assign]
    chat.endpoint.seeing = ["starter"]
    await chat.ready()
    Image.new("RGB", (400, 300), "red").save("cat.png")
    chat.app.post_message(TerminalName(KITTY))
    await chat.ask_only("/attach cat.png")
    await chat.sees("cat.png")
    await chat.ask("What is it?")
    await chat.sees(CELL)
    return written


def columns(chat: Driver) -> int:
    """Return the cells of the widest line of a picture on the screen."""
    return max(line.count(CELL) for line in chat.text.split("\n"))


async def test_a_picture_is_drawn_and_follows_the_terminal(open_chat: Open, folder: Path) -> None:
    async with open_chat((100, 50)) as chat:
        written = await sent_picture(chat)
        (command,) = commands("".join(written))
        assert (command["a"], command["U"], command["s"], command["v"]) == ("T", "1", "400", "300")
        assert zlib.decompress(base64.b64decode(command["data"])) == b"\xff\0\0" * 120_000
        assert (command["c"], command["r"]) == ("37", "14"), "its own shape in 14 lines"
        assert columns(chat) == 37
        assert sum(CELL in line for line in chat.text.split("\n")) == 14
        del written[:]
        await chat.pilot.resize_terminal(30, 50)
        await chat.until(lambda: 0 < columns(chat) < 28, "a narrower picture")
        (command,) = commands("".join(written))
        assert (command["a"], command["U"], command["data"]) == ("p", "1", "")
        assert int(command["c"]) == columns(chat)
        del written[:]
        chat.app.theme = "textual-light"
        await chat.pilot.pause()
        assert commands("".join(written)) == [], "the terminal has it"
        chat.app.post_message(LinuxDriver.SignalResume())
        await chat.until(lambda: commands("".join(written)), "sending it again after fg")
        assert [command["a"] for command in commands("".join(written))] == ["T"]


async def test_a_picture_is_selected_and_copied_as_nothing(open_chat: Open, folder: Path) -> None:
    async with open_chat((100, 50)) as chat:
        await sent_picture(chat)
        chat.transcript.text_select_all()
        await chat.pilot.pause()
        selected = chat.screen.get_selected_text()
        assert selected is not None
        assert "What is it?" in selected
        assert CELL not in selected
        strips = [strip for strip in chat.screen._compositor.render_strips() if CELL in strip.text]
        colors = {segment.style.color.name for strip in strips for segment in strip if CELL in segment.text}
        assert len(strips) == 14
        assert colors == {"#ed6e00"}, "the colour is the picture's name"


async def test_an_unknown_terminal_gets_half_blocks(open_chat: Open, folder: Path) -> None:
    async with open_chat() as chat:
        chat.app.post_message(TerminalName("\x1bP>|WezTerm 20240203\x1b\\"))
        chat.endpoint.seeing = ["starter"]
        await chat.ready()
        await chat.ask_only("/attach cat.png")
        await chat.sees("cat.png")
        await chat.ask("What is it?")
        await chat.sees(HALF * 10)
        assert CELL not in chat.text


@pytest.mark.parametrize("answer", [KITTY, ""], ids=["kitty", "none"])
async def test_a_real_terminal_is_asked_once(endpoint: FakeEndpoint, folder: Path, tmp_path: Path, answer: str) -> None:
    """The answer comes while something is typed, and none of it gets into the prompt."""
    endpoint.seeing = ["starter"]
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    for name in (
        "NO_COLOR",
        "COLUMNS",
        "LINES",
    ):  # pytest-xdist gives its workers a size, in which the picture is not seen
        environment.pop(name, None)
    seen = ""
    with subprocess.Popen(  # noqa: ASYNC220 - it starts once, before anything waits
        [sys.executable, "-c", CHAT, str(tmp_path), endpoint.address],
        stdin=follower, stdout=follower, stderr=follower, start_new_session=True, env=environment,
    ) as process:  # fmt: skip
        os.close(follower)

        def read_until(words: str) -> None:
            nonlocal seen
            until = time.monotonic() + 120
            while words not in seen:
                assert time.monotonic() < until, seen[-2000:]
                if select.select([leader], [], [], 0.1)[0]:
                    seen += os.read(leader, 1 << 16).decode(errors="replace")

        try:
            await asyncio.to_thread(read_until, "\x1b[>q")
            await asyncio.to_thread(read_until, "ready")
            os.write(leader, b"/attach cat" + answer.encode() + b".png\r")
            await asyncio.to_thread(read_until, "256 tokens")
            os.write(leader, b"What is it?\r")
            await asyncio.to_thread(read_until, CELL * bool(answer) or HALF)
        finally:
            process.kill()
            process.wait()
    os.close(leader)
    assert seen.count("\x1b[>q") == 1
    assert seen.count("\x1b_Ga=T,U=1,") == bool(answer)
    assert (HALF in seen) == (not answer)
    request = next(request for request in endpoint.requests if "messages" in request)
    assert request["messages"][-1]["content"][-1]["text"] == "What is it?"
