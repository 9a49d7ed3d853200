"""`make soak` runs every test once: its parts name all of them. And a run with a failure ends as one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_is_in_one_part() -> None:
    done = subprocess.run(["bash", "packaging/soak.sh", "list"], cwd=ROOT, capture_output=True, text=True, check=True)
    parts = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert parts.pop("mutations") == "-m tests.engine.mutations"
    named: dict[str, list[str]] = {}
    for part, command in parts.items():
        words = command.split()
        paths = [ROOT / word for word in words if word.startswith("tests")]
        ignored = [ROOT / word.partition("=")[2] for word in words if word.startswith("--ignore=")]
        assert paths
        assert all(path.exists() for path in [*paths, *ignored]), part
        for path in (ROOT / "tests").rglob("test_*.py"):
            above = {path, *path.parents}
            if above & set(paths) and not above & set(ignored):
                named.setdefault(str(path), []).append(part)
    assert named.keys() == {str(path) for path in (ROOT / "tests").rglob("test_*.py")}
    assert [(path, names) for path, names in named.items() if len(names) != 1] == []


def test_a_failure_is_one_with_the_variables_of_xdist(tmp_path: Path) -> None:
    """A program of a test inherits them, and may run pytest."""
    (tmp_path / "test_red.py").write_text("def test_red() -> None:\n    assert False\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "test_red.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_XDIST_WORKER": "gw0"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "1 failed" in done.stdout) == (1, True), done.stdout + done.stderr
