"""The kept results of GPU checks: a verdict about the ops of a kind of model, under a key of all it depends on.

Owns the key, and the file. Knows nothing of how a check is made.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from edgelm import __version__
from edgelm.atomic import atomic_json, read_json
from edgelm.backends.gpu_check import CheckGpu, GpuVerdict, Notify, OpVerdict, run_check
from edgelm.backends.model import OpenedModel
from edgelm.config import Settings
from edgelm.kv_modes import TORCH_KV
from edgelm.machine.gpu import nvidia_gpus

FORMAT = 1  # of the file, and of the checks
MAX_FILE_BYTES = 2**20
PACKAGES = ("torch", "triton")


def check_key(model: OpenedModel, settings: Settings, mode: str) -> str:
    """Return the key of a verdict: GPU, driver, packages, and the formats and shapes that the model's ops have."""
    gpus = _gpus()
    tensors = model.gguf.tensors if model.gguf else model.folder.tensors if model.folder else {}
    shapes = sorted({repr((_kind(tensor), tuple(tensor.shape))) for tensor in tensors.values()})
    metadata = model.gguf.metadata if model.gguf else model.config or {}
    facts = sorted((key, repr(value)) for key, value in metadata.items() if isinstance(value, str | int | float | bool))
    facts = [(key, value) for key, value in facts if not key.startswith(("general.name", "tokenizer."))]
    identity = (FORMAT, __version__, _versions(), gpus, _driver(), shapes, facts, mode, settings.quantize)
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


def _kind(tensor: object) -> str:
    kind = getattr(tensor, "type", None) or getattr(tensor, "dtype", None)
    return str(getattr(kind, "name", kind))


def _versions() -> list[str]:
    found = []
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return found


def kept_verdict(folder: Path, key: str) -> GpuVerdict | None:
    """Return the verdict that was kept; None: there is none."""
    document = read_json(_file(folder, key), MAX_FILE_BYTES)
    try:
        verdicts = tuple(OpVerdict(**verdict) for verdict in document.pop("verdicts"))
        return GpuVerdict(**document, verdicts=verdicts)
    except (AttributeError, KeyError, TypeError):
        return None


def keep(folder: Path, key: str, verdict: GpuVerdict) -> None:
    """Keep a verdict for later starts, unless it may be another one then: a problem may be repaired."""
    if not verdict.problem and not any(verdict.unknown for verdict in verdict.verdicts):
        atomic_json(_file(folder, key), asdict(verdict))


def _file(folder: Path, key: str) -> Path:
    return folder / "machine" / f"gpu-{key}.json"


def _path(model: OpenedModel) -> Path:
    return model.folder.folder if model.folder else model.files[0]


def kept_reasons(model: OpenedModel, settings: Settings, folder: Path) -> tuple[str, ...]:
    """Return a line for each op of a model that is known to be wrong on this GPU, in the KV modes that it may have."""
    modes = TORCH_KV if settings.kv == "auto" else (settings.kv,)
    kept = [kept_verdict(folder, check_key(model, settings, mode)) for mode in modes]
    return tuple(dict.fromkeys(reason for verdict in kept if verdict for reason in verdict.reasons))


def verdict_for(
    model: OpenedModel, settings: Settings, mode: str, folder: Path, notify: Notify, *, command: tuple[str, ...] = ()
) -> GpuVerdict:
    """Return the verdict about a model's ops on this GPU: the kept one, or that of a check that is made now."""
    key = check_key(model, settings, mode)
    kept = kept_verdict(folder, key)
    if kept is not None:
        return kept
    notify("checking the kernels on this GPU, once for a kind of model")
    verdict = run_check(CheckGpu(_path(model), (mode,), settings.quantize), notify, command=command)
    keep(folder, key, verdict)
    return verdict
