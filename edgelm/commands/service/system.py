"""The words that both service managers share: a definition, a command of the system, and files that are ours.

Owns the rule that a file of another origin is never replaced or removed. Knows nothing of a manager's format.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgelm.base.atomic import atomic_write
from edgelm.base.errors import EdgeLMError

OURS = "Written by `edgelm service install`"
READABLE = 0o644
LIMIT_S = 60.0

Run = Callable[[Sequence[str]], "Outcome"]


@dataclass(frozen=True, slots=True)
class Definition:
    """A service: what runs, and where it listens."""

    command: tuple[str, ...]  # absolute, without keys
    address: str  # an IP address
    port: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command of the system ended."""

    code: int
    output: str
    error: str


class Manager(Protocol):
    """A service manager. Its methods raise EdgeLMError."""

    def files(self, definition: Definition) -> dict[Path, str]:
        """Return the files of a service."""

    def install(self, definition: Definition, *, linger: bool) -> list[str]:
        """Write the files and start the service; return lines for the user."""

    def remove(self) -> list[str]:
        """End the service and remove its files; return lines for the user."""

    def state(self) -> dict[str, str]:
        """Return the state of each part of the service; empty: it is not installed."""

    def logs(self, num_lines: int, *, follow: bool) -> list[str]:
        """Return the command that shows the log."""


def run_command(command: Sequence[str]) -> Outcome:
    """Run a command of the system. Raises EdgeLMError if it is missing or does not end."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except FileNotFoundError:
        raise EdgeLMError(f"there is no {command[0]} on this machine", "run `edgelm serve` instead") from None
    except OSError as error:
        raise EdgeLMError(f"{command[0]} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise EdgeLMError(f"{command[0]} did not answer within {LIMIT_S:.0f} s", "try again") from None
    return Outcome(done.returncode, done.stdout.strip(), done.stderr.strip())


def write_files(files: dict[Path, str]) -> None:
    """Write the files of a service. Raises EdgeLMError, before the first, if one that is not ours stands there."""
    for path in files:
        if path.exists() and not _is_ours(path):
            raise EdgeLMError(f"{path} was not written by edgelm", "move it away, then install again")
    for path, text in files.items():
        try:
            atomic_write(path, text.encode(), mode=READABLE)
        except OSError as error:
            raise EdgeLMError(f"{path} cannot be written: {error.strerror}") from None


def our_files(paths: Sequence[Path]) -> list[Path]:
    """Return those files that are there and ours."""
    return [path for path in paths if path.exists() and _is_ours(path)]


def remove_files(paths: Sequence[Path]) -> list[Path]:
    """Remove those files that are ours; return them. Raises EdgeLMError."""
    ours = our_files(paths)
    for path in ours:
        try:
            path.unlink()
        except OSError as error:
            raise EdgeLMError(f"{path} cannot be removed: {error.strerror}") from None
    return ours


def _is_ours(path: Path) -> bool:
    try:
        return OURS in path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
