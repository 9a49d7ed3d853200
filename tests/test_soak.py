"""How the tests are run: `make soak` runs each once, a failure ends as one, and no other Triton stops `make test`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TAG = "cp{}{}".format(*sys.version_info)
# For .venv/bin/python: pip has the release 1.0 alone.
FAKE_PYTHON = """#!/bin/sh
case $2 in
    pip) test "$8" = triton==1.0 && mkdir -p "$7" ;;
    pytest) echo "tests run" ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


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


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_without_other_releases_of_triton_only_a_person_can_run_the_tests(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "ready").touch()
    (tmp_path / "python").write_text(FAKE_PYTHON)
    (tmp_path / "python").chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("MAKE")}

    def make(*arguments: str, **variables: str) -> tuple[bool, bool, bool]:
        """Return whether it succeeded, whether it said what is fetched, and whether tests were run."""
        command = ["make", f"BIN={tmp_path}", "READY=ready", *arguments]
        environment = clean | {"REAL_PYTHON": sys.executable} | variables
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.stderr.count("190 MB each, once") <= 1
        return done.returncode == 0, "190 MB each, once" in done.stderr, "tests run" in done.stdout

    assert make("test", "TRITONS=1.0 2.0") == (True, True, True)
    assert [path.parent.name for path in tmp_path.glob("build/*/ready")] == [f"triton-1.0-{TAG}"]
    assert make("test", "TRITONS=1.0 2.0", CI="true") == (False, True, False)
    assert make("triton", "TRITONS=2.0") == (False, True, False)
    assert make("test", "TRITONS=1.0", CI="true") == (True, False, True)
    assert make("test", "TRITONS=2.0", "ARGS=-k one") == (True, False, True)
