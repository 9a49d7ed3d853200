"""Seeded mutations: each breaks a kernel or the packing of weights in one place, and a test must notice.

    python -m tests.kernels.mutations [WORD ...]     (those whose file or description holds a word)

Owns the table that comes of it. A mutation is applied to a copy of the package, of which its tests run until one
fails. Exits with 1 when a mutation survives.
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


def run(mutation: Mutation, place: Path) -> str:
    """Return the test that kills a mutation; "" if none."""
    for name in ("edgelm", "kernels", "models", "tui", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "starter")
        shutil.copytree(ROOT / name, place / name, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", place)
    changed = mutation.text(place)
    (place / mutation.file).write_text(changed, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=300"]
    environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *mutation.tests.split()],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT_S} s"
    if done.returncode == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) \S*?(test_\w+\.py(?:::\S+)?)", done.stdout, re.MULTILINE)
    if found is None:
        sys.exit(f"error: pytest failed for another reason\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found[1]


def main(words: list[str]) -> int:
    chosen = [each for each in MUTATIONS if not words or any(word in f"{each.file}: {each.what}" for word in words)]
    survivors = 0
    print(f"{'mutation':<72} {'seconds':>7}  killed by")
    for mutation in chosen:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="edgelm-mutation-") as folder:
            killer = run(mutation, Path(folder))
        survivors += not killer
        seconds = time.perf_counter() - began
        print(
            f"{f'{mutation.file}: {mutation.what}':<72} {seconds:7.1f}  {killer or 'NOTHING: it survived'}", flush=True
        )
    print(f"{len(chosen)} mutations, {survivors} survived")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
