"""Seeded mutations: each breaks a kernel or the packing of weights in one place, and a test must fail.

    python -m tests.kernels.mutations [WORD ...]     (only those with a word in their file or description)

Owns the program. A mutation is applied to a copy of the package, whose tests run until one fails. The exit code is 1 if
a mutation survives.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.kernels.mutation_list import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900


def run(mutation: Mutation, copy: Path) -> str:
    """Return the test that kills a mutation; "" if it survives."""
    for name in ("edgelm", "kernels", "models", "tui", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "starter")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    changed = mutation.apply(copy)
    (copy / mutation.file).write_text(changed, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=300"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *mutation.tests.split()],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"a timeout of {LIMIT_S} s"
    if done.returncode == 0:
        return ""
    match = re.search(r"^(?:FAILED|ERROR) \S*?(test_\w+\.py(?:::\S+)?)", done.stdout, re.MULTILINE)
    if match is None:
        sys.exit(f"error: pytest failed for another reason\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return match[1]


def main(words: list[str]) -> int:
    chosen = [mutation for mutation in MUTATIONS if not words or any(word in mutation.title for word in words)]
    survivors = 0
    print(f"{'mutation':<72} {'seconds':>7}  killed by")
    for mutation in chosen:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="edgelm-mutation-") as folder:
            killer = run(mutation, Path(folder))
        survivors += not killer
        seconds = time.perf_counter() - began
        print(f"{mutation.title:<72} {seconds:7.1f}  {killer or 'NOTHING: it survived'}", flush=True)
    print(f"{len(chosen)} mutations, {survivors} survived")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
