"""Runs a program of this package as a child process, where Triton does not interpret, and reads its lines of JSON.

They are appended to the file EMULATED_LINES, if there is such a variable: packaging/soak.sh makes a table of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def lines_of(program: str, *arguments: str, limit_s: float) -> list[dict[str, Any]]:
    """Run `python -m tests.kernels.emulated.PROGRAM` and return what it prints, also if it finds faults."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.emulated.{program}", *arguments],
        cwd=ROOT,
        env={**environment, "TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-4000:]
    assert "Traceback" not in done.stderr, done.stderr[-4000:]
    if path := os.environ.get("EMULATED_LINES"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(done.stdout)
    return [json.loads(line) for line in done.stdout.splitlines()]
