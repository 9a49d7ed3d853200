"""The service as a launch agent of macOS, in its property list.

Facts: launchd.plist(5), launchctl(1). Owns the list. Nothing here has run on macOS; the list is checked by plistlib.
A user who is logged in at the screen has the domain `gui/UID`. One who came by SSH has `user/UID` only, whose agents
must be of the session type "Background".
"""

from __future__ import annotations

import os
import plistlib
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgelm.base.errors import EdgeLMError
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

LABEL = "edgelm.serve"
STOP_S = 30  # so that the engines can save conversations
LETTING_GO_S = STOP_S + 10  # how long launchd may hold the label of an earlier service
RETRY_S = 1.0
MAX_LOG_BYTES = 2**24
HELD = (5, 37)  # launchctl's codes meanwhile: "Input/output error", "Operation already in progress"
NO_SCREEN = 125  # "Domain does not support specified action": the user is not logged in at the screen


@dataclass(frozen=True, slots=True)
class Launchd:
    """launchd's domains of this user; `folder` holds its agents."""

    folder: Path
    log: Path
    run: Run = run_command
    pause: Callable[[float], None] = time.sleep

    @property
    def _file(self) -> Path:
        return self.folder / f"{LABEL}.plist"

    def files(self, definition: Definition) -> dict[Path, str]:
        """Return the property list."""
        return self._files(definition)

    def install(self, definition: Definition, *, linger: bool) -> list[str]:
        """Write and load the agent; it starts at once and at each log-in."""
        if linger:
            raise EdgeLMError("macOS ends agents at log-out", "omit --linger")
        gui, user = self._domains
        write_files(self._files(definition))
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._bootout()  # of an earlier definition
        self._begin_log()
        done = self._bootstrap(gui)
        lines = [f"{self._file} is written"]
        if done.code == NO_SCREEN or (done.code and self._launchctl("print", gui).code):
            write_files(self._files(definition, has_screen=False))
            done = self._bootstrap(user)
            lines.append("you are not logged in at the screen: it runs in your background session")
        if done.code:
            message = f"launchctl bootstrap failed: {done.error or done.output or done.code}"
            raise EdgeLMError(message, "run `edgelm serve` instead")
        return lines

    def remove(self) -> list[str]:
        """Unload and remove the agent."""
        if not our_files([self._file]):
            return []
        self._bootout()
        return [f"{path} is removed" for path in remove_files([self._file])]

    def state(self) -> dict[str, str]:
        """Return the state of the agent."""
        if not self._file.exists():
            return {}
        printed = (self._launchctl("print", f"{domain}/{LABEL}") for domain in self._domains)
        done = next((outcome for outcome in printed if not outcome.code), None)
        if done is None:
            return {LABEL: "not loaded"}
        states = [
            line.partition("=")[2].strip() for line in done.output.splitlines() if line.strip().startswith("state")
        ]
        return {LABEL: states[0] if states else "loaded"}

    def logs(self, num_lines: int, *, follow: bool) -> list[str]:
        """Return tail's command."""
        return ["tail", "-n", str(num_lines), *(["-F"] if follow else []), str(self.log)]

    @property
    def _domains(self) -> tuple[str, str]:
        return f"gui/{os.getuid()}", f"user/{os.getuid()}"

    def _files(self, definition: Definition, *, has_screen: bool = True) -> dict[Path, str]:
        content: dict[str, object] = {
            "Label": LABEL,
            "ProgramArguments": [*definition.command, "--host", definition.address, "--port", str(definition.port)],
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 60,  # s between two starts: launchd cannot tell settings that are wrong from a crash
            "ExitTimeOut": STOP_S,
            "ProcessType": "Interactive",  # a background process gets slow cores
            "StandardOutPath": str(self.log),
            "StandardErrorPath": str(self.log),
        }
        if not has_screen:
            content["LimitLoadToSessionType"] = "Background"
        text = plistlib.dumps(content).decode()
        return {self._file: text.replace("<plist", f"<!-- {OURS} -->\n<plist", 1)}

    def _begin_log(self) -> None:
        """Set a long log aside; launchd opens another one, and shortens none itself."""
        with suppress(OSError):
            if self.log.stat().st_size > MAX_LOG_BYTES:
                self.log.replace(self.log.with_suffix(".old.log"))

    def _bootout(self) -> None:
        for domain in self._domains:
            self._launchctl("bootout", f"{domain}/{LABEL}")

    def _bootstrap(self, domain: str) -> Outcome:
        """Load the agent. After `bootout` an earlier one may still be ending: launchd takes no new one before."""
        for _ in range(round(LETTING_GO_S / RETRY_S)):
            done = self._launchctl("bootstrap", domain, str(self._file))
            if done.code not in HELD:
                break
            self.pause(RETRY_S)
        return done

    def _launchctl(self, *arguments: str) -> Outcome:
        return self.run(["launchctl", *arguments])
