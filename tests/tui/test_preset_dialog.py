"""Presets in the chat, on the full screen and in plain lines, and `edgelm --preset`."""

from __future__ import annotations

import asyncio
import io
import tomllib
from pathlib import Path

import pytest

from edgelm.chats.presets import Preset, Presets
from edgelm.client.link import Link
from edgelm.tui.dialogs.basic import ConfirmScreen, LineScreen
from edgelm.tui.dialogs.params import PARAMS
from edgelm.tui.dialogs.presets import PresetScreen
from edgelm.tui.plain.chat import PlainChat
from edgelm.tui.plain.lines import LineReader, Writer
from edgelm.tui.workspace import ChatDefaults
from tests.tui.conftest import Open
from tests.tui.fake_endpoint import FakeEndpoint

TERSE = Preset("terse", "Be brief.", "", {"temperature": 0.2})
QWEN = Preset("code review", None, "qwen3", {"seed": 7})
GONE = Preset("gone", "Hm.", "llama9", {})


@pytest.fixture
def presets(tmp_path: Path) -> Presets:
    by_name = {preset.name: preset for preset in (TERSE, QWEN, GONE)}
    return Presets(tmp_path / "own" / "config.toml", by_name, parsers={param.name: param.parse for param in PARAMS})


async def test_choosing_a_preset(open_chat: Open, presets: Presets, endpoint: FakeEndpoint) -> None:
    async with open_chat(defaults=ChatDefaults(presets=presets)) as chat:
        await chat.ready()
        chat.prompt.put("/preset")
        await chat.press("enter")
        await chat.until(lambda: isinstance(chat.app.screen, PresetScreen), "the dialog")
        await chat.sees("system prompt  Be brief.", "temperature  0.2")
        await chat.press("down")
        await chat.sees("model  qwen3", "seed  7")
        await chat.press("enter")
        await chat.sees("preset code review", "qwen3-4b-q4_k_m.gguf · ready")
        await chat.ask("Hello")
        assert endpoint.requests[-1]["model"] == "qwen3-4b-q4_k_m.gguf"
        assert endpoint.requests[-1]["seed"] == 7
        await chat.ask("/preset terse")
        await chat.ask("Again")
        request = endpoint.requests[-1]
        assert request["messages"][0] == {"role": "system", "content": "Be brief."}
        assert (request["temperature"], request.get("seed"), request["model"]) == (0.2, None, "starter")
        await chat.press("ctrl+n")
        await chat.until(lambda: chat.turns == [], "a new chat")
        assert (chat.session.chat.preset, chat.session.chat.system) == ("terse", "Be brief.")
        await chat.ask("/preset off")
        await chat.until(lambda: not chat.session.chat.preset, "none")
        assert (chat.session.chat.system, chat.session.chat.sampling) == ("", {})
        await chat.ask("/preset nothing")
        await chat.hears("there is no preset nothing", "terse, code review, gone")
        await chat.ask("/preset gone")
        await chat.hears("llama9")
        assert chat.session.chat.system == "Hm.", "the rest of it is used"
        assert chat.screen.workspace.model == "starter"


async def test_saving_a_preset(open_chat: Open, presets: Presets) -> None:
    async with open_chat(defaults=ChatDefaults(presets=presets)) as chat:
        await chat.ready()
        await chat.ask("/system Say it in rhymes.")
        await chat.ask("/params top_k=5")
        await chat.ask("/preset save rhymes")
        await chat.hears("preset rhymes: model starter, top_k 5, system prompt")
        saved = tomllib.loads(presets.file.read_text())["presets"]["rhymes"]
        assert saved == {"model": "starter", "system": "Say it in rhymes.", "top_k": 5}
        await chat.ask("/system")
        await chat.press("escape")
        await chat.ask("/params top_k=9")
        for answer, top_k in (("n", 5), ("y", 9)):
            await chat.ask_only("/preset save")
            await chat.until(lambda: isinstance(chat.app.screen, LineScreen), "the name")
            await chat.press("enter")
            await chat.until(lambda: isinstance(chat.app.screen, ConfirmScreen), "the question")
            await chat.press(answer)
            await chat.until(lambda: len(chat.app.screen_stack) == 1, "closed")
            await chat.until(
                lambda top_k=top_k: tomllib.loads(presets.file.read_text())["presets"]["rhymes"]["top_k"] == top_k,
                "the file",
            )
        await chat.ask("/preset save off")
        await chat.hears("'off' cannot be the name of a preset")


async def test_the_default_of_a_folder(
    open_chat: Open, presets: Presets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with open_chat(defaults=ChatDefaults(presets=presets)) as chat:
        await chat.ready()
        await chat.ask("/preset folder terse")
        await chat.hears("begin with the preset terse")
        assert chat.session.chat.preset == "", "the open chat stays as it is"
        await chat.press("ctrl+n")
        await chat.until(lambda: chat.session.chat.preset == "terse", "the default")
        chat.prompt.put("/preset folder")
        await chat.press("enter")
        await chat.until(lambda: isinstance(chat.app.screen, PresetScreen), "the dialog")
        await chat.press("up", "enter")  # off is the last line
        await chat.hears("have no preset")
        assert presets.folders == {}
        await chat.ask("/preset folder nothing")
        await chat.hears("there is no preset nothing")


async def test_new_chats_begin_with_the_preset_of_the_flag(open_chat: Open, presets: Presets) -> None:
    defaults = ChatDefaults(presets=presets, preset=TERSE, is_preset_given=True, note="something is missing")
    async with open_chat(defaults=defaults) as chat:
        await chat.ready()
        await chat.hears("something is missing")
        await chat.sees("preset terse")
        assert chat.session.chat.sampling == {"temperature": 0.2}
        await chat.ask("/preset code review")
        await chat.press("ctrl+n")
        await chat.until(lambda: chat.session.chat.preset == "terse", "the flag's preset")
        assert "seed" not in chat.session.chat.sampling


async def test_without_presets(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("/preset")
        await chat.hears("there are no presets yet", "/preset save NAME makes one of this chat")


async def test_presets_in_plain_lines(
    endpoint: FakeEndpoint, presets: Presets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = (
        "/preset", "/preset terse", "Hello", "/preset save mine", "/preset save mine", "y", "/preset folder mine",
        "/preset folder", "/new", "/preset folder off", "/preset off", "/preset nothing", "/editor",
    )  # fmt: skip
    output = io.StringIO()
    writer = Writer(output)
    lines = LineReader(io.StringIO("".join(f"{line}\n" for line in typed)), writer, edits=False)
    link = Link(endpoint=endpoint.address, api_key=None, runtime=tmp_path / "run", log=tmp_path / "serve.log")
    defaults = ChatDefaults(presets=presets, note="a note at the start")
    chat = PlainChat(tmp_path / "chats.db", link, defaults, lines, writer, knowledge=tmp_path / "knowledge.db")
    await asyncio.to_thread(chat.run)
    assert endpoint.requests[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    told = output.getvalue()
    for line in (
        "a note at the start",
        "terse: temperature 0.2, system prompt",
        "preset terse: temperature 0.2, system prompt",
        "preset mine: model starter, temperature 0.2, system prompt",
        f"new chats in {tmp_path} begin with the preset mine",
        "new chats here begin with the preset mine",
        f"new chats in {tmp_path} have no preset",
        "no preset",
        "error: there is no preset nothing; the presets are terse, code review, gone, mine",
        "error: an editor needs a terminal; write the message here",
    ):
        assert f"{line}\n" in told
    assert set(tomllib.loads(presets.file.read_text())["presets"]) == {"mine"}
