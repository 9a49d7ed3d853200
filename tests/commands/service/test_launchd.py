"""The property list of launchd, read back by plistlib; launchctl itself is noted, not run."""

from __future__ import annotations

import os
import plistlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from edgelm.base.errors import EdgeLMError
from edgelm.commands.service.launchd import LABEL, MAX_LOG_BYTES, STOP_S, Launchd
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
    assert "LimitLoadToSessionType" not in content, "at the screen it is an agent like any other"
    user = os.getuid()
    assert run.ran == [
        f"launchctl bootout gui/{user}/{LABEL}",
        f"launchctl bootout user/{user}/{LABEL}",
        f"launchctl bootstrap gui/{user} {file}",
    ]


class Mac:
    """launchd as its users report it: a label is free some time after `bootout`, and without a screen no gui domain."""

    def __init__(self, *, has_screen: bool = True) -> None:
        self.has_screen = has_screen
        self.loaded: set[str] = set()
        self.ends_in_s = 0.0  # how long the earlier agent still needs
        self.waited_s = 0.0

    def __call__(self, command: Sequence[str]) -> Outcome:
        verb, target = command[1:3]
        if target.startswith("gui/") and not self.has_screen:
            return Outcome(125, "", f"{verb} failed: 125: Domain does not support specified action")
        if verb == "bootstrap":
            if self.ends_in_s > 0:
                return Outcome(5, "", "Bootstrap failed: 5: Input/output error")
            if target.startswith("user/") and b"Background" not in Path(command[3]).read_bytes():
                return Outcome(134, "", "Service cannot load in requested session")
            self.loaded.add(f"{target}/{LABEL}")
            return Outcome(0, "", "")
        if target == f"gui/{os.getuid()}":
            return Outcome(0, "the domain", "")
        if target not in self.loaded:
            return Outcome(3, "", "No such process")
        if verb == "bootout":
            self.loaded.remove(target)
            self.ends_in_s = STOP_S
        return Outcome(0, "\tstate = running", "")

    def pause(self, seconds: float) -> None:
        self.waited_s += seconds
        self.ends_in_s -= seconds


@pytest.mark.parametrize("has_screen", [True, False])
def test_it_is_installed_again_while_the_earlier_one_ends(tmp_path: Path, *, has_screen: bool) -> None:
    """So the guide restarts it after an update; engines may need all their time to save conversations."""
    mac = Mac(has_screen=has_screen)
    service = Launchd(tmp_path / "agents", tmp_path / "edgelm.log", mac, mac.pause)
    for _ in range(2):
        service.install(definition(), linger=False)
        assert mac.loaded == {f"{'gui' if has_screen else 'user'}/{os.getuid()}/{LABEL}"}
        assert service.state() == {LABEL: "running"}
    assert mac.waited_s == STOP_S
    mac.has_screen = True  # one that came by SSH is seen and removed from the screen, too
    assert service.state() == {LABEL: "running"}
    assert service.remove()
    assert mac.loaded == set()


def test_a_label_that_is_never_free_is_an_error(tmp_path: Path) -> None:
    mac = Mac()
    mac.ends_in_s = 1e9
    with pytest.raises(EdgeLMError, match="Input/output error"):
        Launchd(tmp_path / "agents", tmp_path / "edgelm.log", mac, mac.pause).install(definition(), linger=False)
    assert STOP_S < mac.waited_s < 2 * STOP_S


def test_a_long_log_is_set_aside_once(tmp_path: Path) -> None:
    service = Launchd(tmp_path / "agents", tmp_path / "edgelm.log", Commands())
    (tmp_path / "edgelm.log").write_text("short")
    service.install(definition(), linger=False)
    assert (tmp_path / "edgelm.log").read_text() == "short"
    for last in (b"1", b"2"):
        (tmp_path / "edgelm.log").write_bytes(bytes(MAX_LOG_BYTES) + last)
        service.install(definition(), linger=False)
        assert not (tmp_path / "edgelm.log").exists(), "launchd makes it"
        assert (tmp_path / "edgelm.old.log").read_bytes()[-1:] == last


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
