"""How this installation of edgelm is brought up to date: doctor's line `upgrade`.

Owns the commands of pip, pipx, uv and others, and where pip's record says that edgelm came from. Runs none of them.
"""

from __future__ import annotations

import json
import shlex
import urllib.request
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from edgelm.base.machine.llama_build import installed_with


@dataclass(frozen=True, slots=True)
class Origin:
    """What edgelm was installed from; with neither a folder nor a repository, a package."""

    folder: str = ""  # a checkout
    editable: bool = False  # it runs in the folder
    repository: str = ""  # as pip takes it: git+https://HOST/NAME@REVISION


def upgrade_command(prefix: Path, origin: Origin) -> str:
    """Return how this installation is brought up to date, judged by where it is. edgelm never replaces itself."""
    if origin.editable:
        return f"git pull in {origin.folder}"
    if "Cellar" in prefix.parts:
        return "brew upgrade edgelm"
    if prefix.parts[:3] == ("/", "nix", "store"):
        return "this installation is Nix's: update its input"
    command = _tool_command(prefix, origin)
    return f"git pull in {origin.folder}, then {command}" if origin.folder else command


def installed_from() -> Origin:
    """Return what edgelm was installed from, by PEP 610."""
    try:
        record = json.loads(distribution("edgelm").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        return Origin()
    if "dir_info" in record:
        folder = urllib.request.url2pathname(record["url"].removeprefix("file://"))
        return Origin(folder, editable=bool(record["dir_info"].get("editable")))
    if "vcs_info" in record:
        info = record["vcs_info"]
        revision = f"@{info['requested_revision']}" if info.get("requested_revision") else ""
        folder = f"#subdirectory={record['subdirectory']}" if record.get("subdirectory") else ""
        return Origin(repository=f"{info['vcs']}+{record['url']}{revision}{folder}")
    return Origin()


def _tool_command(prefix: Path, origin: Origin) -> str:
    """Return the command of the tool that installed edgelm."""
    tool = installed_with(prefix)
    if tool == "uv":  # it remembers the origin, but builds a folder again only where its pyproject.toml has changed
        return "uv tool upgrade edgelm" + (" --reinstall-package edgelm" if origin.folder else "")
    # Behind an extra that runpip added, pipx has forgotten the origin, and its upgrade does nothing.
    install = "pipx runpip edgelm install" if tool == "pipx" else f"{_python(prefix)} -m pip install"
    if origin.repository:
        # pip keeps what has the same version, unless it is forced to; then it would replace all requirements, too.
        repository = shlex.quote(origin.repository)
        return f"{install} --force-reinstall --no-deps {repository} && {install} {repository}"
    if tool == "pipx" and not origin.folder:
        return "pipx upgrade edgelm"
    return f"{install} --upgrade {shlex.quote(origin.folder or 'edgelm')}"


def _python(prefix: Path) -> str:
    return shlex.quote(str(prefix / "bin" / "python"))
