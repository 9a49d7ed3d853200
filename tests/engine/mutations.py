"""Seeded mutations: each breaks the engine in one place, and the tests must notice.

    python -m tests.engine.mutations [WORD ...]     (those whose module or description has one of the words)

Owns the table of results. A mutation is applied to a copy of the package; the property tests run first, with a tenth
of their workloads, then the examples. Exits with 1 if a mutation survives.
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

from tests.engine.mutation_list import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240
STAGES = {
    "property": [
        "tests/engine/test_scheduler_properties.py",
        "tests/engine/test_cells.py",
        "-k",
        "not given_alone or 0-slots or 1-slots or 0-paged or 1-paged",
    ],
    "example": [
        "tests/engine",
        "--ignore=tests/engine/test_scheduler_properties.py",
        "--ignore=tests/engine/test_mutations.py",
    ],
}


def run(mutation: Mutation, folder: Path) -> tuple[str, float]:
    """Return the test that kills a mutation ('' if none), and how long that took."""
    shutil.copytree(ROOT / "edgelm", folder / "edgelm", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    mutation.apply(folder / "edgelm")
    began = time.perf_counter()
    for stage, arguments in STAGES.items():
        killer = _first_failure(folder, arguments)
        if killer:
            return f"{stage}: {killer}", time.perf_counter() - began
    return "", time.perf_counter() - began


def _first_failure(folder: Path, arguments: list[str]) -> str:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=60", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT_S} s"
    if done.returncode == 0:
        return ""
    failure = re.search(r"^(?:FAILED|ERROR) \S*?(test_\w+\.py(?:::\S+)?)", done.stdout, re.MULTILINE)
    if failure:
        return failure.group(1)
    if "Timeout" in done.stdout + done.stderr:
        return "a test without end"
    sys.exit(f"error: pytest failed for another reason\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def main(words: list[str]) -> int:
    chosen = [mutation for mutation in MUTATIONS if not words or any(word in mutation.name for word in words)]
    survivors = 0
    print(f"{'mutation':<62} {'seconds':>7}  killed by")
    for mutation in chosen:
        with tempfile.TemporaryDirectory(prefix="edgelm-mutation-") as folder:
            killer, seconds = run(mutation, Path(folder))
        survivors += not killer and not mutation.equivalent
        outcome = f"equivalent: {mutation.equivalent}" if mutation.equivalent else "NOTHING: it survived"
        print(f"{mutation.name:<62} {seconds:7.1f}  {killer or outcome}", flush=True)
    print(f"{len(chosen)} mutations, {survivors} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
