"""Builds the platform wheel of one of llama.cpp's backends for GPUs, from the same sdist as edgelm-llama.

Owns what is the same for each: source, compilation, the key under which a build may be used again, and the wheel. The
wheel has the version of edgelm-llama and requires exactly that: the backend calls functions and reads structures of its
libraries. The tools are planned by vulkan_library.py and cuda_library.py.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llama_libraries import fetch_sdist, platform_tag, print_wheel, run, unpack_source
from llama_wheel import is_whole, say

sys.path.insert(0, str(Path(__file__).resolve().parent / "llama"))
from backend import project, write_wheel

PROJECT = Path(__file__).resolve().parent / "llama_gpu"
ENVIRONMENT = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CUDAFLAGS", "LDFLAGS", "CMAKE_ARGS")
MODULE = '''"""llama.cpp's backend for GPUs with {title}: lib/{library}, for edgelm.

edgelm loads it beside edgelm-llama's libraries. It belongs to one build of edgelm-llama, the one with the same version.
"""
'''


@dataclass(frozen=True, slots=True)
class Build:
    """One way to build the library of a backend: everything that its bytes depend on."""

    sdist: Path
    backend: str  # ggml's word: "vulkan" or "cuda"
    title: str
    tools: str  # what the compilers say about themselves, and what they are told
    options: Mapping[str, str] = field(default_factory=dict)  # CMake's, to find the tools
    requirements: tuple[str, ...] = ()  # of the wheel, beside edgelm-llama
    minutes: int = 40  # of one core

    @property
    def name(self) -> str:
        return f"edgelm-llama-{self.backend}"

    @property
    def package(self) -> str:
        return self.name.replace("-", "_")

    @property
    def library(self) -> str:
        return f"libggml-{self.backend}.so"

    @property
    def wheel_name(self) -> str:
        return f"{self.package}-{project()['version']}-py3-none-{platform_tag()}.whl"

    @property
    def key(self) -> str:
        digest = hashlib.sha256(self.sdist.read_bytes())
        for path in (PROJECT / "CMakeLists.txt", Path(__file__)):
            digest.update(path.read_bytes())
        settings = [sysconfig.get_platform(), self.title, self.tools, *self.requirements]
        settings += [os.environ.get(name, "") for name in ENVIRONMENT]
        digest.update("\n".join(settings).encode())
        return digest.hexdigest()[:16]


def ensure_wheel(build: Build, cache: Path, scratch: Path | None = None) -> Path:
    """Return the cached wheel of this build, building it where there is none."""
    folder = cache / f"{build.backend}-{build.key}"
    for wheel in folder.glob("*.whl"):
        if is_whole(wheel) and wheel.name == build.wheel_name:
            say(f"llama.cpp: cached wheel {wheel}")
            return wheel
        wheel.unlink()
    say(f"llama.cpp: compiling the {build.title} backend, up to {build.minutes} minutes of one core (key {build.key})")
    start = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as temporary:
        source = unpack_source(build.sdist, scratch or Path(temporary))
        library = compile_library(build, source)
        built = package_library(build, library, source / "vendor" / "llama.cpp" / "LICENSE", Path(temporary))
        wheel = Path(shutil.move(built, folder / built.name))
    say(f"llama.cpp: built in {time.monotonic() - start:.0f} s: {wheel}")
    return wheel


def compile_library(build: Build, source: Path) -> Path:
    """Compile the backend beside its source, or finish what was compiled there before. Raises BuildError."""
    scratch = source.parent
    # Paths of this build would be bytes that change.
    prefixes = [f"-ffile-prefix-map={folder}=." for folder in (scratch, PROJECT)]
    prefix = " ".join(prefixes)
    of_nvcc = " ".join(f"-Xcompiler={flag}" for flag in prefixes)
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_C_FLAGS": f"{os.environ.get('CFLAGS', '')} {prefix}".strip(),
        "CMAKE_CXX_FLAGS": f"{os.environ.get('CXXFLAGS', '')} {prefix}".strip(),
        "CMAKE_CUDA_FLAGS": f"{os.environ.get('CUDAFLAGS', '')} {of_nvcc}".strip(),
        "SOURCE": str(source),
        "BACKEND": build.backend,
        **build.options,
    }
    folder, log = scratch / "b", scratch / "log"
    command = ["cmake", "-S", str(PROJECT), "-B", str(folder), *(["-GNinja"] if shutil.which("ninja") else [])]
    command += [f"-D{name}={value}" for name, value in options.items()]
    run([*command, *shlex.split(os.environ.get("CMAKE_ARGS", ""))], log)
    jobs = os.environ.get("JOBS") or str(os.cpu_count() or 1)
    run(["cmake", "--build", str(folder), "--target", f"ggml-{build.backend}", "--parallel", jobs], log)
    run(["cmake", "--install", str(folder), "--strip", "--prefix", str(scratch / "lib")], log)
    return scratch / "lib" / build.library


def package_library(build: Build, library: Path, licence: Path, folder: Path) -> Path:
    """Write the wheel of a compiled library into `folder`, and return its path."""
    files = {
        f"{build.package}/__init__.py": MODULE.format(title=build.title, library=build.library).encode(),
        f"{build.package}/lib/{build.library}": library.read_bytes(),
        f"{build.package}/licenses/llama.cpp.txt": licence.read_bytes(),
        f"{build.package}/py.typed": b"",
    }
    requirements = (f"edgelm-llama=={project()['version']}", *build.requirements)
    description = f"llama.cpp's backend for GPUs with {build.title}, for edgelm"
    tag = f"py3-none-{platform_tag()}"
    return write_wheel(folder, tag, files, requirements, name=build.name, description=description)


def build_and_print(title: str, plan: Callable[[Path, Path], Build]) -> int:
    """Make the wheel that the command line asks for, and print its path; `plan` gets the sdist and the cache folder."""
    parser = argparse.ArgumentParser(description=f"Build the platform wheel of llama.cpp's backend for {title}.")
    parser.add_argument("--out", type=Path, help="copy the wheel into this folder")
    parser.add_argument("--build", type=Path, help="compile in this folder, or go on there, and keep it")
    options = parser.parse_args()
    folder = options.build and options.build.resolve()
    return print_wheel(lambda cache: ensure_wheel(plan(fetch_sdist(cache), cache), cache, folder), options.out)
