"""Builds the llama-cpp-python wheel for this machine once, and keeps it in a cache outside the checkout.

Owns the build's flags, and the key under which a build may be used again. Uses the standard library only, since it
runs before anything is installed. Prints the wheel's path on standard output, everything else on standard error.

    python packaging/llama_wheel.py
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NAME = "llama-cpp-python"
PYPROJECT = Path(__file__).resolve().parent / "llama" / "pyproject.toml"
SOURCE = Path(__file__).resolve().parent / "llama_source.py"
# edgelm calls none of llama.cpp's own programs, and libmtmd reads pictures without the program ffmpeg for videos.
# A normal variable of CMake hides the cache entry of the same name, which llama-cpp-python's CMakeLists.txt forces.
LEFT_OUT = 'set(LLAMA_BUILD_COMMON OFF)\nset(MTMD_VIDEO OFF CACHE BOOL "" FORCE)\n'
CORRECT = 'execute_process(COMMAND "{python}" "{script}" "${{CMAKE_CURRENT_SOURCE_DIR}}" COMMAND_ERROR_IS_FATAL ANY)\n'
BUILD_VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CMAKE_ARGS")


class BuildError(Exception):
    """The wheel cannot be built here; the message says why."""


@dataclass(frozen=True, slots=True)
class Build:
    """One way to build the wheel: everything that its contents depend on."""

    requirement: str
    environment: Mapping[str, str]  # BUILD_VARIABLES
    target: str  # what the compiler says about itself and about this processor

    @property
    def key(self) -> str:
        parts = [self.requirement, LEFT_OUT, SOURCE.read_text(encoding="utf-8"), sysconfig.get_platform()]
        parts += [platform.machine(), self.target, *_flags()]
        parts += [f"{name}={value}" for name, value in sorted(self.environment.items())]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _flags() -> list[str]:
    """Return cmake's flags for a kind of machine: Intel Macs have no Metal, as edgelm's devices.py explains."""
    return ["-DGGML_METAL=OFF"] if (sys.platform, platform.machine()) == ("darwin", "x86_64") else []


def pinned_requirement(pyproject: Path = PYPROJECT) -> str:
    """Return the requirement of llama-cpp-python as pyproject.toml states it."""
    dependencies: list[str] = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"]
    return next(requirement for requirement in dependencies if requirement.startswith(NAME))


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the cached wheels: `EDGELM_WHEEL_CACHE`, or one in the user's cache folder."""
    if folder := environment.get("EDGELM_WHEEL_CACHE"):
        return Path(folder).expanduser().resolve()
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgelm-wheels"


def plan_build(environment: Mapping[str, str]) -> Build:
    """Return how this machine builds the wheel. Raises BuildError without a working C compiler."""
    compiler = shlex.split(environment.get("CC") or "cc")
    target = native_target(compiler)
    variables = {name: environment[name] for name in BUILD_VARIABLES if environment.get(name)}
    return Build(pinned_requirement(), variables, target)


def native_target(compiler: list[str]) -> str:
    """Return what the compiler defines for this processor: its version, and each instruction set that it will use.

    llama.cpp is built for the machine that builds it, so a wheel of another processor may be an illegal instruction.
    """
    for native in ("-march=native", "-mcpu=native", None):
        command = [*compiler, *([native] if native else []), "-dM", "-E", "-x", "c", "-"]
        try:
            result = subprocess.run(command, input="", capture_output=True, text=True, check=False)
        except OSError as error:
            raise BuildError(f"no C compiler: {compiler[0]}: {error.strerror}; install one or set CC") from error
        if result.returncode == 0:
            return "\n".join(sorted(result.stdout.splitlines()))
    raise BuildError(f"the C compiler {compiler[0]} does not work: {result.stderr.strip()}")


def is_whole(wheel: Path) -> bool:
    """Tell whether every file in the wheel reads back with its checksum."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, ValueError):
        return False


def ensure_wheel(build: Build, cache: Path) -> Path:
    """Return the cached wheel of this build, building it where there is none or a damaged one.

    Several may do so at once: each builds in a folder of its own, and the last to finish replaces the others' file.
    """
    folder = cache / build.key
    for wheel in sorted(folder.glob("*.whl")):
        if is_whole(wheel):
            say(f"llama.cpp: cached wheel {wheel}")
            return wheel
        say(f"llama.cpp: {wheel} is damaged, building it again")
        wheel.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    say(f"llama.cpp: building {build.requirement} for this machine, some minutes (key {build.key})")
    with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as scratch:
        built = build_wheel(build, Path(scratch))
        wheel = folder / built.name
        built.replace(wheel)
    say(f"llama.cpp: built in {time.monotonic() - start:.0f} s: {wheel}")
    return wheel


def build_wheel(build: Build, scratch: Path) -> Path:
    """Build the wheel into `scratch`. Raises BuildError, with the whole output shown before."""
    # Without pip's cache, which knows a built wheel by its source alone and would ignore our flags and this processor.
    command = [sys.executable, "-m", "pip", "wheel", "--no-cache-dir", "--no-deps", "--no-binary", NAME]
    command += ["--wheel-dir", str(scratch), build.requirement]
    before = scratch / "before.cmake"
    script = CORRECT.format(python=Path(sys.executable).as_posix(), script=SOURCE.as_posix())
    before.write_text(LEFT_OUT + script, encoding="utf-8")
    environment = os.environ | build.environment
    flags = [*_flags(), shlex.quote(f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={before}")]
    environment["CMAKE_ARGS"] = " ".join([environment.get("CMAKE_ARGS", ""), *flags]).strip()
    log = scratch / "log"
    with log.open("wb") as output:
        result = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if result.returncode:
        sys.stderr.write(log.read_text(encoding="utf-8", errors="replace"))
        raise BuildError("the wheel of llama-cpp-python was not built; its output is above")
    (wheel,) = scratch.glob("*.whl")
    if not is_whole(wheel):
        raise BuildError(f"pip left a damaged wheel: {wheel.name}")
    return wheel


def say(text: str) -> None:
    """Print one line for the person who waits."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Print the path of this machine's wheel."""
    try:
        build = plan_build(os.environ)
        print(ensure_wheel(build, cache_folder(os.environ)))
    except BuildError as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
