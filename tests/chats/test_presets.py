"""Presets in config.toml: their form, what they change in a chat, and that only the user's own file has them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from edgelm.base.config import load_config
from edgelm.base.errors import EdgeLMError, UsageError
from edgelm.chats.history import Chat
from edgelm.chats.preset_file import save_preset, set_folder
from edgelm.chats.presets import Preset, Presets, apply_preset, preset_of
from edgelm.commands.presets import read_presets, start_preset

FILE = """\
# my own
temperature = 0.5

[presets.terse]  # short answers
system = "Be brief."
temperature = 0.2
reasoning_effort = "off"

[presets."code review"]
model = "qwen3:4b"
tools = ["files"]
seed = 7

[tools.files]
command = "server"

[folders]
"{folder}" = "terse"
"""


def written(folder: Path, text: str) -> dict[str, str]:
    """Write a config.toml; return the environment that has it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(text)
    return {"EDGELM_CONFIG_DIR": str(folder)}


def read(folder: Path, text: str) -> Presets:
    return read_presets(load_config({}, written(folder, text)))


def test_presets_and_folders(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "deep" / "er").mkdir(parents=True)
    (tmp_path / "link").symlink_to(work / "deep")
    presets = read(tmp_path / "own", FILE.format(folder=work))
    assert presets.find("terse").sampling == {"temperature": 0.2, "reasoning_effort": "none"}
    assert presets.find("code review") == Preset("code review", None, "qwen3:4b", {"seed": 7}, ("files",))
    for folder in (work, work / "deep" / "er", tmp_path / "link"):
        assert presets.of_folder(folder) == presets.find("terse")
    assert presets.of_folder(tmp_path) is None
    with pytest.raises(UsageError, match="there is no preset x; the presets are terse, code review"):
        presets.find("x")


def test_the_nearest_folder_wins(tmp_path: Path) -> None:
    text = f'[presets.a]\n[presets.b]\n[folders]\n"/" = "a"\n"{tmp_path}/x" = "b"\n"~" = "b"\n'
    presets = read(tmp_path, text)
    assert presets.of_folder(tmp_path / "x" / "y") == presets.find("b")
    assert presets.of_folder(Path("/")) == presets.find("a")
    assert presets.of_folder(Path.home()) == presets.find("b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("presets = 3", ["presets is no table"]),
        ("[presets]\nx = 3", ["presets.x is no table"]),
        ("[presets.x]\nheat = 1", ['[presets."x"]', "heat sets nothing", "a preset has system, model"]),
        ("[presets.x]\ntemperature = 101", ["temperature is 101", "0 to 100"]),
        ("[presets.x]\nsystem = 1", ["system is 1", "give a text"]),
        ("[presets.x]\nmodel = []", ["model is []"]),
        ("[presets.x]\ntools = 'a'", ["tools is 'a'", "a list of names"]),
        ("[presets.x]\ntools = ['a']", ["there is no server of tools a"]),
        ("[presets.x]\ntools = ['a']\n[tools.b]", ["there is no server of tools a", "the servers are b"]),
        ('[presets."off"]', ["'off' cannot be the name of a preset"]),
        ('[presets."a\\u001b"]', ["cannot be the name"]),
        ("folders = 1", ["folders is no table"]),
        ('[folders]\n"rel/ative" = "x"', ["rel/ative is no absolute path"]),
        ('[folders]\n"/a" = "x"', ["/a has the preset 'x', which does not exist"]),
        ('[presets.y]\n[folders]\n"/a" = ["x"]', ["which does not exist", "the presets are y"]),
    ],
)
def test_errors_name_the_file_and_the_key(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert "\n" not in message
    for word in [*words, str(tmp_path / "config.toml")]:
        assert word in message


def test_nothing_in_a_checkout_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository that somebody else wrote must not choose tools, endpoints or commands."""
    checkout = tmp_path / "checkout"
    planted = FILE.format(folder=checkout) + '\n[keys]\nhelp = "f12"\n[themes.x]\nprimary = "red"\n'
    (checkout / ".edgelm").mkdir(parents=True)
    names = ["config.toml", "edgelm.toml", ".edgelm.toml", ".edgelm/config.toml", "edgelm/config.toml"]
    (checkout / "edgelm").mkdir()
    for name in names:
        (checkout / name).write_text(planted)
    (checkout / ".env").write_text(f"EDGELM_CONFIG_DIR={checkout}\nEDGELM_TEMPERATURE=0.1\nEDGELM_API_KEY=x\n")
    (checkout / "pyproject.toml").write_text("[tool.edgelm]\ntemperature = 0.1\n[tool.edgelm.tools.x]\ncommand = 'x'\n")
    monkeypatch.chdir(checkout)
    environment = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    for name in ("EDGELM_CONFIG_DIR", "EDGELM_TEMPERATURE", "EDGELM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    config = load_config({}, environment)
    assert config.tables == {}
    assert set(config.sources.values()) == {"default"}
    presets = read_presets(config)
    assert presets.by_name == {}
    assert start_preset(presets, None, config) is None
    assert checkout not in presets.file.parents
    # The same text in the user's own file is read.
    own = load_config({}, environment | written(tmp_path / "own", planted))
    assert start_preset(read_presets(own), None, own) == read_presets(own).find("terse")


def test_flags_and_variables_beat_a_preset(tmp_path: Path) -> None:
    environment = written(tmp_path, FILE.format(folder="/"))
    config = load_config({}, environment)
    assert start_preset(read_presets(config), "terse", config) == read_presets(config).find("terse")
    for flags, more in (({"temperature": 1.0}, {}), ({}, {"EDGELM_TEMPERATURE": "1"})):
        config = load_config(flags, environment | more)
        start = start_preset(read_presets(config), "terse", config)
        assert start is not None
        assert start.sampling == {"reasoning_effort": "none"}


def test_what_a_preset_changes() -> None:
    terse = Preset("terse", "Be brief.", "", {"temperature": 0.2, "seed": 1})
    tools = Preset("tools", None, "qwen3", {"temperature": 0.9}, ("files",))
    chat = Chat(model="starter", sampling={"top_k": 5})
    apply_preset(chat, terse)
    assert (chat.preset, chat.system, chat.model) == ("terse", "Be brief.", "starter")
    assert chat.sampling == {"top_k": 5, "temperature": 0.2, "seed": 1}
    chat.sampling = {**chat.sampling, "seed": 2}
    apply_preset(chat, tools, terse)
    assert (chat.preset, chat.system, chat.model, chat.tools) == ("tools", "", "qwen3", ("files",))
    assert chat.sampling == {"top_k": 5, "temperature": 0.9, "seed": 2}, "what the user has changed stays"
    chat.system = "My own."
    apply_preset(chat, None, tools)
    assert (chat.preset, chat.system, chat.model, chat.tools) == ("", "My own.", "", ())
    assert chat.sampling == {"top_k": 5, "seed": 2}


def test_saving_keeps_the_rest_of_the_file(tmp_path: Path) -> None:
    text = FILE.format(folder=tmp_path / "w")
    presets = read(tmp_path, text)
    (tmp_path / "config.toml").chmod(0o640)
    system = 'Say """no""" to \\ and\ttabs.\nSecond line: "é" \x01'
    chat = Chat(system=system, sampling={"top_k": 3, "reasoning_effort": "none"}, tools=("files",))
    for name in ("terse", 'a "new" one.x'):
        save_preset(presets, preset_of(chat, name, "qwen3"))
    after = (tmp_path / "config.toml").read_text()
    for line in ("# my own", "temperature = 0.5", 'command = "server"', "seed = 7"):
        assert line in after
    again = read_presets(load_config({}, {"EDGELM_CONFIG_DIR": str(tmp_path)}))
    assert again.by_name == presets.by_name
    assert again.find("terse") == Preset("terse", system, "qwen3", {"top_k": 3, "reasoning_effort": "none"}, ("files",))
    assert (tmp_path / "config.toml").stat().st_mode & 0o777 == 0o640


def test_nothing_is_saved_that_could_not_be_read_again(tmp_path: Path) -> None:
    text = FILE.format(folder=tmp_path / "w")
    presets = read(tmp_path, text)
    for sampling in ({"temperature": "x"}, {"foo\n[tools.x]": 1}):
        with pytest.raises(UsageError):
            save_preset(presets, preset_of(Chat(sampling=sampling), "imported", ""))
    assert (tmp_path / "config.toml").read_text() == text
    save_preset(presets, preset_of(Chat(tools=("files", "gone")), "kept", ""))
    assert presets.find("kept").tools == ("files",), "one that is not configured any more is left out"
    assert read(tmp_path, (tmp_path / "config.toml").read_text()).find("kept").tools == ("files",)


def test_a_first_preset_makes_a_private_file(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    presets = Presets(folder / "config.toml")
    save_preset(presets, preset_of(Chat(), "empty", ""))
    set_folder(presets, tmp_path, "empty")
    assert tomllib.loads((folder / "config.toml").read_text()) == {
        "presets": {"empty": {}},
        "folders": {str(tmp_path.resolve()): "empty"},
    }
    assert (folder / "config.toml").stat().st_mode & 0o777 == 0o600
    assert presets.of_folder(tmp_path / "x") == presets.find("empty")
    set_folder(presets, tmp_path, "")
    assert tomllib.loads((folder / "config.toml").read_text()) == {"presets": {"empty": {}}}
    assert presets.of_folder(tmp_path) is None


def test_a_file_that_cannot_be_changed_is_left_as_it_is(tmp_path: Path) -> None:
    presets = read(tmp_path, "")
    for text in ("[presets", "presets = 3"):
        (tmp_path / "config.toml").write_text(text)
        with pytest.raises(EdgeLMError, match=r"config\.toml"):
            save_preset(presets, Preset("x", "y"))
        assert (tmp_path / "config.toml").read_text() == text
    assert "x" not in presets.by_name
