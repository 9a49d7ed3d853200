"""Installs edgelm as a user does, where nothing else of it is, and runs it.

Owns the check of sdist and wheel: pip installs the one, pipx the other into an empty home; both import from another
directory, and the wheel answers a prompt. Runs in the development environment, on models that it makes itself.

    .venv/bin/python packaging/smoke.py
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("edgelm", "edgelm.kernels", "edgelm.models", "edgelm.tui")
LIMIT_S = 600
SHOWN_LINES = 40


class SmokeError(Exception):
    """Something that a user would do did not work."""


def run(*command: str | Path, cwd: Path, environment: Mapping[str, str]) -> str:
    """Run a command in `cwd` and return its standard output. Raises SmokeError with all that it printed."""
    result = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if result.returncode:
        output = "\n".join((result.stdout + result.stderr).splitlines()[-SHOWN_LINES:])
        raise SmokeError(f"exit {result.returncode} of: {' '.join(map(str, command))}\n{output}")
    return result.stdout


def require(ok: bool, what: str) -> None:
    """Raise SmokeError unless `ok`."""
    if not ok:
        raise SmokeError(what)


def clean_environment(home: Path) -> dict[str, str]:
    """Return this environment with an empty home in every way that a program may find one, and nothing of ours."""
    # pip's settings stay, also those of the real home: without them some machines reach no index.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("EDGELM_", "PIPX_", "XDG_"))}
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"):
        kept.pop(name, None)
    settings = Path.home() / ".config" / "pip" / "pip.conf"
    if settings.exists():
        kept.setdefault("PIP_CONFIG_FILE", str(settings))
    return kept | {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_DATA_HOME": str(home / ".local" / "share"),
        "XDG_STATE_HOME": str(home / ".local" / "state"),
        "PIPX_HOME": str(home / "pipx"),
        "PIPX_BIN_DIR": str(home / "bin"),
        "PIPX_MAN_DIR": str(home / "man"),
    }


def new_environment(folder: Path) -> Path:
    """Make a virtual environment and return its Python."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def build_distributions(scratch: Path) -> tuple[Path, Path]:
    """Build sdist and wheel from the checkout; the wheel is built from the sdist, as an index's users would."""
    # setuptools keeps its state in the tree, where another build may be at work: build from a copy of what git knows.
    tree = scratch / "tree"
    files = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT, environment=os.environ)
    for name in filter(None, files.split("\0")):
        source, copy = ROOT / name, tree / name
        if not source.is_symlink() and not source.exists():
            continue  # removed, and git does not know yet
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            copy.symlink_to(source.readlink())
        else:
            copy.write_bytes(source.read_bytes())
    run(sys.executable, "-m", "build", "--outdir", scratch / "dist", tree, cwd=scratch, environment=os.environ)
    (sdist,) = (scratch / "dist").glob("*.tar.gz")
    (wheel,) = (scratch / "dist").glob("*.whl")
    return sdist, wheel


def check_sdist(sdist: Path, scratch: Path, environment: Mapping[str, str]) -> None:
    """Install the sdist into a new environment, and import it."""
    python = new_environment(scratch / "sdist-venv")
    run(python, "-m", "pip", "install", "--quiet", sdist, cwd=scratch, environment=environment)
    check_import(python, sdist, scratch, environment)


def check_import(python: Path, distribution: Path, scratch: Path, environment: Mapping[str, str]) -> None:
    """Import every package from an empty folder, with the Python of an environment that has the distribution."""
    code = f"import {', '.join(PACKAGES)}; print(edgelm.__file__); print(edgelm.__version__); "
    code += "from edgelm.library.catalog import entries; entries()"  # a file of data that must be shipped
    empty = Path(tempfile.mkdtemp(dir=scratch))
    where, version = run(python, "-c", code, cwd=empty, environment=environment).splitlines()
    require(where.startswith(str(python.parents[1])), f"{distribution.name} was imported from {where}")
    require(version in distribution.name, f"{distribution.name} says that it is version {version}")


def check_wheel(wheel: Path, scratch: Path, environment: Mapping[str, str]) -> None:
    """Install the wheel with pipx into the empty home, import it, ask for its version, and let it answer."""
    pipx = new_environment(scratch / "pipx-venv")
    run(pipx, "-m", "pip", "install", "--quiet", "pipx>=1.7,<2", cwd=scratch, environment=environment)
    run(pipx, "-m", "pipx", "install", "--python", sys.executable, wheel, cwd=scratch, environment=environment)
    check_import(Path(environment["PIPX_HOME"], "venvs/edgelm/bin/python"), wheel, scratch, environment)
    command = Path(environment["PIPX_BIN_DIR"]) / "edgelm"
    version = run(command, "--version", cwd=scratch, environment=environment).strip()
    require(version == f"edgelm {wheel.name.split('-')[1]}", f"`edgelm --version` printed {version!r}")
    guide = run(command, "help", "start", cwd=scratch, environment=environment)
    require(guide.startswith("# Start\n"), f"`edgelm help start` printed {guide[:80]!r}")  # a page that must be shipped
    model = write_model(scratch / "tiny.gguf")
    options = ("--max-tokens", "8", "--temperature", "0")
    answers = [run(command, "run", model, "hello", *options, cwd=scratch, environment=environment) for _ in range(2)]
    require(bool(answers[0].strip()), "`edgelm run` answered nothing")
    require(answers[0] == answers[1], f"greedy answers differ: {answers}")


def write_model(path: Path) -> Path:
    """Write a small random model with the tests' own helper."""
    sys.path.insert(0, str(ROOT))
    written: Path = importlib.import_module("tests.tiny").write_tiny(path, quant="q8_0")
    return written


def llama_wheel_folder() -> str:
    """Return the folder of this machine's wheel of llama.cpp, so that nothing here compiles it again."""
    script = ROOT / "packaging" / "llama_wheel.py"
    return str(Path(run(sys.executable, script, cwd=ROOT, environment=os.environ).strip()).parent)


def main() -> int:
    """Do all checks, with a line for each."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="edgelm-smoke-") as folder:
        scratch = Path(folder).resolve()
        home = scratch / "home"
        home.mkdir()
        environment = clean_environment(home)
        found = f"{environment.get('PIP_FIND_LINKS', '')} {llama_wheel_folder()}"
        environment["PIP_FIND_LINKS"] = found.strip()
        try:
            sdist, wheel = build_distributions(scratch)
            print(f"smoke: built {sdist.name} and {wheel.name}", flush=True)
            check_sdist(sdist, scratch, environment)
            print(f"smoke: {sdist.name} imports from an empty folder", flush=True)
            check_wheel(wheel, scratch, environment)
            print("smoke: pipx installs the wheel into an empty home, it imports there, and edgelm answers", flush=True)
        except SmokeError as error:
            print(f"smoke: failed: {error}", file=sys.stderr)
            return 1
    print(f"smoke: passed in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
