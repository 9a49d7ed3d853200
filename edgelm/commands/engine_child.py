"""The parent's side of the engine child: start it, read its events, turn its death into one line, end it for certain.

Knows nothing of what the jobs are; `edgelm/child.py` does them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from edgelm.errors import EdgeLMError, EngineError
from edgelm.server.death import engine_death
from edgelm.server.model_files import ModelFiles

GRACE_S = 2.0  # between the closing of its standard input and SIGKILL


class EngineChild:
    """An engine child doing one job. A context manager: leaving it ends the process."""

    def __init__(self, job: dict[str, Any], environment: dict[str, str], verbose: bool) -> None:
        self._verbose = verbose
        self._files = ModelFiles(Path(job["model"]))
        self._last_lines: deque[str] = deque(maxlen=20)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "edgelm.child"],  # -P: nothing of the current folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | environment,
            start_new_session=True,  # Ctrl-C in the terminal reaches this process alone, which then ends the child
        )
        self._errors = threading.Thread(target=self._read_errors, daemon=True)
        self._errors.start()
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it died already: `events` tells why
            self._process.stdin.write(json.dumps(job | {"verbose": verbose}).encode() + b"\n")
            self._process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield events up to the result.

        Raises EdgeLMError with the child's error, with how it died, or because the model's file changed meanwhile.
        """
        assert self._process.stdout
        for line in self._process.stdout:
            if not line.endswith(b"\n"):
                break  # it died while it wrote
            event: dict[str, Any] = json.loads(line)
            if event["event"] in ("error", "result") and self._files.rewritten():
                raise self._files.change()
            if event["event"] == "error":
                raise EdgeLMError(event["message"], event["hint"])
            yield event
            if event["event"] == "result":
                return
        raise self._death()

    def close(self) -> None:
        """End the child and wait for it. It leaves when its standard input closes, or is killed."""
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.join(GRACE_S)

    def _read_errors(self) -> None:
        assert self._process.stderr
        with self._process.stderr as stream:
            for raw in stream:
                line = raw.decode("utf-8", "replace").rstrip()
                if line:
                    self._last_lines.append(line)
                if self._verbose:
                    print(line, file=sys.stderr)

    def _death(self) -> EngineError:
        code = self._process.wait()
        self._errors.join(GRACE_S)
        return engine_death(code, self._last_lines, self._files)
