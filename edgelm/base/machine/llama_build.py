"""Which build of llama.cpp is installed: that of edgelm-llama, or llama-cpp-python, compiled here or somebody's wheel.

Owns the choice between the two. Loads nothing of either, so that the front may ask; llama_binding.py loads the choice.
"""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from edgelm.base.errors import EngineError
from edgelm.base.machine.cpu import read_text

SUPPORTED = "0.3.36"  # of llama-cpp-python: another release has other structures (packaging/llama/pyproject.toml)
COMPILED, READY_MADE = "llama-cpp-python", "edgelm-llama"
INSTALL = f"reinstall edgelm, or: pip install llama-cpp-python=={SUPPORTED}"


@dataclass(frozen=True, slots=True)
class GpuWheel:
    """A wheel with one of llama.cpp's backends for GPUs."""

    backend: str  # ggml's word
    extra: str  # of edgelm

    @property
    def package(self) -> str:
        return f"{READY_MADE}-{self.backend}"

    @property
    def hint(self) -> str:
        return f"reinstall 'edgelm[{self.extra}]'"


# In the order in which they are loaded: a GPU that several know is the first one's.
GPU_WHEELS = (GpuWheel("cuda", "llama-cuda"), GpuWheel("vulkan", "vulkan"))


@dataclass(frozen=True, slots=True)
class InstalledLlama:
    """A build of llama.cpp: the package that it came with, and the folder of its libraries."""

    package: str
    version: str
    lib_dir: Path

    @property
    def ready_made(self) -> bool:
        """Whether it is our wheel, which holds its backends as files of their own."""
        return self.package == READY_MADE

    @property
    def label(self) -> str:
        """Package, version, the platform of its wheel, and its backends: a wheel of somebody else's is told by them."""
        names = {path.name.partition(".")[0] for path in self.lib_dir.glob("libggml-*")}
        backends = sorted({name.split("-")[1] for name in names} - {"base"})
        parts = [_platform(self.package), *([f"with {', '.join(backends)}"] if backends else [])]
        return f"{self.package} {self.version} ({', '.join(filter(None, parts))})"


def find_build() -> InstalledLlama:
    """Return the build to use. One that was compiled here was installed on purpose, so it comes first.

    Raises EngineError if there is none of the supported release.
    """
    compiled = package_folder("llama_cpp")
    other = _version(COMPILED) if compiled else ""
    if compiled and other.partition("+")[0] == SUPPORTED:
        return InstalledLlama(COMPILED, other, compiled / "lib")
    if ready_made := package_folder("edgelm_llama"):
        return InstalledLlama(READY_MADE, _version(READY_MADE), ready_made / "lib")
    if compiled:
        raise EngineError(f"edgelm works with llama-cpp-python {SUPPORTED}, and {other} is installed", INSTALL)
    raise EngineError("llama.cpp is not installed", INSTALL)


def gpu_backend_command(build: InstalledLlama, backend: str, prefix: Path = Path(sys.prefix)) -> str:
    """Return what to type so that llama.cpp computes on a GPU with a backend of ggml, by how edgelm was installed."""
    if not build.ready_made:  # it has backends of its own, and has to be compiled with another one
        return "`edgelm help gpu` has the command"
    return install_command(f"{READY_MADE}-{backend}", prefix)


def installed_with(prefix: Path) -> Literal["pipx", "uv", ""]:
    """Return the tool whose environment this is, by its path or the file in it; empty: neither."""
    if "pipx" in prefix.parts or (prefix / "pipx_metadata.json").exists():
        return "pipx"
    return "uv" if {"uv", "tools"} <= {*prefix.parts} or (prefix / "uv-receipt.toml").exists() else ""


def install_command(requirement: str, prefix: Path = Path(sys.prefix), *, other_release: bool = False) -> str:
    """Return what to type so that pip installs something beside edgelm, perhaps another release of what is there."""
    tool = installed_with(prefix)
    if tool == "uv":
        return _uv_command(prefix, requirement)
    requirement = shlex.quote(requirement)
    if tool == "pipx":  # `inject` leaves alone what is there
        return f"type: pipx {'runpip edgelm install' if other_release else 'inject edgelm'} {requirement}"
    return f"type: {shlex.quote(str(prefix / 'bin' / 'python'))} -m pip install {requirement}"


def extra_command(extra: str, prefix: Path = Path(sys.prefix)) -> str:
    """Return what to type so that pip installs what an extra of edgelm names, beside edgelm as it is."""
    return install_command(f"edgelm[{extra}]", prefix, other_release=True)


def _uv_command(prefix: Path, requirement: str) -> str:
    """Return what to type to uv, whose `tool install` removes what it does not name.

    So it names all that the receipt has. Where that is from elsewhere, or with options, the command adds only.
    """
    python = shlex.quote(str(prefix / "bin" / "python"))
    try:
        tool = tomllib.loads(read_text(prefix / "uv-receipt.toml") or "")["tool"]
        there = [_requirement(entry) for entry in tool["requirements"]]
    except (KeyError, TypeError, ValueError):
        tool, there = {"options": "unknown"}, []
    if tool.get("options") or "" in there:
        return f"type: uv pip install --python {python} {shlex.quote(requirement)}"
    parts = {_name(one): one for one in there}
    own, new = parts.pop("edgelm", "edgelm"), _name(requirement)
    if new == "edgelm":
        extras = sorted({*_extras(own), *_extras(requirement)})
        release = re.sub(r"^edgelm(\[.*?\])?", "", own)
        own = f"edgelm[{','.join(extras)}]{release}"
    else:
        parts[new] = requirement
    return f"type: uv tool install {shlex.quote(own)}" + "".join(
        f" --with {shlex.quote(one)}" for one in parts.values()
    )


def _requirement(entry: dict[str, Any]) -> str:
    """Return an entry of uv's receipt as a requirement; empty where it has more than that: a path, an address."""
    if entry.keys() - {"name", "extras", "specifier"}:
        return ""
    extras = f"[{','.join(entry['extras'])}]" if entry.get("extras") else ""
    return f"{entry['name']}{extras}{entry.get('specifier', '')}"


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _extras(requirement: str) -> list[str]:
    found = re.search(r"\[(.*)\]", requirement)
    return [extra.strip() for extra in found[1].split(",")] if found else []


def gpu_library(wheel: GpuWheel, build: InstalledLlama) -> Path | None:
    """Return the backend in a wheel; None if that is not installed.

    Raises EngineError if it belongs to another build: it calls the functions and reads the structures of this one.
    """
    folder = package_folder(wheel.package.replace("-", "_"))
    if folder is None:
        return None
    if not build.ready_made:
        raise EngineError(
            f"{wheel.package} is not used beside {build.package}, which has backends of its own",
            f"uninstall {build.package}, or take one with {wheel.backend}",
        )
    ours = _version(wheel.package)
    if ours != build.version:
        raise EngineError(f"{wheel.package} {ours} is not used, for {READY_MADE} is {build.version}", wheel.hint)
    return folder / "lib" / f"libggml-{wheel.backend}.so"


def has_gpu_backend() -> bool:
    """Return whether a backend for GPUs with memory of their own is installed, of use here or not."""
    try:
        names = [path.name for path in find_build().lib_dir.glob("libggml-*")]
    except EngineError:
        return False
    installed = (package_folder(wheel.package.replace("-", "_")) for wheel in GPU_WHEELS)
    return any(name.startswith(f"libggml-{wheel.backend}.") for name in names for wheel in GPU_WHEELS) or any(installed)


def package_folder(name: str) -> Path | None:
    """Return the folder of a top-level package; None if it is not installed."""
    spec = find_spec(name)
    return Path(spec.origin).resolve().parent if spec and spec.origin else None


def _platform(package: str) -> str:
    """Return the platform of an installed wheel: linux_… if pip compiled it, manylinux_… if somebody published it."""
    try:
        wheel = distribution(package).read_text("WHEEL") or ""
    except PackageNotFoundError:
        return ""
    tag = re.search(r"^Tag: \S*-(\S+)$", wheel, re.MULTILINE)
    return tag[1] if tag else ""


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
