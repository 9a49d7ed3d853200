"""`edgelm doctor`: what this machine can run, and what is wrong with it, one line each.

Owns the checks and how they are shown. Each check returns findings; it never raises for what it finds.
"""

from __future__ import annotations

import http.client
import json
import os
import platform
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape

from edgelm import __version__
from edgelm.commands.choice import model_dirs
from edgelm.commands.config import settings_of
from edgelm.commands.engine_choice import ask_cuda
from edgelm.config import Config, Places, load_config
from edgelm.errors import EdgeLMError
from edgelm.executors import machine
from edgelm.executors.cores import usable_cores
from edgelm.executors.gpus import nvidia_gpus
from edgelm.executors.memory import available_memory_bytes
from edgelm.library.local import scan

State = Literal["ok", "note", "problem"]
LOW_MEMORY_BYTES = 2 * 2**30
LOW_DISK_BYTES = 5 * 2**30
HUB_TIMEOUT_S = 5
MAX_SAID = 3
PACKAGES = ("llama-cpp-python", "numpy", "textual", "openai", "torch", "triton")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; a problem says in `hint` what to do."""

    topic: str
    state: State
    text: str
    hint: str = ""


def show_health(as_json: bool) -> int:
    """Print the report; return the exit code: 1 if there is a problem."""
    console, signs = Console(), {"ok": "[green]✓[/]", "note": "[yellow]•[/]", "problem": "[red]✗[/]"}
    found = []
    for finding in examine():
        found.append(finding)
        if not as_json:
            hint = f"; {finding.hint}" if finding.hint else ""
            console.print(
                f"{signs[finding.state]} [bold]{finding.topic}[/]: {escape(finding.text + hint)}", soft_wrap=True
            )
    if as_json:
        print(json.dumps({"version": __version__, "findings": [asdict(finding) for finding in found]}))
    return 1 if any(finding.state == "problem" for finding in found) else 0


def examine() -> Iterator[Finding]:
    """Yield all findings, the quick ones first."""
    yield Finding("edgelm", "ok", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    yield Finding("packages", "ok", ", ".join(_versions()))
    config = None
    try:
        config = load_config({})
    except EdgeLMError as error:
        yield Finding("settings", "problem", error.message, error.hint)
    if config:
        yield from _settings(config)
        yield _models(config)
    places = config.places if config else Places(os.environ)
    yield from _folders(places)
    yield from _resources()
    yield from _native(places)
    yield _gpu()
    yield _hub(places)


def _versions() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def _settings(config: Config) -> Iterator[Finding]:
    changed = [f"{name} = {value} ({source})" for name, value, source, _ in settings_of(config) if source != "default"]
    yield Finding("settings", "ok", ", ".join(changed) or "all are the defaults")


def _models(config: Config) -> Finding:
    library = scan(config.places.hub, folders=model_dirs(config))
    count = len(library.models)
    if library.problems:
        hint = "correct the setting, or the permissions"
        return Finding("models", "problem", f"{count} found; {'; '.join(library.problems[:MAX_SAID])}", hint)
    return Finding("models", "ok", f"{count} found")


def _folders(places: Places) -> Iterator[Finding]:
    for name, folder in (("config", places.config), ("data", places.data), ("cache", places.cache)):
        existing = _nearest(folder)
        if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
            yield Finding(
                f"{name} folder",
                "problem",
                f"{folder} cannot be written",
                f"chmod it, or set EDGELM_{name.upper()}_DIR",
            )
        else:
            yield Finding(f"{name} folder", "ok", str(folder))
    for name, folder in (("chats and settings", places.data), ("models", places.hub)):
        existing = _nearest(folder)
        free = shutil.disk_usage(existing).free
        low = free < LOW_DISK_BYTES
        hint = "make room before you fetch a model" if low else ""
        yield Finding(f"disk for {name}", "note" if low else "ok", f"{_gib(free)} GiB free at {existing}", hint)


def _nearest(folder: Path) -> Path:
    """Return the folder, or what there is of the way to it that can be looked at."""
    for each in (folder, *folder.parents):
        with suppress(OSError):
            if each.exists():
                return each
    return Path("/")


def _resources() -> Iterator[Finding]:
    cores = usable_cores()
    total = os.cpu_count() or cores.logical
    limited = f" of {total} (limited by affinity or a container)" if cores.logical < total else ""
    yield Finding(
        "processor", "ok", f"{_processor_name()}: {cores.physical} physical cores, {cores.logical} logical{limited}"
    )
    free = available_memory_bytes()
    if free < LOW_MEMORY_BYTES:
        yield Finding(
            "memory", "problem", f"{_gib(free)} GiB free", "close other programs: even small models need 2 GiB"
        )
    else:
        yield Finding("memory", "ok", f"{_gib(free)} GiB free")


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _native(places: Places) -> Iterator[Finding]:
    try:
        facts = machine.facts(places.cache, notify=lambda line: print(line, file=sys.stderr))
        facts.require_working()
    except EdgeLMError as error:
        yield Finding("llama.cpp", "problem", error.message, error.hint)
        return
    asked = subprocess.run(
        [sys.executable, "-P", "-m", "edgelm.executors.build_info"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if asked.returncode:
        yield Finding("llama.cpp", "problem", "it works, but does not tell its features", "reinstall llama-cpp-python")
        return
    info = json.loads(asked.stdout)
    yield Finding("llama.cpp", "ok", f"{info['version']}, uses {' '.join(info['features'])}")
    if facts.repack:
        waits = ", ".join(f"{policy} {time:.2f} ms a token" for policy, time in facts.token_ms.items())
        yield Finding(
            "canary", "ok", f"fast kernels are safe here; threads wait {facts.wait_policy} ({waits or 'not measured'})"
        )
    else:
        yield Finding(
            "canary",
            "problem",
            f"with its fast kernels llama.cpp {facts.reason}; plain ones are used",
            machine.REINSTALL,
        )


def _gpu() -> Finding:
    """Tell whether our kernels run on a GPU here, and if not, why; whatever is there, models run on the processor."""
    if sys.platform == "darwin":
        return Finding("GPU", "note", "llama.cpp's build decides (Metal): --device gpu asks for it")
    gpus = nvidia_gpus()
    try:
        state = ask_cuda()
    except EdgeLMError as error:
        return Finding("GPU", "problem", error.message, error.hint)
    if not state.problem:
        return Finding("GPU", "ok", f"{state.name}: {_gib(state.free_bytes)} of {_gib(state.total_bytes)} GiB free")
    if not gpus and not state.name:
        return Finding("GPU", "ok", f"{state.problem}; models run on the processor")
    names = ", ".join(gpu.name for gpu in gpus) or state.name
    return Finding("GPU", "note", f"{names} is not used: {state.problem}", state.hint)


def _hub(places: Places) -> Finding:
    request = urllib.request.Request(places.hub_endpoint, method="HEAD")  # noqa: S310 - the user's own setting
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S):  # noqa: S310 - as above
            pass
    except urllib.error.HTTPError:
        pass  # it answered
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return Finding(
            "model hub", "note", f"{places.hub_endpoint} cannot be reached ({reason}); models that are here work"
        )
    return Finding("model hub", "ok", f"{places.hub_endpoint} answers")


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"
