"""The units of systemd, by its own checker and by a manager that notes its commands."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from edgelm.base.errors import USAGE_EXIT_CODE, EdgeLMError
from edgelm.commands.service.system import Definition, Outcome
from edgelm.commands.service.systemd import SERVICE, SOCKET, Systemd, socket_address

START_S = 10  # in which a slow machine finds that the server cannot start


class Commands:
    """A system that notes what is asked of it; `failing` are the words of commands that fail."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.ran: list[str] = []

    def __call__(self, command: Sequence[str]) -> Outcome:
        self.ran.append(" ".join(command))
        failed = any(word in command for word in self.failing)
        return Outcome(1, "", "it went wrong\nmore") if failed else Outcome(0, "active", "")


def definition(*command: str, address: str = "127.0.0.1") -> Definition:
    return Definition(command or ("/opt/edgelm/bin/edgelm", "serve"), address, 11500)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_checker_of_systemd_says_nothing(tmp_path: Path, address: str) -> None:
    """An unknown key is a warning with exit code 0, so any output is a failure."""
    program = tmp_path / "a %h folder of $HOME" / "edgelm"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    folder = tmp_path / "units"
    Systemd(folder, Commands()).install(
        definition(str(program), "serve", 'a "b" %h $HOME \\', address=address), linger=False
    )
    done = subprocess.run(
        ["systemd-analyze", "--user", "--man=no", "verify", f"./{SERVICE}", f"./{SOCKET}"],
        cwd=folder,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_socket_is_enabled_and_an_earlier_service_ended(tmp_path: Path) -> None:
    run = Commands()
    lines = Systemd(tmp_path, run).install(definition(), linger=False)
    assert run.ran == [
        "systemctl --user show-environment",
        "systemctl --user daemon-reload",
        "systemctl --user stop edgelm.service edgelm.socket",
        "systemctl --user reset-failed edgelm.service edgelm.socket",
        "systemctl --user enable --now edgelm.socket",
    ]
    assert "--linger" in lines[-1]
    # At an address of the machine it begins before the network is there.
    assert "ListenStream=127.0.0.1:11500\nFreeBind=yes\n" in (tmp_path / SOCKET).read_text()
    assert (tmp_path / SOCKET).stat().st_mode & 0o777 == 0o644
    linger = Commands()
    Systemd(tmp_path, linger).install(definition(address="::1"), linger=True)
    assert linger.ran[-1] == "loginctl enable-linger"
    assert "ListenStream=[::1]:11500\n" in (tmp_path / SOCKET).read_text()


def test_a_server_that_always_fails_is_not_started_for_ever(tmp_path: Path) -> None:
    Systemd(tmp_path, Commands()).install(definition(), linger=False)
    unit = (tmp_path / SERVICE).read_text()
    keys = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line)
    assert int(keys["RestartPreventExitStatus"]) == USAGE_EXIT_CODE
    starts_s = int(keys["StartLimitBurst"]) * (int(keys["RestartSec"]) + START_S)
    assert starts_s < int(keys["StartLimitIntervalSec"]), "or the limit is never reached"
    head, _, _ = unit.partition("[Service]")
    assert "StartLimitBurst" in head, "systemd ignores it in another section"


def test_an_engine_killed_for_memory_is_the_matter_of_the_front(tmp_path: Path) -> None:
    """By default systemd stops a service of which one process was killed for memory."""
    units = Systemd(tmp_path, Commands()).files(definition())
    _, _, body = units[tmp_path / SERVICE].partition("[Service]")
    assert "\nOOMPolicy=continue\n" in body


def test_nothing_is_written_without_a_user_manager(tmp_path: Path) -> None:
    with pytest.raises(EdgeLMError, match="does not answer: it went wrong"):
        Systemd(tmp_path, Commands("show-environment")).install(definition(), linger=False)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("step", ["daemon-reload", "enable"])
def test_a_step_that_fails_is_named(tmp_path: Path, step: str) -> None:
    with pytest.raises(EdgeLMError, match=f"{step}.*: it went wrong$"):
        Systemd(tmp_path, Commands(step)).install(definition(), linger=False)


def test_files_of_others_are_neither_replaced_nor_removed(tmp_path: Path) -> None:
    own = tmp_path / SERVICE
    own.write_text("[Service]\nExecStart=/bin/true\n")
    with pytest.raises(EdgeLMError, match="was not written by edgelm"):
        Systemd(tmp_path, Commands()).install(definition(), linger=False)
    assert [*tmp_path.iterdir()] == [own]
    assert Systemd(tmp_path, Commands()).remove() == []
    assert own.read_text().endswith("/bin/true\n")


def test_units_of_others_are_not_stopped(tmp_path: Path) -> None:
    run = Commands()
    (tmp_path / SERVICE).write_text("[Service]\nExecStart=/my/own\n")
    assert Systemd(tmp_path, run).remove() == []
    assert not run.ran
    (tmp_path / SOCKET).write_text(Systemd(tmp_path, run).files(definition())[tmp_path / SOCKET])
    assert len(Systemd(tmp_path, run).remove()) == 1
    assert "systemctl --user disable --now edgelm.socket" in run.ran


def test_removal_stops_first_and_leaves_nothing(tmp_path: Path) -> None:
    run = Commands()
    service = Systemd(tmp_path, run)
    assert service.remove() == []
    assert service.state() == {}
    service.install(definition(), linger=False)
    assert service.state() == {SOCKET: "active", SERVICE: "active"}
    run.ran.clear()
    assert len(service.remove()) == 2
    assert run.ran[1:] == [
        "systemctl --user disable --now edgelm.socket edgelm.service",
        "systemctl --user daemon-reload",
    ]
    assert [*tmp_path.iterdir()] == []


def test_a_command_that_no_unit_can_hold(tmp_path: Path) -> None:
    for command in (("/a\nExecStart=/bin/evil", "serve"), ('/a"b', "serve"), ("/a", "serve\nExecStart=/bin/evil")):
        with pytest.raises(EdgeLMError, match="cannot stand in a unit"):
            Systemd(tmp_path, Commands()).files(definition(*command))


def test_the_zone_of_an_address_is_no_specifier(tmp_path: Path) -> None:
    units = Systemd(tmp_path, Commands()).files(definition(address="fe80::1%eth0"))
    assert "ListenStream=[fe80::1%%eth0]:11500\n" in units[tmp_path / SOCKET]
    assert socket_address(tmp_path) is None
    (tmp_path / SOCKET).write_text(units[tmp_path / SOCKET])
    assert socket_address(tmp_path) == "[fe80::1%eth0]:11500"
