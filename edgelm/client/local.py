"""The endpoint on this machine: the front that runs already, or one of our own that ends with us.

Owns the search and the child process. Knows nothing of what the front serves.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from edgelm.errors import EngineError

START_S = 60.0
STOP_S = 5.0


def find_front(runtime: Path) -> str | None:
    """Return the address that a running front has left in the runtime folder."""
    try:
        found = json.loads((runtime / "front.json").read_text(encoding="utf-8"))
        pid, address = int(found["pid"]), str(found["address"])
        os.kill(pid, 0)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none, or a stale file
    return address


class OwnFront:
    """`edgelm serve` as a child that ends when its standard input closes: also when we are killed."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._command = [
            sys.executable,
            "-P",
            "-m",
            "edgelm",
            "serve",
            "--port",
            "0",
            "--until-stdin-closes",
            *arguments,
        ]
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def died(self) -> bool:
        """Say whether it ended by itself."""
        return self._process is not None and self._process.returncode is not None

    async def start(self) -> str:
        """Start it; return its address. Raises EngineError with the reason where it does not start."""
        self._log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # the terminal's signals are for the screen
            )
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), START_S)
            return str(json.loads(line)["address"])
        except TimeoutError:
            await self.stop()
            raise EngineError("the endpoint does not start", f"see {self._log}") from None
        except (ValueError, KeyError, TypeError):
            await self.stop()
            raise EngineError(f"the endpoint does not start: {self._reason()}", f"see {self._log}") from None

    async def stop(self) -> None:
        """Let it end; kill it where it does not."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    def _reason(self) -> str:
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            lines = []
        return next((line.removeprefix("error: ") for line in reversed(lines) if line.strip()), "it gave no reason")
