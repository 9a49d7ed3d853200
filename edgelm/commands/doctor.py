"""`edgelm doctor`: print what this machine can run and what is wrong with it, one line for each finding.

Owns the checks and their output. A check returns findings; it never raises for a problem that it finds.
"""

from __future__ import annotations

import http.client
import json
import os
import platform
import re
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from edgelm import __version__
from edgelm.backends.llama.placement import Device
from edgelm.backends.questions import ask_cuda, ask_llama_build
from edgelm.backends.tuned import num_tuned
from edgelm.base.config import Config, load_config
from edgelm.base.errors import EdgeLMError, UsageError
from edgelm.base.machine import facts as machine
from edgelm.base.machine.cpu import usable_cores
from edgelm.base.machine.gpu import (
    NOT_NVIDIA,
    VISIBLE,
    CudaState,
    StandingGpu,
    llama_backend,
    split_used,
    standing_gpu,
    usable_gpus,
)
from edgelm.base.machine.llama_build import extra_command, find_build, gpu_backend_command
from edgelm.base.machine.memory import available_memory_bytes
from edgelm.base.machine.wsl import is_wsl
from edgelm.base.places import Places
from edgelm.commands.config import settings_of
from edgelm.commands.doctor_engines import Engines, engine_documents, engine_table
from edgelm.commands.doctor_upgrade import installed_from, upgrade_command
from edgelm.commands.flags import Json
from edgelm.library.scan import scan

State = Literal["ok", "note", "problem"]
LOW_MEMORY_BYTES = 2 * 2**30
LOW_DISK_BYTES = 5 * 2**30
HUB_TIMEOUT_S = 5
MAX_SHOWN = 3  # problems in one line
GPU_BUILDS = (
    f"for a GPU {extra_command('cuda')} (Linux, NVIDIA: our own kernels), or with 'edgelm[llama-cuda]' (Linux, NVIDIA: "
    "llama.cpp) or 'edgelm[vulkan]' (Linux, AMD, Intel and NVIDIA: llama.cpp); Metal is in the macOS wheel"
)
PACKAGES = (
    "edgelm-llama",
    "edgelm-llama-cuda",
    "edgelm-llama-vulkan",
    "llama-cpp-python",
    "numpy",
    "textual",
    "openai",
    "mcp",
    "torch",
    "triton",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. The hint of a problem says what to do."""

    topic: str
    state: State
    text: str
    hint: str = ""


def doctor(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="with --gpu: the model to check")] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="check our kernels on this GPU, and write a report")] = False,
    out: Annotated[str | None, typer.Option("--out", metavar="FILE", help="with --gpu: where the report goes")] = None,
    as_json: Json = False,
) -> int:
    """Check the machine, or with `gpu` our kernels on its GPU; return the exit code. Raises EdgeLMError."""
    if gpu:
        from edgelm.commands.doctor_gpu import check_gpu

        return check_gpu(model, out)
    if model or out:
        raise UsageError("edgelm doctor takes a model and --out only with --gpu", "add --gpu")
    return show_health(as_json)


def show_health(as_json: bool) -> int:
    """Print the report; return the exit code: 1 if there is a problem."""
    engines = Engines()
    console, signs = Console(), {"ok": "[green]✓[/]", "note": "[yellow]•[/]", "problem": "[red]✗[/]"}
    findings = []
    for finding in examine(engines):
        findings.append(finding)
        if not as_json:
            hint = f"; {finding.hint}" if finding.hint else ""
            console.print(
                f"{signs[finding.state]} [bold]{finding.topic}[/]: {escape(finding.text + hint)}", soft_wrap=True
            )
    if as_json:
        print(
            json.dumps(
                {
                    "version": __version__,
                    "findings": [asdict(finding) for finding in findings],
                    "engines": engine_documents(engines),
                }
            )
        )
    else:
        console.print(engine_table(engines))
    return 1 if any(finding.state == "problem" for finding in findings) else 0


def examine(engines: Engines | None = None) -> Iterator[Finding]:
    """Yield all findings, the quick checks first, and note in `engines` what they found of those."""
    engines = engines or Engines()
    yield Finding("edgelm", "ok", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    yield Finding("upgrade", "ok", upgrade_command(Path(sys.prefix), installed_from()))
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
    yield from wsl_findings(platform.release(), [places.hub, *(config.settings.model_folders if config else ())])
    yield from _resources()
    yield from _native(places, engines)
    yield _gpu(places, engines)
    yield _hub(places)


def _versions() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def _settings(config: Config) -> Iterator[Finding]:
    changed = [f"{name} = {value} ({source})" for name, value, source, _ in settings_of(config) if source != "default"]
    yield Finding("settings", "ok", ", ".join(changed) or "all have their defaults")


def _models(config: Config) -> Finding:
    library = scan(config.places.hub, folders=config.model_folders)
    count = len(library.models)
    if library.problems:
        hint = "correct the setting, or the permissions"
        return Finding("models", "problem", f"{count} found; {'; '.join(library.problems[:MAX_SHOWN])}", hint)
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
        hint = "free some space before you download a model" if low else ""
        yield Finding(f"disk for {name}", "note" if low else "ok", f"{_gib(free)} GiB free at {existing}", hint)


def wsl_findings(release: str, folders: Sequence[Path]) -> Iterator[Finding]:
    """Yield a finding in WSL. Drives of Windows are at /mnt/LETTER there."""
    if not is_wsl(release):
        return
    slow = [str(path) for path in map(Path.absolute, folders) if re.match(r"/mnt/[a-z](/|$)", str(path))]
    if slow:
        hint = "move them into WSL's own file system, or set HF_HOME"
        yield Finding("WSL", "problem", f"models are on a drive of Windows ({', '.join(slow)}): mapping is slow", hint)
    else:
        yield Finding("WSL", "ok", "its memory is half of the machine's, unless .wslconfig has `memory=` under [wsl2]")


def _nearest(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists and can be read."""
    for path in (folder, *folder.parents):
        with suppress(OSError):
            if path.exists():
                return path
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


def _native(places: Places, engines: Engines) -> Iterator[Finding]:
    try:
        facts = machine.facts(places.cache, notify=lambda line: print(line, file=sys.stderr))
        facts.require_working()
    except EdgeLMError as error:
        engines.llama = error.message
        yield Finding("llama.cpp", "problem", error.message, error.hint)
        return
    try:
        build = ask_llama_build()
    except EdgeLMError as error:
        engines.llama = error.message
        yield Finding("llama.cpp", "problem", error.message, error.hint)
        return
    engines.llama, engines.has_llama_gpu = "", bool(build.devices)
    yield Finding(
        "llama.cpp", "ok", f"{build.version} of {build.package}, uses {build.library} ({' '.join(build.features)})"
    )
    yield llama_gpus(build.devices, build.gpu_problem, standing_gpu())
    if machine.has_amx():
        yield amx(facts, build.features, build.weight_buffers, switched_off=places.no_amx)
    if facts.repack:
        yield Finding("canary", "ok", "fast kernels are safe here")
    else:
        yield Finding(
            "canary",
            "problem",
            f"with its fast kernels llama.cpp {facts.reason}; edgelm uses the plain ones",
            machine.reinstall(),
        )


def amx(
    facts: machine.MachineFacts, features: Sequence[str], weight_buffers: Sequence[str], *, switched_off: bool
) -> Finding:
    """Say whether llama.cpp uses AMX on a processor that has it, and why not."""
    if facts.canary == "no_amx":
        return Finding("AMX", "problem", f"with it llama.cpp {facts.reason}; edgelm does without", machine.reinstall())
    if not facts.repack:
        return Finding("AMX", "note", "not used: see canary")
    if "AMX" in weight_buffers:
        return Finding("AMX", "ok", "used for prompts")
    if switched_off:
        return Finding("AMX", "note", "not used: EDGELM_NO_AMX is set")
    if "AMX_INT8" not in features:
        return Finding("AMX", "note", "not used: this llama.cpp was compiled without it")
    return Finding("AMX", "note", "not used: the system does not allow it (Linux 5.16 and later can)")


def llama_gpus(devices: Sequence[Device], problem: str = "", card: StandingGpu | None = None) -> Finding:
    """Name the GPUs that llama.cpp can use, or say how to get a build that can; `problem`: why this one cannot."""
    if not devices and problem:
        return Finding("GPUs of llama.cpp", "note", problem)
    if not devices and card and not card.problem:
        command = gpu_backend_command(find_build(), llama_backend(card))
        return Finding("GPUs of llama.cpp", "ok", f"none; for llama.cpp on {card.name} {command}")
    if not devices:
        return Finding("GPUs of llama.cpp", "ok", f"none; {GPU_BUILDS}")
    names = [
        f"{device.name} is {device.description}, {_gib(device.free_bytes)} of {_gib(device.total_bytes)} GiB free"
        for device in devices
    ]
    return Finding("GPUs of llama.cpp", "ok", f"{'; '.join(names)}; --device gpu uses them, --device NAME one")


def _gpu(places: Places, engines: Engines) -> Finding:
    """Report whether our kernels run on a GPU here, and if not, why. Models run on the processor in any case."""
    if sys.platform == "darwin":
        engines.cuda = "they need CUDA"
        metal = "; llama.cpp has Metal" if platform.machine() == "arm64" else ""
        return Finding("GPU", "ok", f"our own kernels need CUDA{metal}")
    gpu = standing_gpu()
    try:
        state = ask_cuda()
    except EdgeLMError as error:
        engines.cuda = error.message
        return Finding("GPU", "problem", error.message, error.hint)
    engines.cuda = state.problem
    if not state.problem:
        return Finding("GPU", "ok", f"our own kernels run on {_in_use(state)}; {tuning(places, state.name)}")
    if not gpu and not state.name:
        where = "by llama.cpp on its GPU" if engines.has_llama_gpu else "on the processor"
        return Finding("GPU", "ok", f"{state.problem}; models run {where}")
    reason, hint = (gpu.problem, gpu.hint) if gpu and gpu.problem else (state.problem, state.hint)
    if gpu and not gpu.ours:
        hint = "" if engines.has_llama_gpu else gpu_backend_command(find_build(), gpu.backend)
        used = "llama.cpp uses it" if engines.has_llama_gpu else "llama.cpp can use it"
        return Finding("GPU", "note" if hint else "ok", f"{gpu.name}: {NOT_NVIDIA}, and {used}", hint)
    name = gpu.name if gpu else state.name
    return Finding("GPU", "note", f"our own kernels do not use {name}: {reason}", hint)


def _in_use(state: CudaState) -> str:
    """Describe the GPU that our kernels run on, and name those that they leave alone."""
    gpus = usable_gpus()
    own, others = split_used(gpus, state)
    text = f"{state.name}, {_gib(state.free_bytes)} of {_gib(state.total_bytes)} GiB free"
    if own and own.driver:
        text += f", driver {own.driver}"
    text += "; `edgelm doctor --gpu` checks them"
    if others:
        names = ", ".join(f"{gpu.name} ({_gib(gpu.free_bytes)} GiB free)" for gpu in others)
        text += f"; they use one GPU, and not {names}: {VISIBLE} chooses"
    return text


def tuning(places: Places, gpu: str) -> str:
    """Say whether kernels are tuned for a GPU."""
    count = num_tuned(places.cache, gpu)
    return (
        f"{count} kernels are tuned for it"
        if count
        else "no kernels are tuned for it: --tune does that while a model is loaded"
    )


def _hub(places: Places) -> Finding:
    request = urllib.request.Request(places.hub_endpoint, method="HEAD")  # noqa: S310 - the user's own setting
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S):  # noqa: S310 - as above
            pass
    except urllib.error.HTTPError:
        pass  # an error code is an answer
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return Finding(
            "model hub", "note", f"{places.hub_endpoint} cannot be reached ({reason}); the models on this machine work"
        )
    return Finding("model hub", "ok", f"{places.hub_endpoint} answers")


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"
