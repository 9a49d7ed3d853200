"""`edgelm doctor --gpu`: check every kernel on this machine's GPU, and write a report that can be sent to others.

Owns the lines on the terminal, and the report: it names programs, GPU and kernels, and no folder and no user.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from edgelm import __version__
from edgelm.backends.gpu_check import PDL, CheckGpu, GpuVerdict, Notify, OpVerdict, run_check
from edgelm.backends.kept_trials import Trial
from edgelm.backends.kept_verdicts import forget_problems
from edgelm.backends.llama.placement import Device
from edgelm.backends.projectors import heads_beside
from edgelm.backends.questions import ask_cuda, ask_llama_build, ask_to_keep
from edgelm.base.atomic import atomic_write
from edgelm.base.config import Config, Settings, load_config
from edgelm.base.errors import EdgeLMError
from edgelm.base.kv_modes import TORCH_KV
from edgelm.base.machine.gpu import nvidia_gpus
from edgelm.base.places import own_places
from edgelm.commands.running import model_or_served
from edgelm.jobs.engine_trial import make_trial
from edgelm.library.local import model_config

REPORT = "edgelm-gpu.txt"
PACKAGES = ("torch", "triton", "edgelm-llama", "llama-cpp-python")
FOLDER = re.compile(r"(?:~|/)[\w.+~-]*/(?:[^\s/'\":]+/)*")  # in messages of other programs
Run = Callable[[CheckGpu, Notify], GpuVerdict]


def check_gpu(
    model: str | None,
    out: str | None,
    run: Run = run_check,
    try_engines: Callable[[Path, Callable[[str], None]], Trial] = make_trial,
    devices: Callable[[], Sequence[Device]] = lambda: ask_llama_build().devices,
) -> int:
    """Run the check, print it and write the report; return the exit code: 1 if something is wrong.

    Where llama.cpp has a GPU too, a trial follows, by which --engine auto chooses from then on. Without a model, all
    formats of weights and of the KV cache are tried. Raises EdgeLMError for an unknown model, or a report that cannot
    be written.
    """
    config, console = load_config({}), Console()
    request, settings = _request(model, config)
    state, shows = ask_cuda(), console.is_terminal

    def notify(line: str) -> None:
        if shows:
            sys.stdout.write(f"\r\x1b[K{line[: console.width - 1]}")
            sys.stdout.flush()

    if state.problem:
        verdict = GpuVerdict(state.name, state.problem, state.hint)
    else:
        verdict = run(request, notify)
        if shows:
            sys.stdout.write("\r\x1b[K")
        if not verdict.problem:
            forget_problems(own_places().cache)
        if request.model is not None:
            ask_to_keep(request, settings, verdict)
    for line in summary(verdict):
        console.print(escape(line), soft_wrap=True, highlight=False)
    if not state.problem and not verdict.problem:
        line = _try(lambda: try_engines(own_places().cache, notify), devices)
        if shows:
            sys.stdout.write("\r\x1b[K")
        if line:
            console.print(escape(line), soft_wrap=True, highlight=False)
    path = Path(out or REPORT)
    text = FOLDER.sub("(a folder)/", "\n".join(report(verdict, request)))
    try:
        atomic_write(path, text.encode() + b"\n")
    except OSError as error:
        raise EdgeLMError(f"{path} cannot be written: {error.strerror}", "name another file with --out") from None
    console.print(escape(f"the report is in {path}: attach it when you report a problem"), soft_wrap=True)
    return 1 if verdict.problem or verdict.wrong else 0


def _try(make: Callable[[], Trial], devices: Callable[[], Sequence[Device]]) -> str:
    """Return the line about a trial of both engines; empty: llama.cpp has no GPU. The report is written in any case."""
    try:
        return make().line if any(not device.shared for device in devices()) else ""
    except EdgeLMError as error:
        return f"both engines were not tried: {error.message}"


def _request(model: str | None, config: Config) -> tuple[CheckGpu, Settings]:
    settings = config.settings
    if model is None:
        return CheckGpu(None, tuple(TORCH_KV), settings.quantize), settings
    local = model_or_served(model, config)
    settings = model_config(local, config).settings
    modes = tuple(TORCH_KV) if settings.kv == "auto" else (settings.kv,)
    heads = heads_beside(settings, local.path)
    return CheckGpu(local.path, modes, settings.quantize, heads=heads.path if heads else None), settings


def summary(verdict: GpuVerdict) -> Iterator[str]:
    """Yield the lines for the terminal: one for each op."""
    if verdict.problem:
        yield f"✗ our kernels cannot be used here: {verdict.problem}" + (f"; {verdict.hint}" if verdict.hint else "")
        return
    yield f"{verdict.device}, checked in {verdict.took_s:.0f} s"
    for op, verdicts in _by_op(verdict).items():
        wrong = [one for one in verdicts if not one.right]
        if not wrong:
            off = max(one.off for one in verdicts)
            yield f"✓ {op}: right in {_cases(len(verdicts))}, at most {off:.1e} of the largest value off"
        else:
            worst = max(wrong, key=lambda one: one.off)
            yield f"✗ {op}: {worst.problem}, in {len(wrong)} of {_cases(len(verdicts))}, first {worst.detail}"
            instead = "kernels are launched without it" if op == PDL else f"{op} is computed by plain torch instead"
            yield f"  {instead}, which is slower"


def _cases(count: int) -> str:
    return f"{count} case{'' if count == 1 else 's'}"


def _by_op(verdict: GpuVerdict) -> dict[str, list[OpVerdict]]:
    found: dict[str, list[OpVerdict]] = {}
    for one in verdict.verdicts:
        found.setdefault(one.op, []).append(one)
    return dict(sorted(found.items()))


def report(verdict: GpuVerdict, request: CheckGpu) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"edgelm {__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}"
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            yield f"{package} is not installed"
    for gpu in nvidia_gpus():
        yield f"GPU {gpu.name}, driver {gpu.driver}, {gpu.total_bytes / 2**30:.1f} GiB"
    what = request.model.name if request.model else "all formats"
    yield f"checked: {what}, KV cache {', '.join(request.modes)}, on {verdict.device or 'no GPU'}"
    yield from summary(verdict)
    yield ""
    for one in verdict.verdicts:
        state = "unknown" if one.unknown else "right" if one.right else "WRONG"
        yield f"{state}\t{one.op}\t{one.detail}\t{one.problem or f'{one.off:.1e}'}"
