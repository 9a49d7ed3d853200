"""What is kept of the checks of GPUs: the verdict about the ops of a kind of model, under all that it depends on.

Owns the key, and the file. Knows nothing of how a check is made.
"""

from __future__ import annotations

import hashlib
import platform
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from edgelm import __version__
from edgelm.atomic import atomic_json, read_json
from edgelm.backends.gpu_check import CheckGpu, GpuVerdict, Notify, OpVerdict, run_check
from edgelm.backends.model import OpenedModel
from edgelm.config import Settings
from edgelm.machine.gpu import nvidia_gpus

FORMAT = 1  # of the file, and of the checks
MAX_FILE_BYTES = 2**20
PACKAGES = ("torch", "triton")
AUTO_MODES = ("f16", "k8v4")  # of the KV cache, that the plan may choose


def check_key(model: OpenedModel, settings: Settings) -> str:
    """Return the key of a verdict: GPU, driver, packages, and the formats and shapes that the model's ops have."""
    gpus = [(gpu.name, gpu.driver) for gpu in nvidia_gpus()]
    tensors = model.gguf.tensors if model.gguf else model.folder.tensors if model.folder else {}
    shapes = sorted({repr((_kind(tensor), tuple(tensor.shape))) for tensor in tensors.values()})
    identity = (FORMAT, __version__, _versions(), gpus, platform.machine(), shapes, settings.kv, settings.quantize)
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]


def _kind(tensor: object) -> str:
    kind = getattr(tensor, "type", None) or getattr(tensor, "dtype", None)
    return str(getattr(kind, "name", kind))


def _versions() -> list[str]:
    found = []
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return found


def kept_verdict(cache: Path, key: str) -> GpuVerdict | None:
    """Return the verdict that was kept; None: there is none."""
    document = read_json(_file(cache, key), MAX_FILE_BYTES)
    try:
        verdicts = tuple(OpVerdict(**verdict) for verdict in document.pop("verdicts"))
        return GpuVerdict(**document, verdicts=verdicts)
    except (AttributeError, KeyError, TypeError):
        return None


def keep(cache: Path, key: str, verdict: GpuVerdict) -> None:
    """Keep a verdict for later starts, unless it is a problem, which may be repaired."""
    if not verdict.problem:
        atomic_json(_file(cache, key), asdict(verdict))


def _file(cache: Path, key: str) -> Path:
    return cache / "machine" / f"gpu-{key}.json"


def verdict_for(
    model: OpenedModel, settings: Settings, cache: Path, notify: Notify, *, command: tuple[str, ...] = ()
) -> GpuVerdict:
    """Return the verdict about a model's ops on this GPU: the kept one, or that of a check that is made now."""
    key = check_key(model, settings)
    kept = kept_verdict(cache, key)
    if kept is not None:
        return kept
    notify("checking the kernels on this GPU, once for a kind of model")
    modes = (settings.kv,) if settings.kv != "auto" else AUTO_MODES
    verdict = run_check(CheckGpu(model.files[0], modes, settings.quantize), notify, command=command)
    keep(cache, key, verdict)
    return verdict
