"""--config edits a user's file in place, with backups; --restore puts it back."""

from __future__ import annotations

import errno
import json
import tomllib
from pathlib import Path

import pytest

from edgelm.base.atomic import atomic_write
from edgelm.base.errors import EdgeLMError
from edgelm.commands.launch.agents import AGENTS, Agent, find_agent
from edgelm.commands.launch.files import BACKUPS, apply, restore
from edgelm.commands.launch.setups import KEY, Target
from edgelm.commands.launch.user_files import UserFile, user_config

OWN = {
    "json": '{\n  "mine": {"deep": [1, 2]},\n  "env": {"MY": "1"}\n}\n',
    "toml": '# my comment\nmine = 1  # kept\n\n[model_providers.other]\nname = "other"\n',
    "yaml": "# my comment\nmine: 1  # kept\nmodels:\n  - name: other  # mine too\n",
    "list": "# my comment\n- model_id: other  # mine too\n",
}


def files_of(agent: Agent, tmp_path: Path, model: str = "m") -> tuple[UserFile, ...]:
    return user_config(agent, Target("http://127.0.0.1:1", model, 32_768, tmp_path), {}).files


@pytest.fixture(params=AGENTS, ids=lambda agent: agent.name)
def files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[UserFile, ...]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    return files_of(request.param, tmp_path)


def own_text(file: UserFile) -> str:
    return OWN["list" if file.empty is list else file.format]


def test_what_is_not_ours_stays(files: tuple[UserFile, ...], tmp_path: Path) -> None:
    for file in files:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        file.path.write_text(own_text(file))
    assert apply(files, tmp_path / "backups") == [file.path for file in files]
    for file in files:
        after = file.path.read_text()
        if file.format == "json":
            document = json.loads(after)
            assert document["mine"] == {"deep": [1, 2]}
            assert document["env"]["MY"] == "1"
        else:
            lines = [line for line in own_text(file).splitlines() if line]
            assert [line for line in lines if line not in after] == []
    assert apply(files, tmp_path / "backups") == []  # it is there already
    assert restore(tmp_path / "backups") == [file.path for file in files]
    assert [file.path.read_text() for file in files] == [own_text(file) for file in files]
    assert restore(tmp_path / "backups") == []


def test_a_file_that_was_not_there_is_removed_again(files: tuple[UserFile, ...], tmp_path: Path) -> None:
    apply(files, tmp_path / "backups")
    assert {file.path.stat().st_mode & 0o777 for file in files} == {0o600}
    restore(tmp_path / "backups")
    assert not any(file.path.exists() for file in files)


def test_no_key_is_written(files: tuple[UserFile, ...], tmp_path: Path) -> None:
    apply(files, tmp_path / "backups")
    for file in files:
        text = file.path.read_text()
        assert "AUTH_TOKEN" not in text
        assert "apiKey" not in text or KEY in text


def test_five_backups_are_kept_and_go_back_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    agent, backups = find_agent("codex"), tmp_path / "backups"

    def texts() -> list[str | None]:
        return [file.path.read_text() if file.path.exists() else None for file in files_of(agent, tmp_path)]

    before = []
    for number in range(BACKUPS + 3):
        before.append(texts())
        assert apply(files_of(agent, tmp_path, f"model-{number}"), backups)
    for expected in reversed(before[-BACKUPS:]):
        newest = texts()
        assert restore(backups)
        assert texts() == expected
        assert list(json.loads((backups / "replaced").read_text()).values()) == newest
    assert not restore(backups)


def test_a_link_stays_a_link_and_the_mode_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    [file] = files_of(find_agent("claude"), tmp_path)
    (dotfiles := tmp_path / "dotfiles").mkdir()
    (real := dotfiles / "settings.json").write_text("{}")
    real.chmod(0o640)
    file.path.parent.mkdir()
    file.path.symlink_to(real)
    apply([file], tmp_path / "backups")
    assert file.path.is_symlink()
    assert "ANTHROPIC_MODEL" in real.read_text()
    assert real.stat().st_mode & 0o777 == 0o640


def test_no_file_is_written_if_one_cannot_be_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    files = files_of(find_agent("codex"), tmp_path)
    files[1].path.parent.mkdir()
    files[1].path.write_text("a = = 1")
    with pytest.raises(EdgeLMError, match="nothing was changed"):
        apply(files, tmp_path / "backups")
    assert [file.path.exists() for file in files] == [False, True, False]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("opencode", '{\n  // mine\n  "a": 1\n}', "comments, which would be lost"),
        ("claude", "[1]", "of another kind"),
        ("claude", '{"env": 3}', "of another kind"),
        ("codex", "a = = 1", "cannot be edited"),
        ("continue", "a: [1", "cannot be edited"),
        ("llm", "a: 1", "of another kind"),
    ],
)
def test_a_file_that_is_not_understood_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, says: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    file = files_of(find_agent(name), tmp_path)[0]
    file.path.parent.mkdir(parents=True, exist_ok=True)
    file.path.write_text(text)
    with pytest.raises(EdgeLMError, match=says):
        apply([file], tmp_path / "backups")
    assert file.path.read_text() == text


def test_other_models_of_a_list_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for model in ("a", "b", "a"):
        [file] = files_of(find_agent("continue"), tmp_path, model)
        apply([file], tmp_path / "backups")
    assert file.path.read_text().count("apiBase") == 2


def test_the_profile_of_codex_is_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    provider, profile, models = files_of(find_agent("codex"), tmp_path)
    apply((provider, profile, models), tmp_path / "backups")
    assert tomllib.loads(provider.path.read_text())["model_providers"]["edgelm"]["env_key"] == KEY
    values = tomllib.loads(profile.path.read_text())
    assert (values["model"], values["model_catalog_json"]) == ("m", str(models.path))
    assert json.loads(models.path.read_text())["models"][0]["slug"] == "m"


@pytest.mark.parametrize(
    ("name", "own"), [("claude", '{"mine": 1}'), ("codex", "# mine\na = 1"), ("aider", "# mine\na: 1")]
)
def test_line_ends_of_windows_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, own: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = files_of(find_agent(name), tmp_path)[0]
    file.path.parent.mkdir(exist_ok=True)
    before = own.replace("\n", "\r\n").encode() + b"\r\n"
    file.path.write_bytes(before)
    apply([file], tmp_path / "backups")
    after = file.path.read_bytes()
    assert after.count(b"\n") == after.count(b"\r\n") > before.count(b"\n")
    assert apply([file], tmp_path / "backups") == []
    restore(tmp_path / "backups")
    assert file.path.read_bytes() == before


@pytest.mark.parametrize("name", ["aider", "continue", "llm"])
def test_a_file_of_comments_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """So is the sample that aider's documentation offers: every setting is commented out."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    [file] = files_of(find_agent(name), tmp_path)
    file.path.parent.mkdir(parents=True, exist_ok=True)
    file.path.write_text("# the sample\n\n#model: x\n  # more")
    apply([file], tmp_path / "backups")
    assert file.path.read_text().startswith("# the sample\n\n#model: x\n  # more\n")
    assert "http://127.0.0.1:1/v1" in file.path.read_text()
    assert apply([file], tmp_path / "backups") == []


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"a": ' * 3000 + "1" + "}" * 3000], ids=["surrogate", "deep"])
def test_odd_json_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    [file] = files_of(find_agent("claude"), tmp_path)
    file.path.parent.mkdir()
    file.path.write_text(text)
    with pytest.raises(EdgeLMError, match="nothing was changed"):
        apply([file], tmp_path / "backups")
    assert file.path.read_text() == text


def test_yaml_that_begins_as_a_file_of_ours_is_not_indented_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    [file] = files_of(find_agent("continue"), tmp_path)
    file.path.parent.mkdir()
    file.path.write_text("a: 1\n")
    apply([file], tmp_path / "backups")
    assert apply([file], tmp_path / "backups") == []


def test_a_write_that_fails_puts_the_others_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    files, backups = files_of(find_agent("codex"), tmp_path), tmp_path / "backups"
    files[0].path.parent.mkdir()
    files[0].path.write_text("mine = 1\n")
    full = files[-1].path

    def write(path: Path, *parts: bytes, mode: int = 0o600) -> None:
        if path == full:
            raise OSError(errno.ENOSPC, "No space left on device")
        atomic_write(path, *parts, mode=mode)

    with monkeypatch.context() as patch:
        patch.setattr("edgelm.commands.launch.files.atomic_write", write)
        with pytest.raises(EdgeLMError, match="No space left on device; nothing was changed"):
            apply(files, backups)
    assert files[0].path.read_text() == "mine = 1\n"
    assert not any(file.path.exists() for file in files[1:])
    assert restore(backups) == []  # nothing was changed, so there is nothing to put back


def test_a_link_to_nothing_is_one_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    [file] = files_of(find_agent("claude"), tmp_path)
    file.path.parent.mkdir()
    file.path.symlink_to(tmp_path / "dotfiles.json")
    apply([file], tmp_path / "backups")
    assert "ANTHROPIC_MODEL" in (tmp_path / "dotfiles.json").read_text()
    restore(tmp_path / "backups")
    assert file.path.is_symlink()
    assert not file.path.exists()
