"""Asks llama.cpp for the sizes of a context's buffers, in a process of its own that a damaged file may crash.

Owns that process, its time limit and its end. Imports nothing native; llama_buffers.py is what it runs.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from edgelm.executors.llama_memory import Buffers, BufferSource

TIME_LIMIT_S = 30.0  # for all answers together: of the largest model they take one, on a machine that is not busy


class BufferProbe:
    """A `BufferSource` that answers from llama.cpp, and once that has failed from `otherwise`.

    `exact` tells whether all answers were llama.cpp's own.
    """

    def __init__(self, path: Path, otherwise: BufferSource, *, sequences: int, repack: bool = True) -> None:
        self.exact = True
        self._otherwise = otherwise
        self._deadline = time.monotonic() + TIME_LIMIT_S
        command = [sys.executable, "-P", "-m", "edgelm.executors.llama_buffers", "--sequences", str(sequences)]
        self._child = subprocess.Popen(
            [*command, *([] if repack else ["--no-repack"]), "--", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=os.environ | {"GGML_NO_BACKTRACE": "1"},
        )

    def __call__(self, kv: str, context: int) -> Buffers:
        if self.exact:
            answer = self._ask(f"{kv} {context}\n".encode())
            if answer is not None:
                return answer
            self.exact = False
            self._child.kill()
        return self._otherwise(kv, context)

    def _ask(self, question: bytes) -> Buffers | None:
        """Return the child's answer; None where it is dead, late, or says something else."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        line = b""
        try:
            self._child.stdin.write(question)
            with selectors.DefaultSelector() as selector:
                selector.register(self._child.stdout, selectors.EVENT_READ)
                while not line.endswith(b"\n"):
                    if not selector.select(max(self._deadline - time.monotonic(), 0)):
                        return None
                    piece = self._child.stdout.read(4096)
                    if not piece:
                        return None
                    line += piece
            return Buffers(*map(int, line.split()))
        except (OSError, ValueError, TypeError):
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._child:  # closes the pipes, at which it ends, and waits
            self._child.kill()
