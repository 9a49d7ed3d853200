"""Reading files in child processes, one answer a file: a file that kills its reader costs its own answer and no other.

Owns the children, their limits, and what is said of one that died. Knows nothing of what is read.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

DESCRIBE = "edgelm.library.describe"
FILE_LIMIT_S = 60.0  # for one file: a header on a network drive that went away


def read_each(module: str, wanted: Sequence[Any], limit_s: float = FILE_LIMIT_S) -> Iterator[dict[str, Any]]:
    """Yield what a module's child process says of each thing wanted, in order; `{"error": …}` where it died of it.

    The module reads a JSON list from standard input and writes one line of JSON for each entry.
    """
    done = 0
    while done < len(wanted):
        child = _Child(module, wanted[done:], limit_s)
        for answer in child.answers():
            yield answer
            done += 1
        if done < len(wanted):
            yield {"error": f"it cannot be read: {child.end()}"}
            done += 1


class _Child:
    """One process; it is killed when no answer comes within the limit."""

    def __init__(self, module: str, wanted: Sequence[Any], limit_s: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],  # -P: nothing of the current folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._limit_s = limit_s
        self._late = False
        self._job = json.dumps(list(wanted)).encode()

    def answers(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdin
        assert self._process.stdout
        try:
            with self._process.stdin as stdin:
                stdin.write(self._job)
        except BrokenPipeError:
            pass  # it is dead: the missing answers say so
        try:
            while line := self._line():
                yield json.loads(line)
        finally:
            self._process.kill()  # nothing to end, or nobody wants the rest
            self._process.wait()
            self._process.stdout.close()

    def end(self) -> str:
        """Say how it ended before its work was done."""
        code = self._process.returncode
        if self._late:
            return f"nothing came within {self._limit_s:.0f} s"
        if code == -getattr(signal, "SIGBUS", 0):
            return "it is cut, or was changed while it was read"
        return f"reading it failed ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"

    def _line(self) -> bytes:
        assert self._process.stdout
        timer = threading.Timer(self._limit_s, self._give_up)
        timer.daemon = True
        timer.start()
        try:
            line: bytes = self._process.stdout.readline()
        finally:
            timer.cancel()
        return line if line.endswith(b"\n") else b""

    def _give_up(self) -> None:
        self._late = True
        self._process.kill()
