"""The service as a launch agent of macOS, in its property list.

Facts: launchd.plist(5), launchctl(1). Owns the list. Nothing here has run on macOS; the list is checked by plistlib.
"""

from __future__ import annotations

import os
import plistlib
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


@dataclass(frozen=True, slots=True)
class Launchd:
    """launchd's domain of this user; `folder` holds its agents."""

    folder: Path
    log: Path
    run: Run = run_command

    @property
    def _file(self) -> Path:
        return self.folder / f"{LABEL}.plist"

    def files(self, definition: Definition) -> dict[Path, str]:
        """Return the property list."""
        content = {
            "Label": LABEL,
            "ProgramArguments": [*definition.command, "--host", definition.address, "--port", str(definition.port)],
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 60,  # s between two starts: launchd cannot tell settings that are wrong from a crash
            "ExitTimeOut": 30,  # s, so that the engines can save conversations
            "ProcessType": "Interactive",  # a background process gets slow cores
            "StandardOutPath": str(self.log),
            "StandardErrorPath": str(self.log),
        }
        text = plistlib.dumps(content).decode()
        return {self._file: text.replace("<plist", f"<!-- {OURS} -->\n<plist", 1)}

    def install(self, definition: Definition, *, linger: bool) -> list[str]:
        """Write and load the agent; it starts at once and at each log-in."""
        if linger:
            raise EdgeLMError("macOS ends agents at log-out", "omit --linger")
        files = self.files(definition)
        write_files(files)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._launchctl("bootout", f"{self._domain}/{LABEL}")  # of an earlier definition
        done = self._launchctl("bootstrap", self._domain, str(self._file))
        if done.code:
            raise EdgeLMError(f"launchctl bootstrap failed: {done.error or done.output or done.code}")
        return [f"{self._file} is written"]

    def remove(self) -> list[str]:
        """Unload and remove the agent."""
        if not our_files([self._file]):
            return []
        self._launchctl("bootout", f"{self._domain}/{LABEL}")
        return [f"{path} is removed" for path in remove_files([self._file])]

    def state(self) -> dict[str, str]:
        """Return the state of the agent."""
        if not self._file.exists():
            return {}
        done = self._launchctl("print", f"{self._domain}/{LABEL}")
        if done.code:
            return {LABEL: "not loaded"}
        states = [
            line.partition("=")[2].strip() for line in done.output.splitlines() if line.strip().startswith("state")
        ]
        return {LABEL: states[0] if states else "loaded"}

    def logs(self, num_lines: int, *, follow: bool) -> list[str]:
        """Return tail's command."""
        return ["tail", "-n", str(num_lines), *(["-F"] if follow else []), str(self.log)]

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"

    def _launchctl(self, *arguments: str) -> Outcome:
        return self.run(["launchctl", *arguments])
