"""The build backend of edgelm-llama, and the writer of its wheels: the same files give the same bytes.

Owns the formats of wheel and sdist, and what is said where pip compiles llama.cpp, also from a checkout of edgelm. Uses
the standard library only, so that a build needs nothing from an index. A wheel that is built from the sdist holds no
libraries: it requires llama-cpp-python, which pip then compiles.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import io
import os
import re
import shutil
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCES = ("LICENSE", "backend.py", "pyproject.toml")
EPOCH = 1_767_225_600  # 2026-01-01, where SOURCE_DATE_EPOCH is not set; zip knows no time before 1980
TERMINAL = Path("/dev/tty")
COMPILERS = ("cc", "gcc", "clang")
NOTICE = (
    "edgelm: pip found no ready-made llama.cpp, so it compiles one: some minutes. To avoid that: Linux (glibc, x86_64 "
    "or aarch64) or macOS, a current pip, and no --no-binary\n"
)
NO_COMPILER = "there is no ready-made llama.cpp for this platform, and no C compiler to make it: install one, or set CC"
# The same for a checkout, whose pip may find a wheel where it was told to look.
MAY_COMPILE = (
    "edgelm: pip now compiles llama.cpp, unless it finds a wheel of llama-cpp-python: 5 to 20 minutes. To avoid that: "
    "--find-links FOLDER or --extra-index-url ADDRESS with such a wheel (pipx: --pip-args), or `make dist` (README)\n"
)
CANNOT_COMPILE = (
    "edgelm: pip must compile llama.cpp, and there is no C++ compiler. Install one (Debian, Ubuntu: apt install g++; "
    "Fedora: dnf install gcc-c++), or name a place with a wheel of llama-cpp-python: --find-links FOLDER or "
    "--extra-index-url ADDRESS (with pipx: --pip-args)"
)
CXX_COMPILERS = ("c++", "g++", "clang++")
INSTALLED = "lib/python*/site-packages/llama_cpp_python-*.dist-info"
NAMED_PYTHON = re.compile(r"\0(?:--python[=\0]|-p\0)([^\0]+)")  # in a command of uv: a program or an environment
UV_ENVIRONMENT = re.compile(r"(?:^|\0)(?:VIRTUAL_ENV|CONDA_PREFIX)=([^\0]+)")
INSTALLS = {"install", "wheel", "download", "sync"}  # commands of pip, pipx and uv
PLACES = re.compile(r"find[-_]links|index[-_]url|--(default-)?index\b|UV_(DEFAULT_)?INDEX", re.IGNORECASE)


def project() -> Mapping[str, object]:
    """Return pyproject.toml's table `project`."""
    table: Mapping[str, object] = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def metadata(requirements: Iterable[str], **changes: str) -> str:
    """Return the text of METADATA. `changes` replace entries of the project: another distribution of this version."""
    table = {**project(), **changes}
    lines = ["Metadata-Version: 2.4", f"Name: {table['name']}", f"Version: {table['version']}"]
    lines += [f"Summary: {table['description']}", f"License-Expression: {table['license']}", "License-File: LICENSE"]
    lines += [f"Requires-Python: {table['requires-python']}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    return "\n".join(lines) + "\n"


def write_wheel(
    folder: Path, tag: str, files: Mapping[str, bytes], requirements: Iterable[str], **changes: str
) -> Path:
    """Write a wheel of `files` into `folder`, with times and order that do not change, and return its path.

    `changes` are those of `metadata`.
    """
    table = {**project(), **changes}
    stem = f"{str(table['name']).replace('-', '_')}-{table['version']}"
    info = f"{stem}.dist-info"
    pure = tag.endswith("-any")
    members = dict(sorted(files.items()))
    members[f"{info}/METADATA"] = metadata(requirements, **changes).encode()
    members[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: edgelm\nRoot-Is-Purelib: {str(pure).lower()}\nTag: {tag}\n".encode()
    )
    members[f"{info}/licenses/LICENSE"] = (FOLDER / "LICENSE").read_bytes()
    record = f"{info}/RECORD"
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in members.items()]
    members[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    path = folder / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in members.items():
            entry = zipfile.ZipInfo(name, _zip_time())
            entry.external_attr = (0o100755 if ".so" in name or name.endswith(".dylib") else 0o100644) << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED, 9)
    return path


def write_sdist(folder: Path) -> Path:
    """Write the sdist into `folder` and return its path."""
    stem = f"edgelm_llama-{project()['version']}"
    members = {name: (FOLDER / name).read_bytes() for name in SOURCES}
    members["PKG-INFO"] = metadata(_requirements()).encode()
    path = folder / f"{stem}.tar.gz"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in sorted(members.items()):
            entry = tarfile.TarInfo(f"{stem}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), _epoch(), 0o644
            archive.addfile(entry, io.BytesIO(data))
    path.write_bytes(gzip.compress(packed.getvalue(), 9, mtime=_epoch()))
    return path


def _requirements() -> list[str]:
    requirements = project()["dependencies"]
    assert isinstance(requirements, list)
    return requirements


def _epoch() -> int:
    return int(os.environ.get("SOURCE_DATE_EPOCH") or EPOCH)


def _zip_time() -> tuple[int, int, int, int, int, int]:
    return time.gmtime(_epoch())[:6]


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _tell(text: str) -> None:
    """Write to the terminal of the person who waits: pip hides our output, and pipx gives it no terminal."""
    for terminal in (TERMINAL, *_terminals_of_callers()):
        with contextlib.suppress(OSError), terminal.open("w", encoding="utf-8") as stream:
            stream.write(text)
            return


def _callers() -> Iterator[int]:
    """Yield the processes that started this one, the nearest first; none without Linux's /proc."""
    pid = os.getppid()
    while pid > 1:
        yield pid
        stat = _read(f"/proc/{pid}/stat")
        if not stat:
            return
        pid = int(stat.rpartition(")")[2].split()[1])  # the name before it may hold anything


def _terminals_of_callers() -> Iterator[Path]:
    """Yield the terminals of the processes that started this one."""
    for pid in _callers():
        for number in (2, 1, 0):
            with contextlib.suppress(OSError):
                path = Path(f"/proc/{pid}/fd/{number}").readlink()
                if str(path).startswith(("/dev/pts/", "/dev/tty")):
                    yield path


def tell_of_the_compiler(prefix: str) -> None:
    """Say that pip compiles llama.cpp for an environment. Raises SystemExit where it can do that in no way."""
    if any(any(Path(folder).glob(INSTALLED)) for folder in (prefix, *_environments_of_uv())):
        return
    if os.environ.get("CXX") or any(map(shutil.which, CXX_COMPILERS)) or _places_are_named(prefix):
        _tell(f"\n{MAY_COMPILE}")
        return
    _tell(f"\n{CANNOT_COMPILE}\n")
    raise SystemExit(f"error: {CANNOT_COMPILE}")


def _environments_of_uv() -> Iterator[str]:
    """Yield the environments that uv may install into: it builds in one of its own, where pip builds in the user's."""
    for pid in _callers():
        command = _read(f"/proc/{pid}/cmdline")
        if Path(command.partition("\0")[0]).name != "uv":
            continue
        words = {*command.split("\0")}
        if "tool" in words and words & {"install", "upgrade"}:
            # The environment of the tool: --python names the interpreter that it is made with.
            data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")  # noqa: PTH111
            yield os.environ.get("UV_TOOL_DIR", f"{data}/uv/tools") + "/edgelm"
            continue
        folder = Path()
        with contextlib.suppress(OSError):
            folder = Path(f"/proc/{pid}/cwd").readlink()  # the paths of its command begin there
        for python in NAMED_PYTHON.findall(command):
            yield from (str(folder / python), str((folder / python).parent.parent))
        yield from UV_ENVIRONMENT.findall(_read(f"/proc/{pid}/environ"))
        yield str(folder / ".venv")


def _places_are_named(prefix: str) -> bool:
    """Tell whether the person named places beside the index: in a command, the environment, or a file of pip or uv."""
    commands = [_read(f"/proc/{pid}/cmdline") for pid in _callers()]
    texts = [" ".join(os.environ), *(command for command in commands if INSTALLS & {*command.split("\0")})]
    home, system = os.environ.get("XDG_CONFIG_HOME") or "~/.config", ("/etc/pip.conf", "/etc/uv/uv.toml")
    files = [os.environ.get("PIP_CONFIG_FILE", ""), f"{prefix}/pip.conf", "~/.pip/pip.conf", *system]
    files += [f"{home}/{name}" for name in ("pip/pip.conf", "uv/uv.toml")]
    return any(map(PLACES.search, [*texts, *(_read(os.path.expanduser(name)) for name in files)]))  # noqa: PTH111


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# -- the functions that pip and build call -----------------------------------------------------------------------------


def build_wheel(wheel_directory: str, _settings: object = None, _metadata: object = None) -> str:
    """Write the wheel that makes pip compile llama-cpp-python, and say so. Raises SystemExit without a compiler."""
    if not (os.environ.get("CC") or any(map(shutil.which, COMPILERS))):
        raise SystemExit(f"error: {NO_COMPILER}")
    _tell(f"\n{NOTICE}")
    return write_wheel(Path(wheel_directory), "py3-none-any", {}, _requirements()).name


def build_sdist(sdist_directory: str, _settings: object = None) -> str:
    """Write the sdist."""
    return write_sdist(Path(sdist_directory)).name
