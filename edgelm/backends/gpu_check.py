"""The check of our kernels on the user's GPU, before a model is first used there: its worker, its verdict, what is kept.

Owns the rules: how long an op may take, what a crash means, when a verdict holds again. The worker does all work on the
GPU, since a wrong kernel may end it; this module imports no torch. Knows nothing of how an op is checked.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from edgelm import __version__
from edgelm.atomic import atomic_json, read_json
from edgelm.backends.model import OpenedModel
from edgelm.config import Settings
from edgelm.errors import EdgeLMError, EngineError
from edgelm.machine.gpu import nvidia_gpus
from edgelm.workers.parent import Worker

WORKER = "edgelm.backends.torch.check_worker"
START_S = 120.0  # for torch to start, and the first compile
OP_S = 90.0  # for one op, with its compile
WHOLE_S = 900.0
MAX_CRASHES = 3  # of one check; each costs an op
FORMAT = 1  # of the file, and of the checks
MAX_FILE_BYTES = 2**20
PACKAGES = ("torch", "triton")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpVerdict:
    """Whether an op is right with one kind of arguments. `off` is the largest difference, relative to the largest value."""

    op: str
    detail: str  # formats and shapes
    right: bool = True
    off: float = 0.0
    error: str = ""  # what it raised, or how its process ended

    @property
    def problem(self) -> str:
        """What is wrong, as the end of a sentence; empty: nothing."""
        if self.right:
            return ""
        return self.error or f"off by {self.off:.2g} of the largest value"


@dataclass(frozen=True, slots=True)
class CheckGpu:
    """Check the GPU, and the ops of a model on it. The ops in `plain` are not tried."""

    model: Path
    modes: tuple[str, ...]
    quantize: str
    plain: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Begun:
    """An op is tried from now on; "" is the small kernel with which the check begins."""

    op: str
    detail: str


@dataclass(frozen=True, slots=True)
class Checked:
    """The end of a check; `device` is the GPU's name."""

    device: str
    verdicts: tuple[OpVerdict, ...]


@dataclass(frozen=True, slots=True)
class GpuVerdict:
    """What a check has found. With a problem, no model can use our kernels here."""

    device: str = ""
    problem: str = ""
    hint: str = ""
    verdicts: tuple[OpVerdict, ...] = field(default=())
    took_s: float = 0.0

    @property
    def wrong(self) -> dict[str, str]:
        """The ops that are wrong, each with what is wrong in the worst case."""
        worst: dict[str, OpVerdict] = {}
        for verdict in self.verdicts:
            if not verdict.right and (verdict.op not in worst or verdict.off > worst[verdict.op].off):
                worst[verdict.op] = verdict
        return {op: f"{verdict.problem} ({verdict.detail})" for op, verdict in worst.items()}

    @property
    def reasons(self) -> tuple[str, ...]:
        """A line for each op that is replaced."""
        return tuple(f"{op} is computed by plain torch: its kernel is {text}" for op, text in self.wrong.items())


Notify = Callable[[str], None]


def run_check(request: CheckGpu, notify: Notify = lambda _: None, *, command: tuple[str, ...] = ()) -> GpuVerdict:
    """Run a check in a child process. A crash or a hang costs the op that was tried; the others are checked again.

    `notify` takes a line of progress. Never raises for what it finds.
    """
    began = time.monotonic()
    lost: list[OpVerdict] = []
    while True:
        plain = tuple(verdict.op for verdict in lost)
        outcome = _attempt(replace(request, plain=plain), notify, began + WHOLE_S, command)
        if isinstance(outcome, GpuVerdict):
            verdicts = (*outcome.verdicts, *lost)
            return replace(outcome, verdicts=verdicts, took_s=round(time.monotonic() - began, 1))
        lost.append(outcome)
        log.warning("%s fails on this GPU: %s", outcome.op, outcome.error)
        if len(lost) == MAX_CRASHES:
            message = f"kernels fail on this GPU: {', '.join(verdict.op for verdict in lost)}"
            took_s = round(time.monotonic() - began, 1)
            return GpuVerdict("", message, "use --engine llama", tuple(lost), took_s)


def _attempt(request: CheckGpu, notify: Notify, until: float, command: tuple[str, ...]) -> GpuVerdict | OpVerdict:
    """Run the worker once; an OpVerdict is that of the op during which it crashed or hung."""
    current, count, limit_s = Begun("", ""), 0, START_S
    with Worker(WORKER, replies=(Begun, Checked), errors=(EngineError,), command=command) as worker:
        worker.send(request)
        try:
            while not isinstance(reply := worker.receive(min(limit_s, max(until - time.monotonic(), 0.0))), Checked):
                if reply is None:
                    end = worker.exit()
                    return _lost(current, f"its process {end.how}" + (f": {end.last_line}" if end.last_line else ""))
                current, count, limit_s = reply, count + 1, OP_S
                notify(f"checking the GPU's kernels: {count}, {reply.op} of {reply.detail}")
        except TimeoutError:
            worker.kill()
            return _lost(current, f"not done after {limit_s:.0f} s")
        except EdgeLMError as error:
            return GpuVerdict("", error.message, error.hint)
    return GpuVerdict(reply.device, verdicts=reply.verdicts)


def _lost(begun: Begun, error: str) -> GpuVerdict | OpVerdict:
    if not begun.op:
        return GpuVerdict("", f"a first small kernel fails on this GPU: {error}", "use --engine llama")
    return OpVerdict(begun.op, begun.detail, right=False, off=float("inf"), error=error)


# -- what is kept ------------------------------------------------------------------------------------------------------


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
    notify("checking the GPU's kernels, once for a kind of model")
    modes = (settings.kv,) if settings.kv != "auto" else AUTO_MODES
    verdict = run_check(CheckGpu(model.files[0], modes, settings.quantize), notify, command=command)
    keep(cache, key, verdict)
    return verdict


AUTO_MODES = ("f16", "k8v4")
