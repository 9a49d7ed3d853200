"""Runs an outside program to its end. A slow one is let be; one that hangs is killed with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

LIMIT_S = 1800.0  # of one run: far above what any needs, so that a busy machine fails no check
TIMED_OUT = 124


def run_program(
    command: Sequence[str | Path], folder: Path, environment: Mapping[str, str], *, one_output: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a program without a terminal; `one_output` puts its errors among its output. Exit code 124: it hung.

    The outputs are files: a process that the program leaves behind keeps a pipe open, and it would look unfinished.
    """
    words = list(map(str, command))
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if one_output else errors,
            start_new_session=True,
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = TIMED_OUT
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    if code == TIMED_OUT:
        texts[1] += f"\nit ran past {LIMIT_S:.0f} s"
    return subprocess.CompletedProcess(words, code, *texts)
