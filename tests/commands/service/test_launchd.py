"""The property list of launchd, read back by plistlib; launchctl itself is noted, not run."""

from __future__ import annotations

import os
import plistlib
from pathlib import Path

import pytest

from edgelm.base.errors import EdgeLMError
from edgelm.commands.service.launchd import LABEL, Launchd
from edgelm.commands.service.system import Outcome
from tests.commands.service.test_systemd import Commands, definition


def agent(tmp_path: Path, run: Commands) -> Launchd:
    return Launchd(tmp_path / "agents", tmp_path / "logs" / "edgelm.log", run)


def test_the_list_says_what_runs(tmp_path: Path) -> None:
    run = Commands()
    agent(tmp_path, run).install(definition('/opt/a & "b"/edgelm', "serve", address="::1"), linger=False)
    file = tmp_path / "agents" / f"{LABEL}.plist"
    content = plistlib.loads(file.read_bytes())
    assert content["ProgramArguments"] == ['/opt/a & "b"/edgelm', "serve", "--host", "::1", "--port", "11500"]
    assert content["KeepAlive"] == {"SuccessfulExit": False}
    assert content["ThrottleInterval"] == 60, "wrong settings are read again once a minute"
    assert content["StandardErrorPath"] == str(tmp_path / "logs" / "edgelm.log")
    assert (tmp_path / "logs").is_dir()
    domain = f"gui/{os.getuid()}"
    assert run.ran == [f"launchctl bootout {domain}/{LABEL}", f"launchctl bootstrap {domain} {file}"]


def test_failures_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(EdgeLMError, match="omit --linger"):
        agent(tmp_path, Commands()).install(definition(), linger=True)
    with pytest.raises(EdgeLMError, match="bootstrap failed: it went wrong"):
        agent(tmp_path, Commands("bootstrap")).install(definition(), linger=False)


def test_its_state_and_its_removal(tmp_path: Path) -> None:
    run = Commands()
    service = agent(tmp_path, run)
    assert (service.state(), service.remove()) == ({}, [])
    service.install(definition(), linger=False)
    assert agent(tmp_path, Commands("print")).state() == {LABEL: "not loaded"}
    shown = Launchd(tmp_path / "agents", tmp_path / "log", lambda _: Outcome(0, "x = {\n\tstate = running\n}", ""))
    assert shown.state() == {LABEL: "running"}
    assert len(service.remove()) == 1
    assert service.state() == {}


def test_an_agent_of_others_is_not_unloaded(tmp_path: Path) -> None:
    run = Commands()
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / f"{LABEL}.plist").write_text("<plist/>")
    assert agent(tmp_path, run).remove() == []
    assert not run.ran
