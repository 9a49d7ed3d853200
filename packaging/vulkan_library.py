"""Builds the platform wheel edgelm-llama-vulkan: llama.cpp's Vulkan backend, from the same sdist as edgelm-llama.

Owns what is compiled, and the key under which a build may be used again. The wheel has the version of edgelm-llama and
requires exactly that: the backend calls functions and reads structures of its libraries. Prints the wheel's path.

    python packaging/vulkan_library.py [--out dist] [--build FOLDER]

Needs cmake, a C++ compiler, Vulkan's headers, SPIR-V's headers and glslc: those in the folder EDGELM_VULKAN_TOOLS,
which vulkan_tools.sh makes, or else the system's. JOBS sets the number of processes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from llama_libraries import fetch_sdist, plan_build, platform_tag, print_wheel, run
from llama_wheel import BuildError, is_whole, say

sys.path.insert(0, str(Path(__file__).resolve().parent / "llama"))
from backend import project, write_wheel

PROJECT = Path(__file__).resolve().parent / "llama_vulkan"
NAME, PACKAGE = "edgelm-llama-vulkan", "edgelm_llama_vulkan"
LIBRARY = "libggml-vulkan.so"
DESCRIPTION = "llama.cpp's backend for GPUs with Vulkan, for edgelm"


@dataclass(frozen=True, slots=True)
class Build:
    """One way to build the library: everything that its bytes depend on."""

    sdist: Path
    tools: Path | None  # headers and glslc; None: the system's
    compilers: str  # what the C compiler and glslc say about themselves

    @property
    def key(self) -> str:
        digest = hashlib.sha256(self.sdist.read_bytes())
        for path in (PROJECT / "CMakeLists.txt", PROJECT / PACKAGE / "__init__.py", Path(__file__)):
            digest.update(path.read_bytes())
        settings = [sysconfig.get_platform(), self.compilers]
        settings += [os.environ.get(name, "") for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CMAKE_ARGS")]
        digest.update("\n".join(settings).encode())
        return digest.hexdigest()[:16]

    @property
    def options(self) -> dict[str, str]:
        """CMake's options for the tools."""
        if self.tools is None:
            return {}
        return {
            "Vulkan_INCLUDE_DIR": str(self.tools / "usr" / "include"),
            "Vulkan_LIBRARY": str(self.tools / "libvulkan.so"),
            "Vulkan_GLSLC_EXECUTABLE": str(self.tools / "bin" / "glslc"),
            "CMAKE_PREFIX_PATH": str(self.tools / "usr"),
        }


def plan_vulkan(sdist: Path) -> Build:
    """Return the build of this machine. Raises BuildError without the tools, and on a platform without Vulkan wheel."""
    if not sys.platform.startswith("linux"):
        raise BuildError("the Vulkan wheel is for Linux; macOS's wheel of edgelm-llama has Metal")
    compiler = plan_build(sdist, "").compiler
    folder = os.environ.get("EDGELM_VULKAN_TOOLS")
    tools = Path(folder).resolve() if folder else None
    glslc = str(tools / "bin" / "glslc") if tools else "glslc"
    try:
        version = subprocess.run([glslc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"glslc is needed: {error}; packaging/vulkan_tools.sh gets it") from error
    return Build(sdist, tools, f"{compiler}\n{version}")


def ensure_wheel(build: Build, cache: Path, scratch: Path | None = None) -> Path:
    """Return the cached wheel of this build, building it where there is none."""
    folder = cache / f"vulkan-{build.key}"
    for wheel in folder.glob("*.whl"):
        if is_whole(wheel) and wheel.name == wheel_name():
            say(f"llama.cpp: cached wheel {wheel}")
            return wheel
        wheel.unlink()
    say(f"llama.cpp: compiling the Vulkan backend, up to 40 minutes of one core (key {build.key})")
    start = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as temporary:
        source = unpack_source(build.sdist, scratch or Path(temporary))
        library = compile_library(build, source)
        built = package_library(library, source / "vendor" / "llama.cpp" / "LICENSE", Path(temporary))
        wheel = Path(shutil.move(built, folder / built.name))
    say(f"llama.cpp: built in {time.monotonic() - start:.0f} s: {wheel}")
    return wheel


def unpack_source(sdist: Path, scratch: Path) -> Path:
    """Unpack the source into `scratch`, and return its folder; an earlier build may have left it there.

    Raises BuildError for the source of another release: its library would get the version of this one.
    """
    if not any(scratch.glob("llama_cpp_python-*/")):
        scratch.mkdir(parents=True, exist_ok=True)
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
    pinned = str(project()["version"]).rpartition(".")[0]  # without the number of our build
    sources = sorted(scratch.glob("llama_cpp_python-*/"))
    for source in sources:
        if (release := source_release(source)) != pinned:
            raise BuildError(f"{source} is llama-cpp-python {release}, not {pinned}: name an empty folder with --build")
    if len(sources) > 1:
        raise BuildError(f"{scratch} holds {len(sources)} sources: name an empty folder with --build")
    return sources[0]


def source_release(source: Path) -> str:
    """Return the version in an sdist's PKG-INFO; "unknown" without one, such as of an archive that is half unpacked."""
    try:
        lines = (source / "PKG-INFO").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((line.removeprefix("Version: ") for line in lines if line.startswith("Version: ")), "unknown")


def compile_library(build: Build, source: Path) -> Path:
    """Compile the backend beside its source, or finish what was compiled there before. Raises BuildError."""
    scratch = source.parent
    prefix = f"-ffile-prefix-map={scratch}=. -ffile-prefix-map={PROJECT}=."
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_C_FLAGS": f"{os.environ.get('CFLAGS', '')} {prefix}".strip(),
        "CMAKE_CXX_FLAGS": f"{os.environ.get('CXXFLAGS', '')} {prefix}".strip(),
        "SOURCE": str(source),
        **build.options,
    }
    folder, log = scratch / "b", scratch / "log"
    command = ["cmake", "-S", str(PROJECT), "-B", str(folder), *(["-GNinja"] if shutil.which("ninja") else [])]
    command += [f"-D{name}={value}" for name, value in options.items()]
    run([*command, *shlex.split(os.environ.get("CMAKE_ARGS", ""))], log)
    jobs = os.environ.get("JOBS") or str(os.cpu_count() or 1)
    run(["cmake", "--build", str(folder), "--target", "ggml-vulkan", "--parallel", jobs], log)
    run(["cmake", "--install", str(folder), "--strip", "--prefix", str(scratch / "lib")], log)
    return scratch / "lib" / LIBRARY


def package_library(library: Path, licence: Path, folder: Path) -> Path:
    """Write the wheel of a compiled library into `folder`, and return its path."""
    files = {
        f"{PACKAGE}/__init__.py": (PROJECT / PACKAGE / "__init__.py").read_bytes(),
        f"{PACKAGE}/lib/{LIBRARY}": library.read_bytes(),
        f"{PACKAGE}/licenses/llama.cpp.txt": licence.read_bytes(),
        f"{PACKAGE}/py.typed": b"",
    }
    requirement = f"edgelm-llama=={project()['version']}"
    tag = f"py3-none-{platform_tag()}"
    return write_wheel(folder, tag, files, [requirement], name=NAME, description=DESCRIPTION)


def wheel_name() -> str:
    """Return the name of the wheel, whose version is that of edgelm-llama."""
    return f"{PACKAGE}-{project()['version']}-py3-none-{platform_tag()}.whl"


def main() -> int:
    """Print the path of the wheel."""
    parser = argparse.ArgumentParser(description="Build the platform wheel of edgelm-llama-vulkan.")
    parser.add_argument("--out", type=Path, help="copy the wheel into this folder")
    parser.add_argument("--build", type=Path, help="compile in this folder, or go on there, and keep it")
    options = parser.parse_args()
    folder = options.build and options.build.resolve()
    return print_wheel(lambda cache: ensure_wheel(plan_vulkan(fetch_sdist(cache)), cache, folder), options.out)


if __name__ == "__main__":
    sys.exit(main())
