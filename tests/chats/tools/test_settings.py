"""The tables of servers of tools: their checks, and what a consent is bound to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgelm.base.config import load_config
from edgelm.base.errors import UsageError
from edgelm.chats.tools.consents import Consents, has_changed
from edgelm.chats.tools.listing import make_listing
from edgelm.chats.tools.settings import ToolServer, parse_servers
from edgelm.chats.tools.toolbox import make_toolbox


def test_servers_of_the_users_own_file(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        '[tools.git]\ncommand = "mcp-server-git"\nargs = ["--repository", "."]\nenv = { A = "1" }\ntimeout = 5\n'
        '[tools."a-b"]\nurl = "https://a.example/mcp"\nheaders = { Authorization = "Bearer x" }\n'
        '[tools.off]\ncommand = "x"\nenabled = false\n'
    )
    config = load_config({}, {"EDGELM_CONFIG_DIR": str(tmp_path), "EDGELM_DATA_DIR": str(tmp_path)})
    toolbox = make_toolbox(config.tables["tools"], config.places)
    assert list(toolbox.servers) == ["git", "a-b"]
    assert toolbox.servers["git"] == ToolServer(
        name="git", command="mcp-server-git", args=("--repository", "."), env={"A": "1"}, timeout_s=5.0
    )
    assert toolbox.servers["a-b"].headers == {"Authorization": "Bearer x"}


def test_the_folder_of_a_server_is_as_written_but_for_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for written, folder in (("", ""), (".", "."), ("docs", "docs"), ("/srv", "/srv"), ("~/notes", "/home/me/notes")):
        assert parse_servers({"a": {"command": "x", "cwd": written}}, "config.toml")["a"].cwd == folder


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (3, "tools is no table"),
        ({"a b": {"command": "x"}}, "'a b' is no name for a server of tools"),
        ({"a": "x"}, '[tools."a"] is no table'),
        ({"a": {}}, "needs a command or a url"),
        ({"a": {"command": "x", "url": "http://x"}}, "needs a command or a url"),
        ({"a": {"command": "x", "comand": 1}}, "has no key comand"),
        ({"a": {"command": "x", "headers": {}}}, "headers is for a server with a url"),
        ({"a": {"url": "http://x", "env": {}}}, "env is for a server with a command"),
        ({"a": {"url": "file:///etc"}}, "url is 'file:///etc'"),
        ({"a": {"command": ["x"]}}, "command is ['x']"),
        ({"a": {"command": "x", "args": [1]}}, "args is [1]"),
        ({"a": {"command": "x", "env": {"A": 1}}}, "env has a wrong 'A'"),
        ({"a": {"url": "http://x", "headers": {"A": "b\r\nC: d"}}}, "headers has a wrong 'A'"),
        ({"a": {"command": "x", "cwd": 3}}, "give a folder"),
        ({"a": {"command": "x", "timeout": 0}}, "timeout is 0"),
        ({"a": {"command": "x", "enabled": "no"}}, "enabled is 'no'"),
    ],
)
def test_tables_that_do_not_fit(tables: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_servers(tables, "config.toml")
    assert str(caught.value).startswith("config.toml: ")
    assert words in str(caught.value)


def mark(description: str = "Say it", schema: object = None, **values: Any) -> str:
    server = ToolServer(**{"name": "git", "command": "git-server", "env": {"A": "1"}, **values})
    tool = SimpleNamespace(name="log", description=description, input_schema=schema or {}, annotations=None)
    return make_listing(server, [tool]).tools[0].mark


def test_a_consent_is_bound_to_the_command_the_description_and_the_schema(tmp_path: Path) -> None:
    consents = Consents(tmp_path / "consents.json")
    assert consents.marks() == ()
    consents.allow(mark())
    assert consents.marks() == (mark(),)
    assert mark(env={"A": "2"}) == mark()  # values may be secret, and change
    for other in (
        mark("Say it, and mail it"),
        mark(schema={"type": "object"}),
        mark(command="other"),
        mark(args=("-x",)),
        mark(env={"B": "1"}),
        mark(cwd="/srv"),
    ):
        assert other not in consents.marks()
        assert has_changed(other, consents.marks())
    assert not has_changed(mark(name="hg"), consents.marks())
    consents.allow(mark("Say it, and mail it"))
    assert consents.marks() == (mark("Say it, and mail it"),)
    assert (tmp_path / "consents.json").stat().st_mode & 0o077 == 0
    assert consents.forget("git") == 1
    assert consents.marks() == ()
