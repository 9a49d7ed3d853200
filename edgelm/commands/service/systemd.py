"""The service as two units of systemd's user manager: a socket, and the server that its first connection starts.

Facts: systemd.unit(5), systemd.socket(5), systemd.service(5), systemd.kill(5). Owns the text of the units. A stop
reaches the front alone at first (KillMode=mixed), so that its engines can save conversations. The front restarts an
engine that was killed for memory (OOMPolicy). A server that refuses its settings is not started again, and one that
always fails is given up after some starts: then its socket fails too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from edgelm.base.errors import USAGE_EXIT_CODE, EdgeLMError
from edgelm.commands.service.system import (
    OURS,
    Definition,
    Outcome,
    Run,
    our_files,
    remove_files,
    run_command,
    write_files,
)

SOCKET, SERVICE = "edgelm.socket", "edgelm.service"

_SOCKET_UNIT = """\
# {ours}; `edgelm service remove` removes it.
[Unit]
Description=edgelm, language models for the programs of this machine

[Socket]
ListenStream={address}
FreeBind=yes

[Install]
WantedBy=sockets.target
"""
_SERVICE_UNIT = """\
# {ours}; `edgelm service remove` removes it.
[Unit]
Description=edgelm, language models for the programs of this machine
Requires={socket}
After={socket}
StartLimitIntervalSec=120
StartLimitBurst=5

[Service]
Type=simple
ExecStart={command}
Restart=on-failure
RestartSec=2
RestartPreventExitStatus={usage}
TimeoutStopSec=30
KillMode=mixed
OOMPolicy=continue
NoNewPrivileges=yes

[Install]
Also={socket}
"""


def socket_address(folder: Path) -> str | None:
    """Return the address and port of the installed socket; None: there is none."""
    try:
        unit = (folder / SOCKET).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^ListenStream=(\S+)$", unit, re.MULTILINE)
    return match[1].replace("%%", "%") if match else None


@dataclass(frozen=True, slots=True)
class Systemd:
    """systemd's manager of this user; `folder` holds its units."""

    folder: Path
    run: Run = run_command

    def files(self, definition: Definition) -> dict[Path, str]:
        """Return the units. Raises EdgeLMError for a command that no unit can hold."""
        host = f"[{definition.address}]" if ":" in definition.address else definition.address
        listen = f"{host}:{definition.port}".replace("%", "%%")  # of a zone: systemd expands %
        program, *arguments = definition.command
        if not program.isprintable() or '"' in program or "\\" in program:
            raise EdgeLMError(f"{program!r} cannot stand in a unit of systemd", "install edgelm in another folder")
        # Of the program's path, systemd expands % only.
        command = " ".join([f'"{program.replace("%", "%%")}"', *map(_quoted, arguments)])
        return {
            self.folder / SOCKET: _SOCKET_UNIT.format(ours=OURS, address=listen),
            self.folder / SERVICE: _SERVICE_UNIT.format(
                ours=OURS, socket=SOCKET, command=command, usage=USAGE_EXIT_CODE
            ),
        }

    def install(self, definition: Definition, *, linger: bool) -> list[str]:
        """Write and enable the units; the server starts with the first connection."""
        files = self.files(definition)
        self._checked("show-environment")  # before anything is written
        write_files(files)
        self._checked("daemon-reload")
        self._systemctl("stop", SERVICE, SOCKET)  # of an earlier definition
        self._systemctl("reset-failed", SERVICE, SOCKET)  # it may have failed too often to be started again
        self._checked("enable", "--now", SOCKET)
        lines = [f"{path} is written" for path in files]
        if not linger:
            return [*lines, "it ends when you log out; `edgelm service install --linger` keeps it"]
        done = self.run(["loginctl", "enable-linger"])
        if done.code:
            raise EdgeLMError(f"the service is installed, but not beyond log-out: {_reason(done)}")
        return [*lines, "it goes on after you log out"]

    def remove(self) -> list[str]:
        """Stop and remove the units."""
        units = our_files([self.folder / SOCKET, self.folder / SERVICE])
        if not units:
            return []
        self._checked("show-environment")
        self._systemctl("disable", "--now", *(path.name for path in units))
        lines = [f"{path} is removed" for path in remove_files(units)]
        self._checked("daemon-reload")
        return lines

    def state(self) -> dict[str, str]:
        """Return the state of both units."""
        if not self._installed:
            return {}
        self._checked("show-environment")
        return {unit: self._systemctl("is-active", unit).output or "unknown" for unit in (SOCKET, SERVICE)}

    def logs(self, num_lines: int, *, follow: bool) -> list[str]:
        """Return journalctl's command."""
        command = ["journalctl", "--user", f"--user-unit={SERVICE}", f"--lines={num_lines}", "--output=short-iso"]
        return [*command, "--follow"] if follow else [*command, "--no-pager"]

    @property
    def _installed(self) -> bool:
        return (self.folder / SOCKET).exists() or (self.folder / SERVICE).exists()

    def _systemctl(self, *arguments: str) -> Outcome:
        return self.run(["systemctl", "--user", *arguments])

    def _checked(self, *arguments: str) -> None:
        done = self._systemctl(*arguments)
        if not done.code:
            return
        if arguments == ("show-environment",):
            hint = "log in as this user, not by su; in WSL, set systemd=true under [boot] of /etc/wsl.conf"
            raise EdgeLMError(f"systemd's user manager does not answer: {_reason(done)}", hint)
        raise EdgeLMError(f"systemctl --user {' '.join(arguments)} failed: {_reason(done)}")


def _reason(done: Outcome) -> str:
    lines = (done.error or done.output).splitlines()
    return lines[0] if lines else f"exit code {done.code}"


def _quoted(word: str) -> str:
    """Return an argument of ExecStart. systemd expands % and $, and reads escapes."""
    if not word.isprintable():
        raise EdgeLMError(f"{word!r} cannot stand in a unit of systemd", "give another name")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'
