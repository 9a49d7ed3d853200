"""The kept results of GPU checks: a verdict about the ops of a kind of model, under a key of all it depends on.

Owns the key. Knows nothing of how a check is made.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from edgelm import __version__
from edgelm.backends.gpu_check import CheckGpu, GpuVerdict, Notify, run_check
from edgelm.backends.kept_verdicts import keep, kept_verdict
from edgelm.backends.model import OpenedModel
from edgelm.base.config import Settings
from edgelm.base.kv_modes import TORCH_KV
from edgelm.base.machine.conditions import PACKAGES, installed
from edgelm.base.machine.gpu import nvidia_gpus

FORMAT = 8  # of the file, and of the checks


def check_key(model: OpenedModel, settings: Settings, mode: str) -> str:
    """Return the key of a verdict: GPU, driver, packages, and the formats and shapes of the model's tensors."""
    gpus = _gpus()
    tensors = sorted(  # with their names: a head that lacks one is not checked
        (name, _kind(tensor), tuple(tensor.shape))
        for file in (model.gguf, model.folder, model.heads)
        for name, tensor in (file.tensors.items() if file else ())
    )
    facts = sorted(
        (key, repr(value))
        for metadata in (model.gguf.metadata if model.gguf else model.config, model.heads and model.heads.metadata)
        for key, value in (metadata or {}).items()
        if isinstance(value, str | int | float | bool) and not key.startswith(("general.name", "tokenizer."))
    )
    versions = installed(PACKAGES)
    identity = (FORMAT, __version__, versions, gpus, _driver(), _compiler(), tensors, facts, mode, settings.quantize)
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]


@cache
def _gpus() -> list[tuple[str, str]]:
    return [(gpu.name, gpu.driver) for gpu in nvidia_gpus()]


def _driver() -> str:
    """Return the version of the loaded kernel module, also where nvidia-smi is missing."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return ""


def _compiler() -> tuple[str | None, bool]:
    """Return the C compiler that Triton takes, and whether Python's headers are there: both may be installed later."""
    names = (os.environ.get("CC"), "clang", "gcc", "cc")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    return found, (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()


def _kind(tensor: object) -> str:
    kind = getattr(tensor, "type", None) or getattr(tensor, "dtype", None)
    return str(getattr(kind, "name", kind))


def _path(model: OpenedModel) -> Path:
    return model.folder.folder if model.folder else model.files[0]


def kept_reasons(model: OpenedModel, settings: Settings, folder: Path) -> tuple[str, ...]:
    """Return a line for each op of a model that is known to be wrong on this GPU, in the KV modes that it may have.

    If there is no verdict yet, the line says so.
    """
    kept = _kept(model, settings, folder)
    if not kept:
        return ("its kernels are not checked on this GPU yet: that is done before its first use",)
    return tuple(dict.fromkeys(reason for verdict in kept for reason in verdict.reasons))


def kept_problem(model: OpenedModel, settings: Settings, folder: Path) -> str:
    """Return why no kernel runs on this GPU, as a check of the last day has found it; empty: it has not."""
    problem = next((verdict.problem for verdict in _kept(model, settings, folder) if verdict.problem), "")
    return f"{problem} (`edgelm doctor --gpu` checks it again)" if problem else ""


def _kept(model: OpenedModel, settings: Settings, folder: Path) -> list[GpuVerdict]:
    modes = TORCH_KV if settings.kv == "auto" else (settings.kv,)
    keys = [check_key(model, settings, mode) for mode in modes]
    kept = [kept_verdict(folder, key) or kept_verdict(folder, f"{key}-short") for key in keys]
    return [verdict for verdict in kept if verdict]


def verdict_for(
    model: OpenedModel, settings: Settings, mode: str, folder: Path, notify: Notify, *, command: tuple[str, ...] = ()
) -> GpuVerdict:
    """Return the verdict about a model's ops on this GPU: the kept one, or that of a short check that is made now.

    `edgelm doctor --gpu MODEL` makes and keeps the whole check.
    """
    key = check_key(model, settings, mode)
    kept = kept_verdict(folder, key) or kept_verdict(folder, f"{key}-short")
    if kept is not None:
        return kept
    notify("checking the kernels on this GPU, once for a kind of model")
    heads = model.heads.path if model.heads else None
    request = CheckGpu(_path(model), (mode,), settings.quantize, short=True, heads=heads)
    verdict = run_check(request, notify, command=command)
    _keep(model, settings, mode, folder, verdict, "-short")
    return verdict


def keep_whole(model: OpenedModel, settings: Settings, modes: Sequence[str], folder: Path, verdict: GpuVerdict) -> None:
    """Keep the verdict of a whole check of a model's ops, in all these KV modes together."""
    for mode in modes:
        _keep(model, settings, mode, folder, verdict)


def _keep(
    model: OpenedModel, settings: Settings, mode: str, folder: Path, verdict: GpuVerdict, suffix: str = ""
) -> None:
    """Keep a verdict; one without faults also for the model where its heads do not draft."""
    for one in (model,) if verdict.wrong else (model, replace(model, heads=None)):
        keep(folder, check_key(one, settings, mode) + suffix, verdict)
