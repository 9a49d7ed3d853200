"""Pictures in the chat: attached, drawn, sent again exactly, and refused in one line where nobody would see them."""

from __future__ import annotations

import base64
import io
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from edgelm.base.errors import RequestError
from edgelm.base.workers import pictures
from edgelm.base.workers.pictures import MAX_STORED_BYTES, Picture
from edgelm.chats.attachments import Attachment
from edgelm.chats.clipboard import clipboard_picture
from edgelm.client.endpoint import ModelEntry
from edgelm.tui.prompt.room import require_sight
from edgelm.tui.transcript.picture_rows import half_blocks
from tests.base.workers.test_pictures import png
from tests.tui.conftest import Driver, Open
from tests.tui.fake_endpoint import ANSWER, FakeEndpoint
from tests.tui.test_files import has, paste

HALF = "▀"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    Image.new("RGB", (40, 30), "red").save(folder / "cat.png")
    monkeypatch.chdir(folder)
    return folder


def contents(chat: Driver) -> list[Any]:
    """Return the contents of the messages of the last chat request."""
    requests = [request for request in chat.endpoint.requests if request["messages"][-1]["role"] == "user"]
    return [message["content"] for message in requests[-1]["messages"] if message["role"] == "user"]


def url_of(content: Any) -> str:
    (url,) = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    return str(url)


async def test_a_picture_is_drawn_kept_and_sent_again_exactly(
    open_chat: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_chat() as chat:
        chat.endpoint.seeing = ["starter"]
        chat.endpoint.answers = ["It is red."]
        await chat.ready()
        await chat.type("@cat")
        await chat.sees("cat.png")
        await chat.press("enter")
        await has(chat, "cat.png")
        await chat.ask("What is it?")
        first = contents(chat)[0]
        assert url_of(first) == f"data:image/png;base64,{base64.b64encode((folder / 'cat.png').read_bytes()).decode()}"
        assert [part.get("text") for part in first] == [None, "What is it?"]
        await chat.sees("cat.png · picture", HALF * 10)
        await chat.ask("Which colour?")
        assert contents(chat) == [first, "Which colour?"]
        chat_id = chat.session.chat.id
    (folder / "cat.png").unlink()
    monkeypatch.setattr(pictures, "_kept", pictures._Kept())
    async with open_chat() as chat:
        await chat.ready()
        chat.screen.open_chat(chat_id)
        await chat.sees("cat.png · picture", HALF * 10)


async def test_dropped_pictures_are_attached(open_chat: Open, folder: Path) -> None:
    Image.new("RGB", (10, 10), "blue").save(folder / "two words.bmp")
    async with open_chat() as chat:
        chat.endpoint.seeing = ["starter"]
        await chat.ready()
        await paste(chat, f"{folder}/cat.png '{folder}/two words.bmp'")
        await has(chat, "cat.png", "two words.bmp")
        await chat.ask("Compare them.")
        urls = [part["image_url"]["url"][:15] for part in contents(chat)[0][:-1]]
        assert urls == ["data:image/png;", "data:image/png;"], "a BMP is stored as PNG"


async def test_a_large_picture_is_sent_small(open_chat: Open, folder: Path) -> None:
    pixels = random.Random(3).randbytes(3 * 2600 * 1800)
    Image.frombytes("RGB", (2600, 1800), pixels).save(folder / "large.jpg", quality=95)
    async with open_chat() as chat:
        chat.endpoint.seeing = ["starter"]
        await chat.ready()
        await chat.ask_only("/attach large.jpg")
        await has(chat, "large.jpg")
        await chat.ask("What is it?")
        data = base64.b64decode(url_of(contents(chat)[0]).partition(",")[2])
        assert len(data) <= MAX_STORED_BYTES
        assert Image.open(io.BytesIO(data)).format == "JPEG"


async def test_a_picture_that_nobody_sees_is_refused_and_an_earlier_one_left_out(open_chat: Open, folder: Path) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask_only("/attach cat.png")
        await chat.hears("starter reads no images: cat.png is not sent; edgelm pull gemma3:4b gets a model that does")
        chat.endpoint.seeing = ["qwen3-4b-q4_k_m.gguf"]
        await chat.ask_only("/attach cat.png")
        await chat.hears("cat.png is not sent; these do: qwen3-4b-q4_k_m.gguf")
        chat.endpoint.seeing = ["starter"]
        await chat.ask_only("/attach cat.png")
        await has(chat, "cat.png")
        await chat.ask("What is it?")
        await chat.ask("/model qwen3-4b-q4_k_m.gguf")
        await chat.until(lambda: chat.session.chat.model == "qwen3-4b-q4_k_m.gguf", "another model")
        await chat.ask("Go on")
        await chat.hears("left out for qwen3-4b-q4_k_m.gguf, which reads no images: cat.png")
        sent = ["*cat.png (a picture)*\n\nWhat is it?", ANSWER, "Go on"]
        assert [message["content"] for message in chat.endpoint.requests[-1]["messages"]] == sent
        chat.app.clear_notifications()
        await chat.ask("And on")
        assert not any("left out" in note.message for note in chat.app._notifications), "told once"
        chat.endpoint.other_names = ["/models/blind.gguf"]
        await chat.ask("/model /models/blind.gguf")
        await chat.until(lambda: chat.session.chat.model == "/models/blind.gguf", "a model that no list has")
        await chat.ask("And again")
        await chat.hears("left out for blind.gguf, which reads no images: cat.png")
        assert chat.endpoint.requests[-1]["messages"][0]["content"] == sent[0]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (png(60_000, 60_000), "odd.png has 60,000 x 60,000 pixels"),
        (png(1, 100_000), "odd.png has 1 x 100,000 pixels: one side is over 200 times"),
        (png(100, 100), "odd.png is damaged or cut off"),
        (b"\x89PNG\r\n\x1a\n", "odd.png is damaged"),
    ],
)
async def test_hostile_pictures_are_one_line(open_chat: Open, folder: Path, data: bytes, words: str) -> None:
    (folder / "odd.png").write_bytes(data)
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask_only("/attach odd.png")
        await chat.hears(words)
        assert not chat.screen.files.attachments


async def test_the_picture_on_the_clipboard_is_attached(
    open_chat: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = folder.parent / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    async with open_chat() as chat:
        chat.endpoint.seeing = ["starter"]
        await chat.ready()
        await chat.ask_only("/paste")
        await chat.hears("no program here reads the clipboard")
        program = programs / "wl-paste"
        program.write_text("#!/bin/sh\nexit 1\n")
        program.chmod(0o755)
        await chat.ask_only("/paste")
        await chat.hears("there is no picture on the clipboard")
        program.write_text(f"#!/bin/sh\nexec /bin/cat '{folder}/cat.png'\n")
        await chat.ask_only("/paste")
        await has(chat, "pasted picture 1")
        await chat.ask("What is it?")
        assert url_of(contents(chat)[0]).startswith("data:image/png;base64,")
        await chat.ask_only("/paste")
        await has(chat, "pasted picture 2")


def test_what_osascript_prints_is_a_picture(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (folder / "cat.png").read_bytes()
    program = folder / "osascript"
    program.write_text(f"#!/bin/sh\n/bin/cat <<E\n«data PNGf{data.hex().upper()}»\nE\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    assert clipboard_picture(1).data == data


def test_a_cell_is_two_pixels_high() -> None:
    rgb = bytes([255, 0, 0] * 4 + [0, 0, 255] * 4)
    (line,) = half_blocks(Picture(4, 2, rgb, ""), 48, 14)
    assert line.text.plain == HALF * 4
    style = line.text.spans[0].style
    assert str(style) == "#ff0000 on #0000ff"
    assert line.prefix == 4, "it is not copied"


@pytest.mark.parametrize(("width", "height"), [(1, 1), (600, 3), (3, 600), (64, 62), (1, 200)])
def test_every_shape_fits(width: int, height: int) -> None:
    lines = half_blocks(Picture(width, height, bytes(3 * width * height), ""), 48, 14)
    assert 1 <= len(lines) <= 14
    assert {len(line.text) for line in lines} == {len(lines[0].text)}
    assert 1 <= len(lines[0].text) <= 48


async def test_the_tokens_of_a_picture_are_counted(open_chat: Open, folder: Path) -> None:
    async with open_chat() as chat:
        chat.endpoint.seeing = ["starter"]
        await chat.ready()
        await chat.ask("/attach cat.png")
        await chat.sees("cat.png picture, ", ", 256 tokens", "3,840 of 4,096 left")


async def test_the_tokens_of_a_picture_are_estimated_elsewhere(
    open_chat: Open, folder: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.is_edgelm = False
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("/attach cat.png")
        await chat.sees("cat.png picture, ", ", ~300 tokens")


async def test_a_model_that_no_list_has_is_not_said_to_be_blind() -> None:
    """A chat of earlier keeps the path of its model: that the file is gone is another answer than that it is blind."""

    class Server:
        is_edgelm = True

        async def described(self, model: str) -> ModelEntry | None:
            return ModelEntry(model) if model == "/models/blind.gguf" else None

    class Listing:
        async def client(self) -> Server:
            return Server()

        async def models(self, *, again: bool = False) -> list[ModelEntry]:
            return [ModelEntry("starter", pictures=False)]

    cat = Attachment(kind="image", name="cat.png", data=b"1")
    link: Any = Listing()
    await require_sight(link, "/models/gone.gguf", [cat])
    for model in ("starter", "/models/blind.gguf"):
        with pytest.raises(RequestError, match=rf"{Path(model).name} reads no images: cat\.png"):
            await require_sight(link, model, [cat])
