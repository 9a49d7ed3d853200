"""Seeded mutations: each breaks the engine in one place, and the tests must notice.

    python -m tests.engine.mutations [WORD ...]     (those whose module or description has one of the words)

Owns the table of results. A mutation is applied to a copy of the package; the property tests run first, with a tenth
of their workloads, then the examples. Exits with 1 if a mutation survives. A test without end kills a mutation, too:
how long the tests take here without one is measured first. A word that no mutation has is refused before that.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.engine.mutation_list import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
LONGER = 5.0  # than without a mutation: a run has no end
LEAST_LIMIT_S, UNMUTATED_LIMIT_S = 300.0, 3600.0  # of a stage; a fifth of it for one test
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


def run(mutation: Mutation, limits_s: dict[str, float]) -> tuple[str, float]:
    """Return the test that kills a mutation ('' if none), and how long that took."""
    with _copy() as folder:
        mutation.apply(folder / "edgelm")
        began = time.perf_counter()
        for stage, limit_s in limits_s.items():
            if killer := _first_failure(folder, stage, limit_s):
                return f"{stage}: {killer}", time.perf_counter() - began
        return "", time.perf_counter() - began


def measured_limits() -> dict[str, float]:
    """Return how long each stage may take, from a run without a mutation, which must pass."""
    limits = {}
    with _copy() as folder:
        for stage in STAGES:
            began = time.perf_counter()
            if failure := _first_failure(folder, stage, None):
                sys.exit(f"error: without a mutation, too, fails {failure}")
            seconds = time.perf_counter() - began
            limits[stage] = max(LONGER * seconds, LEAST_LIMIT_S)
            print(f"{f'none: {stage} tests':<62} {seconds:7.1f}  ", flush=True)
    return limits


@contextmanager
def _copy() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="edgelm-mutation-") as name:
        folder = Path(name)
        for part in ("edgelm", "tests"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        yield folder


def _first_failure(folder: Path, stage: str, limit_s: float | None) -> str:
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={(limit_s or UNMUTATED_LIMIT_S) / LONGER:.0f}"]
    command = [sys.executable, "-m", "pytest", *options, *STAGES[stage]]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as end:
        return f"no end within {end.timeout:.0f} s"
    if done.returncode == 0:
        return ""
    failure = re.search(r"^(?:FAILED|ERROR) \S*?(test_\w+\.py(?:::\S+)?)", done.stdout, re.MULTILINE)
    if failure:
        return failure.group(1)
    if "Timeout" in done.stdout + done.stderr:
        return "a test without end"
    sys.exit(f"error: pytest failed for another reason\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def main(words: list[str]) -> int:
    """Run the chosen mutations and return the exit code; end at once where a word chooses none."""
    if unknown := [word for word in words if not any(word in mutation.name for mutation in MUTATIONS)]:
        modules = ", ".join(dict.fromkeys(mutation.module for mutation in MUTATIONS))
        sys.exit(f"error: no mutation has {', '.join(unknown)} in its name; the modules are {modules}")
    chosen = [mutation for mutation in MUTATIONS if not words or any(word in mutation.name for word in words)]
    survivors = 0
    print(f"{'mutation':<62} {'seconds':>7}  killed by")
    limits_s = measured_limits()
    for mutation in chosen:
        killer, seconds = run(mutation, limits_s)
        survivors += not killer and not mutation.equivalent
        outcome = f"equivalent: {mutation.equivalent}" if mutation.equivalent else "NOTHING: it survived"
        print(f"{mutation.name:<62} {seconds:7.1f}  {killer or outcome}", flush=True)
    print(f"{len(chosen)} mutations, {survivors} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
