"""Pictures in terminals that draw them by kitty's protocol or by sixels; no other gets anything but half blocks."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import itertools
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
from PIL import Image, ImageChops, ImageStat
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual._compositor import CompositorUpdate
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip

from edgelm.base.workers.pictures import Picture, draw_sixels
from edgelm.tui.terminal_input import TerminalAnswer
from edgelm.tui.transcript import sixel
from edgelm.tui.transcript.kitty import MAX_SENT, KittyPictures, can_draw
from tests.tui.conftest import Driver, Open
from tests.tui.fake_endpoint import FakeEndpoint
from tests.tui.test_failures import CHAT
from tests.tui.test_sent_pictures import HALF, folder

__all__ = ["folder"]

SIXEL = "\x1b[6;20;10t\x1b[4;800;1000t\x1b[?1;0;256S\x1b[?62;4;22c"
SIXELS = re.compile(r'\x1bP0;1;0q"1;1;(\d+);(\d+)([^\x1b]*)\x1b\\')
XTERM = "\x1b[?1;0;1024S\x1b[?63;1;2;4;6;9;15;16;22;28c"  # by default it tells no size
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
    chat.app.post_message(TerminalAnswer(KITTY))
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
        chat.app.post_message(TerminalAnswer("\x1bP>|WezTerm 20240203\x1b\\"))
        chat.endpoint.seeing = ["starter"]
        await chat.ready()
        await chat.ask_only("/attach cat.png")
        await chat.sees("cat.png")
        await chat.ask("What is it?")
        await chat.sees(HALF * 10)
        assert CELL not in chat.text


@pytest.mark.parametrize("answer", [KITTY, SIXEL, XTERM, ""], ids=["kitty", "sixel", "xterm", "none"])
async def test_a_real_terminal_is_asked_once(endpoint: FakeEndpoint, folder: Path, tmp_path: Path, answer: str) -> None:
    """The answer comes while something is typed, and none of it gets into the prompt."""
    endpoint.seeing = ["starter"]
    leader, follower = pty.openpty()
    fcntl.ioctl(
        follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, *((1000, 800) if answer == XTERM else (0, 0)))
    )
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
            await asyncio.to_thread(read_until, {KITTY: CELL, "": HALF}.get(answer, "\x1bP0;1;0q"))
        finally:
            process.kill()
            process.wait()
    os.close(leader)
    assert seen.count("\x1b[>q") == 1
    assert seen.count("\x1b[c") == 1
    assert seen.count("\x1b_Ga=T,U=1,") == (answer == KITTY)
    assert HALF not in seen or answer != KITTY
    request = next(request for request in endpoint.requests if "messages" in request)
    assert request["messages"][-1]["content"][-1]["text"] == "What is it?"


def decoded(sixels: str) -> Image.Image:
    """Draw sixels as a terminal does; what is not drawn is black."""
    match = SIXELS.fullmatch(sixels)
    assert match
    image = Image.new("RGB", (int(match[1]), int(match[2])))
    colors: dict[str, tuple[int, ...]] = {}
    color, top, x = "", 0, 0
    for token in re.findall(r"#\d+(?:;2;\d+;\d+;\d+)?|!\d+.|.", match[3]):
        if token[0] == "#":
            color, *values = token[1:].split(";")
            if values:
                colors[color] = tuple(round(int(value) * 2.55) for value in values[1:])
        elif token in "$-":
            x, top = 0, top + 6 * (token == "-")
        else:
            end = x + int(token[1:-1] or 1)
            for column, bit in itertools.product(range(x, end), range(6)):
                if ord(token[-1]) - 63 >> bit & 1:
                    image.putpixel((column, top + bit), colors[color])  # raises for one below the line
            x = end
    return image


@pytest.mark.parametrize("cell", [(10, 20), (8, 16), (7, 13), (20, 41)])
def test_sixels_are_the_picture(tmp_path: Path, cell: tuple[int, int]) -> None:
    image = Image.effect_mandelbrot((300, 200), (-2, -1.5, 1, 1.5), 60).convert("RGB")
    image.paste("orange", (20, 20, 90, 70))
    image.save(tmp_path / "cat.png")
    drawn = draw_sixels((tmp_path / "cat.png").read_bytes(), 48, 14, cell, 256)
    scale = min(48 * cell[0] / 300, 14 * cell[1] / 200, 1)
    width, height = round(300 * scale), round(200 * scale)
    expected = image.resize((width, height), Image.Resampling.LANCZOS)
    assert drawn.columns == -(-width // cell[0])
    tops = range(0, height, cell[1])
    assert len(drawn.lines) == len(tops)
    for top, line in zip(tops, drawn.lines, strict=True):
        part = decoded(line)
        assert part.size == (width, min(cell[1], height - top))
        difference = ImageChops.difference(part, expected.crop((0, top, width, top + part.height)))
        assert max(ImageStat.Stat(difference).mean) < 6, "256 colours of it"


def test_a_drawing_of_few_colors_is_exact(tmp_path: Path) -> None:
    image = Image.new("RGB", (64, 32), "white")
    image.paste("blue", (3, 5, 40, 19))
    image.putpixel((63, 31), (255, 0, 0))
    image.save(tmp_path / "cat.png")
    (line,) = draw_sixels((tmp_path / "cat.png").read_bytes(), 48, 14, (10, 40), 16).lines
    assert ImageChops.difference(decoded(line), image).getbbox() is None


@pytest.mark.parametrize(
    ("answers", "cell"),
    [
        ((SIXEL,), (10, 20)),
        (("\x1b[?63;1;2;4;6c", "\x1b[4;800;900t"), (9, 20)),
        (("\x1b[6;18;9t", "\x1b[4;800;1000t", "\x1b[?62;4c"), (9, 18)),
        (("\x1b[6;20;10t", "\x1b[?62;22c"), None),
        (("\x1b[6;20;10t", "\x1b[?4c"), None),
        (("\x1b[?62;4c",), None),
        (("\x1b[6;0;0t", "\x1b[?62;4c"), None),
        (("\x1bP>|tmux 3.4\x1b\\", SIXEL), None),
    ],
    ids=["xterm", "area", "cell", "none", "vt132", "no size", "no pixels", "tmux"],
)
def test_only_terminals_that_tell_their_cells_get_sixels(
    answers: tuple[str, ...], cell: tuple[int, int] | None
) -> None:
    terminal = sixel.SixelTerminal()
    parts = [part for answer in answers for part in re.findall(r"\x1b(?:\[[^\x1b]*|P[^\x1b]*\x1b\\)", answer)]
    found = [pictures for part in parts if (pictures := terminal.take(part, 100, 40)) is not None]
    assert [pictures._cell for pictures in found] == ([] if cell is None else [cell])


def sixel_lines(chat: Driver) -> int:
    """Return the lines of the screen that are drawn by sixels."""
    update = chat.app.screen._compositor.render_full_update()
    return sum("\x1bP0;1;0q" in strip.render(chat.app.console) for line in update.strips for strip in line)


async def sent_sixels(chat: Driver) -> None:
    """Send a picture that a terminal with cells of 10 x 20 pixels draws in 14 lines."""
    chat.endpoint.seeing = ["starter"]
    await chat.ready()
    Image.new("RGB", (400, 300), "red").save("cat.png")
    for answer in re.findall(r"\x1b\[[^\x1b]*", SIXEL):
        chat.app.post_message(TerminalAnswer(answer))
    await chat.ask_only("/attach cat.png")
    await chat.sees("cat.png")
    await chat.ask("What is it?")
    await chat.until(lambda: sixel_lines(chat) == 14, "a picture")


async def test_sixels_follow_the_screen(open_chat: Open, folder: Path) -> None:
    async with open_chat((100, 50)) as chat:
        await sent_sixels(chat)
        assert HALF * 10 in chat.text, "below the sixels, for what covers a part of them"
        await chat.pilot.press("f1")
        await chat.until(lambda: len(chat.app.screen_stack) == 2, "a dialog")
        assert sixel_lines(chat) == 0
        await chat.pilot.press("escape")
        await chat.until(lambda: sixel_lines(chat) == 14, "the picture again")
        chat.app.post_message(TerminalAnswer("\x1b[6;40;20t"))
        await chat.until(lambda: sixel_lines(chat) == 8, "a picture in larger cells")
        await chat.pilot.resize_terminal(18, 50)
        await chat.until(lambda: sixel_lines(chat) == 0, "half blocks where it has no room")


@pytest.mark.parametrize("covered", [Region(0, 0, 30, 50), Region(10, 0, 20, 50), Region(20, 0, 40, 50)])
async def test_sixels_are_drawn_again_where_something_no_longer_covers_a_part(
    open_chat: Open, folder: Path, monkeypatch: pytest.MonkeyPatch, covered: Region
) -> None:
    """When a tooltip closes, only the cells that it covered are drawn."""
    async with open_chat((100, 50)) as chat:
        await sent_sixels(chat)
        written: list[str] = []

        def display(_: Screen[object], update: object) -> None:  # without a terminal, Textual writes nothing
            if isinstance(update, CompositorUpdate):
                written.append(update.render_segments(chat.app.console))

        monkeypatch.setattr(chat.app, "_display", display)
        chat.transcript.refresh(covered)
        await chat.until(lambda: written, "the picture again")
        assert "".join(written).count("\x1bP0;1;0q") == 14
        assert HALF not in "".join(written)


def test_a_strip_keeps_its_drawing_where_all_of_it_is_seen() -> None:
    background = Style(bgcolor="blue")
    plain = Strip([Segment("  ab"), Segment("▀▀▀▀"), Segment("cd")], 10)
    strip = sixel.SixelStrip(plain, 4, 4, "SIXELS", background)
    console = Console(color_system="truecolor", force_terminal=True)
    assert strip.render(console) == "\x1b7  ab\x1b[44m    \x1b[0mcd\x1b8\x1b[4CSIXELS\x1b8\x1b[10C"
    assert strip != plain
    assert plain != strip
    shown = {
        cut: [piece.render(console) for piece in strip.divide(cut)] for cut in ((10,), (4, 10), (5, 10), (2, 8, 10))
    }
    has = {cut: ["SIXELS" in text for text in texts] for cut, texts in shown.items()}
    assert has == {(10,): [True], (4, 10): [False, True], (5, 10): [False, False], (2, 8, 10): [False, True, False]}
    assert "".join(shown[5, 10]) == "  ab▀▀▀▀cd"
    assert "SIXELS" in strip.crop(3, 9).render(console)
    assert "SIXELS" not in strip.crop(5).render(console)
    assert "SIXELS" in strip.adjust_cell_length(12).render(console)
