"""Runs a program of this package as a child process, where Triton does not interpret, and reads its lines of JSON."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.counts import Count
from tests.kernels.sass import compiling_environment

ROOT = Path(__file__).resolve().parents[3]
# Programs of every test run compute for a minute. They took 200 s beside each other on two cores with a load of 9.
LIMIT_S = Count(test=900, soak=14_000)
TEST_LIMIT_S = LIMIT_S + 60  # of a test that waits for a program


class ChildError(AssertionError):
    """A program of this package has not done its work."""


def lines_of(program: str, *arguments: str, triton: Path | None = None) -> list[dict[str, Any]]:
    """Run `python -m tests.kernels.emulated.PROGRAM` and return what it prints, also if it finds faults.

    `triton` is a folder with another release of it.
    """
    out = output_of([sys.executable, "-m", f"tests.kernels.emulated.{program}", *arguments], LIMIT_S, triton)
    return [json.loads(line) for line in out.splitlines()]


def output_of(command: Sequence[str], limit_s: float, triton: Path | None = None) -> str:
    """Return the output of a program that ends with exit code 0 (it found no fault) or 1 (it found some).

    Raises ChildError, which says how it ended, after how long, and what it printed last.
    """
    environment = compiling_environment(triton) | {"TRITON_DEFAULT_FP_FUSION": "1"}
    began, cpu_before = time.monotonic(), _cpu_seconds()
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=limit_s, check=False)
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        code, out, err = None, error.stdout or b"", error.stderr or b""
    texts = [text.decode(errors="replace") for text in (out, err)]
    if code in (0, 1) and texts[0] and "Traceback" not in texts[1]:
        return texts[0]
    seconds, cpu_seconds = time.monotonic() - began, _cpu_seconds() - cpu_before
    raise ChildError(
        f"{' '.join(command)} {_end(code)} after {seconds:.0f} s, {cpu_seconds:.0f} s of them computing; the load is "
        f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores. Its last lines:\n{texts[0][-2000:]}\n{texts[1][-4000:]}"
    )


def _end(code: int | None) -> str:
    if code is None:
        return "was not done"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}{' (out of memory?)' if code == -signal.SIGKILL else ''}"
    return f"ended with exit code {code}"


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
