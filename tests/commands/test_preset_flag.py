"""`--preset` on the command line, and what `edgelm config` says of the user's own tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgelm.base.errors import ModelError, UsageError
from edgelm.commands import chat
from edgelm.commands.cli import app
from edgelm.tui.workspace import ChatDefaults
from tests.commands.test_run import Edgelm
from tests.tiny import write_tiny

CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
FILE = """\
[presets.short]
system = "Answer in one sentence, and without any list or table."
max_tokens = 3
reasoning_effort = "off"
repetition_penalty = 1.1
[folders]
"/" = "short"
[keys]
help = "f12"
[themes.sea]
primary = "teal"
"""


@pytest.fixture
def edgelm(server_environment: dict[str, str], tmp_path: Path) -> Edgelm:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.toml").write_text(FILE)
    return Edgelm(server_environment | {"EDGELM_CONFIG_DIR": str(tmp_path / "own")})


def test_run_takes_the_values_of_a_preset(edgelm: Edgelm, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "chat.gguf", chat_template=CHAT)

    def usage(*flags: str) -> tuple[int, int]:
        done = edgelm("run", model, "hello", "--json", "--temperature", "0", *flags)
        assert done.returncode == 0, done.stderr
        note = b"note: these values of the preset are for the chat only: repetition_penalty\n"
        assert (note in done.stderr) is ("--preset" in flags)
        counts = json.loads(done.stdout)["usage"]
        return counts["prompt_tokens"], counts["completion_tokens"]

    plain = usage("--max-tokens", "5")
    preset = usage("--preset", "short")
    assert preset[0] > plain[0] + 5, "the system prompt is sent; without --preset no folder has an effect"
    assert preset[1] == 3
    assert usage("--preset", "short", "--max-tokens", "2") == (preset[0], 2), "a flag beats the preset"
    assert edgelm("run", model, "hello", "--preset", "short", "--save").returncode == 0
    chat = json.loads(edgelm("chats", "show", "last", "--json").stdout)
    assert (chat["preset"], chat["system"]) == ("short", "Answer in one sentence, and without any list or table."), (
        "a saved chat goes on with its preset"
    )
    assert chat["sampling"]["max_tokens"] == 3


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("--plain", "--preset", "long"), "there is no preset long; the presets are short"),
        (("run", "starter", "hi", "--preset", "long"), "there is no preset long; the presets are short"),
        (("run", "starter", "hi", "--preset", "short", "--raw"), "--raw and the system prompt of a preset cannot"),
    ],
)
def test_wrong_presets(edgelm: Edgelm, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], words: str) -> None:
    monkeypatch.setenv("EDGELM_CONFIG_DIR", edgelm.environment["EDGELM_CONFIG_DIR"])
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert words in str(caught.value)


def test_config_shows_the_tables(edgelm: Edgelm, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(edgelm.environment["EDGELM_CONFIG_DIR"])
    monkeypatch.setenv("EDGELM_CONFIG_DIR", str(folder))
    shown = CliRunner().invoke(app, ["config"]).stdout
    for line in ('[presets."short"] max_tokens = 3', "[folders] / = short", '[keys] help = "f12"', "[themes] sea = "):
        assert line in shown
    document = json.loads(CliRunner().invoke(app, ["config", "--json"]).stdout)
    assert document["presets"]["short"]["max_tokens"] == "3"
    assert (document["folders"], document["keys"]) == ({"/": "short"}, {"help": "f12"})
    for text, words in (('[keys]\nhelp = "x"', "help is 'x'"), ("themes = 3", "themes is no table")):
        (folder / "config.toml").write_text(text)
        with pytest.raises(UsageError, match=words):
            CliRunner().invoke(app, ["config"], catch_exceptions=False)


def test_how_a_chat_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny(tmp_path / "m.gguf")
    text = f"""
[presets.gone]
model = "not-here.gguf"
system = "Hm."
[presets.tiny]
model = "{model}"
temperature = 0.2
[folders]
"{tmp_path / "work"}" = "gone"
"{tmp_path}" = "tiny"
"""
    (tmp_path / "config.toml").write_text(text)
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("EDGELM_CONFIG_DIR", str(tmp_path))
    monkeypatch.delenv("EDGELM_TEMPERATURE", raising=False)
    seen: list[ChatDefaults] = []
    monkeypatch.setattr(chat, "_run_plain", lambda places, link, defaults: seen.append(defaults) or 0)

    def begin(model: str | None = None, preset: str | None = None, endpoint: str | None = None) -> ChatDefaults:
        chat.open_chat(endpoint, model, {}, preset=preset, plain=True)
        return seen[-1]

    def preset_of(defaults: ChatDefaults) -> tuple[str, str, dict[str, object]]:
        assert defaults.preset is not None
        return defaults.preset.name, defaults.preset.model, dict(defaults.preset.sampling)

    monkeypatch.chdir("/")
    assert begin().preset is None
    monkeypatch.chdir(tmp_path)
    assert preset_of(begin()) == ("tiny", str(model), {"temperature": 0.2})
    assert begin().model == str(model)
    begun = begin(model="starter")
    assert (begun.model, preset_of(begun)) == ("starter", ("tiny", "", {"temperature": 0.2})), "a flag beats the preset"
    assert preset_of(begin(endpoint="http://127.0.0.1:1"))[1] == str(model)
    with pytest.raises(ModelError, match="the model of the preset gone: "):
        begin(preset="gone")
    monkeypatch.chdir(tmp_path / "work")
    begun = begin()
    assert (begun.model, preset_of(begun)) == ("", ("gone", "", {})), "the chat begins without the model"
    assert "the model of the preset gone: " in begun.note
    monkeypatch.setenv("EDGELM_TEMPERATURE", "1")
    assert preset_of(begin(preset="tiny")) == ("tiny", str(model), {}), "so does a variable"
