"""The completions and the manual page that the wheel holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SHARE = ROOT / "packaging" / "share"
LIMIT_S = 60

sys.path.insert(0, str(ROOT / "packaging"))
shell_files: Any = __import__("shell_files")


def test_the_files_are_those_of_the_commands() -> None:
    for path, text in shell_files.shell_files().items():
        assert (SHARE / path).read_text(encoding="utf-8") == text, "run python packaging/shell_files.py"


def test_the_wheel_has_them_all() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = setup["tool"]["setuptools"]["data-files"]
    assert {f"{folder}/{Path(file).name}" for folder, files in listed.items() for file in files} == {
        f"share/{path}" for path in shell_files.shell_files()
    }
    for folder, files in listed.items():
        assert [f"packaging/{folder}/{Path(file).name}" for file in files] == files


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_has_no_complaint_about_the_page() -> None:
    """A warning leaves its exit code at 0."""
    done = subprocess.run(
        ["groff", "-man", "-ww", "-z", "-Tutf8", SHARE / shell_files.PAGE],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_reads_its_file(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run(
        [shell, "-n", SHARE / shell_files.COMPLETIONS[shell]],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["edgelm", "ser"], ["serve", "service"]),
        (["edgelm", "service", "in"], ["install"]),
        (["edgelm", "run", "--th"], ["--think", "--threads"]),
    ],
)
def test_bash_completes_commands(words: list[str], expected: list[str], tmp_path: Path) -> None:
    program = tmp_path / "edgelm"
    program.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -c "import sys; sys.argv[0] = \'edgelm\'; '
        'from edgelm.__main__ import main; main()" "$@"\n'
    )
    program.chmod(0o755)
    script = (
        f'source "{SHARE / shell_files.COMPLETIONS["bash"]}"; COMP_WORDS=({" ".join(words)}); '
        f'COMP_CWORD={len(words) - 1}; _edgelm_completion edgelm; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert done.stdout.split() == expected, done.stderr
