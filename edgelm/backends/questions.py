"""Questions about the backends of this machine, answered by a worker: commands that ask them load no native code.

Owns the messages and the parent's side. The worker is probe_worker.py; a damaged file may crash it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from edgelm.backends.choice import Route
from edgelm.backends.gpu_check import CheckGpu, GpuVerdict
from edgelm.backends.llama.memory import Buffers, BufferSource
from edgelm.backends.llama.placement import Device
from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError
from edgelm.base.machine.gpu import CudaState
from edgelm.base.workers.parent import Worker, WorkerDiedError, ask

WORKER = "edgelm.backends.probe_worker"
TIME_LIMIT_S = 120.0
BUFFERS_LIMIT_S = 30.0  # for all sizes of a model together: the largest model takes one second on an idle machine


@dataclass(frozen=True, slots=True)
class ChooseEngine:
    """Choose the engine of a model, and of the model that drafts for it."""

    model: Path
    settings: Settings
    draft: Path | None


@dataclass(frozen=True, slots=True)
class ChosenEngine:
    """The choice, and the GPU if it is one."""

    engine: str
    device: str
    reasons: tuple[str, ...]
    cuda: CudaState | None
    devices: tuple[Device, ...] = ()  # llama.cpp's, where it is chosen with a GPU
    rollback: int = 0  # drafted tokens that llama.cpp can take back in recurrent layers
    heads: bool = False  # the model has heads that can draft
    unused_gpu: str = ""  # the line about a GPU that stands here and is not used
    routes: tuple[Route, ...] = ()


@dataclass(frozen=True, slots=True)
class FindCuda:
    """Find out whether our kernels can run here; the reply is a CudaState."""


@dataclass(frozen=True, slots=True)
class DescribeLlama:
    """Describe the installed llama.cpp."""


@dataclass(frozen=True, slots=True)
class KeepCheck:
    """Keep the verdict of a whole check of a model's ops; the reply is Written."""

    model: Path
    settings: Settings
    modes: tuple[str, ...]
    verdict: GpuVerdict
    heads: Path | None = None


@dataclass(frozen=True, slots=True)
class WriteRandomModel:
    """Write a model of random weights for a trial of the engines; the reply is Written."""

    path: Path


@dataclass(frozen=True, slots=True)
class Written:
    """The file is there."""


@dataclass(frozen=True, slots=True)
class LlamaBuild:
    """The installed llama.cpp, and the features of this processor that it uses."""

    version: str
    features: tuple[str, ...]
    devices: tuple[Device, ...]  # GPUs
    package: str  # the package of the build: its label (llama_build.py)
    library: str  # the file with the kernels for the processor
    weight_buffers: tuple[str, ...]  # in which it may rearrange the weights, such as "AMX"
    gpu_problem: str = ""  # why an installed GPU backend is not used


@dataclass(frozen=True, slots=True)
class LayOutContext:
    """Let llama.cpp lay out a context, without allocating it."""

    model: Path
    sequences: int
    repack: bool
    rollback: int
    heads: Path | None  # the file of those that draft
    kv: str
    context: int


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """The fields of Buffers, in bytes."""

    kv: int
    compute: int


def ask_choice(path: Path, settings: Settings, draft: Path | None = None) -> ChosenEngine:
    """Return the engine that the model would get. Raises EdgeLMError if nothing can run it."""
    reply: ChosenEngine = _ask(ChooseEngine(path, settings.without_keys, draft), ChosenEngine)
    return reply


def ask_cuda() -> CudaState:
    """Return the state of CUDA as our kernels would find it. Raises EdgeLMError if the check itself fails."""
    reply: CudaState = _ask(FindCuda(), CudaState)
    return reply


def ask_llama_build() -> LlamaBuild:
    """Return the installed llama.cpp. Raises EdgeLMError if it cannot be loaded."""
    reply: LlamaBuild = _ask(DescribeLlama(), LlamaBuild)
    return reply


def ask_random_model(path: Path) -> None:
    """Write the model of the trial: layers of an 8B model, 0.9 GB in 4 bits. Raises EdgeLMError."""
    _ask(WriteRandomModel(path), Written)


def ask_to_keep(request: CheckGpu, settings: Settings, verdict: GpuVerdict) -> None:
    """Keep the verdict of a whole check of a model for its loads. Raises EdgeLMError."""
    assert request.model is not None
    _ask(KeepCheck(request.model, settings.without_keys, request.modes, verdict, request.heads), Written)


def _ask(request: object, reply: type) -> Any:
    try:
        return ask(Worker(WORKER, replies=(reply,)), request, TIME_LIMIT_S)
    except TimeoutError:
        raise EdgeLMError(f"the engines gave no answer within {TIME_LIMIT_S:.0f} s") from None
    except WorkerDiedError as error:
        if error.end.error:
            raise EdgeLMError(error.end.error) from None
        raise EdgeLMError(f"the engines gave no answer: {error}", "see `edgelm doctor`") from None


class BufferProbe:
    """A `BufferSource` that returns llama.cpp's own sizes, and those of `fallback` once llama.cpp has failed.

    `exact` tells whether all sizes were llama.cpp's own.
    """

    def __init__(
        self,
        path: Path,
        fallback: BufferSource,
        *,
        sequences: int,
        repack: bool = True,
        rollback: int = 0,
        heads: Path | None = None,
    ) -> None:
        self.exact = True
        self._model = path, sequences, repack, rollback, heads
        self._fallback = fallback
        self._deadline = time.monotonic() + BUFFERS_LIMIT_S
        self._worker = Worker(WORKER, replies=(BufferSizes,))

    def __call__(self, kv: str, context: int) -> Buffers:
        if self.exact:
            self._worker.send(LayOutContext(*self._model, kv, context))
            try:
                if (sizes := self._worker.receive(max(self._deadline - time.monotonic(), 0))) is not None:
                    return Buffers(sizes.kv, sizes.compute)
            except (TimeoutError, EdgeLMError):
                pass
            self.exact = False
            self._worker.kill()
        return self._fallback(kv, context)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.kill()  # it holds nothing that must be saved
        self._worker.close()
