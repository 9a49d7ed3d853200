"""The composition root: settings and a model become an engine.

Owns the choice between the engines and what it is made from; each is built by a module of its own. Everything is an
argument to what is built here, so that a test builds the same with other parts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from edgelm.build.llama import build_llama, has_offload
from edgelm.build.loaded import Loaded
from edgelm.build.opened import OpenedModel, open_model
from edgelm.config import Places, Settings
from edgelm.errors import ModelError
from edgelm.executors.cuda import find_cuda
from edgelm.executors.cuda_state import CudaState, has_torch
from edgelm.executors.engine_choice import EngineChoice, Situation, choose_engine
from edgelm.executors.torch_memory import TorchMemory
from edgelm.library.plan import MachineMemory, plan

__all__ = ["Loaded", "build"]

log = logging.getLogger(__name__)


def build(
    path: Path,
    settings: Settings,
    *,
    least_context: int = 0,
    repack: bool = True,
    progress: Callable[[float], bool] | None = None,
    prefixes: Path | None = None,
    places: Places | None = None,
) -> Loaded:
    """Load a GGUF or a folder of safetensors and start an engine over it.

    Without --ctx there are `least_context` tokens if the model has them. `prefixes` is the folder where llama.cpp's
    engine keeps idle conversations for the next process; None: they end with this one. `places` are where drafting
    finds and leaves what it learns; None: there is no drafting.
    Raises ModelError for a file that is damaged, not supported or does not fit in memory; EdgeLMError for a context
    that the model cannot have, or an engine or device that is not there.
    """
    with open_model(path) as model:
        choice = choose(model, settings, least_context=least_context)
        for reason in choice.reasons:
            log.info("%s", reason)
        if choice.engine == "torch":
            from edgelm.build.torch import build_torch  # it imports torch, which is not on every machine

            return build_torch(
                model, settings, device=choice.device, least_context=least_context, progress=progress, places=places
            )
        facts, files = model.facts, model.files
    return build_llama(
        path,
        files,
        facts,
        settings,
        least_context=least_context,
        repack=repack,
        gpu=choice.device == "gpu",
        progress=progress,
        prefixes=prefixes,
        places=places,
    )


def choose(model: OpenedModel, settings: Settings, *, least_context: int = 0) -> EngineChoice:
    """Choose the engine of an open model on this machine. Raises ModelError, EdgeLMError."""
    asked_for_torch = settings.engine == "torch" or settings.device == "cuda"
    wants_cuda = settings.engine != "llama" and settings.device in ("auto", "cuda")
    cuda = find_cuda() if wants_cuda else CudaState("the settings say so")
    may_be_torch = has_torch() and (asked_for_torch or not cuda.problem or model.gguf is None)
    torch_problem = model.torch_problem() if may_be_torch else ""
    kernel_problem = fit_problem = ""
    if not cuda.problem and not torch_problem:
        kernel_problem = model.torch_problem("triton")
        fit_problem = "" if kernel_problem else _fit_problem(model, settings, cuda, least_context)
    return choose_engine(
        settings,
        Situation(
            model=model.name,
            llama_problem=model.llama_problem,
            torch_problem=torch_problem,
            kernel_problem=kernel_problem,
            fit_problem=fit_problem,
            has_torch=has_torch(),
            has_offload=model.gguf is not None and has_offload(),
            cuda=cuda,
        ),
    )


def _fit_problem(model: OpenedModel, settings: Settings, cuda: CudaState, least_context: int) -> str:
    """Return why a model does not fit in the GPU's memory; empty: it does."""
    memory = TorchMemory(model.facts, sequences=settings.parallel, quantize=settings.quantize)
    machine = MachineMemory(free_bytes=cuda.free_bytes, cores=1)
    try:
        plan(model.facts, settings, machine, memory, least_context=least_context).require()
    except ModelError as error:
        if settings.engine == "torch":
            raise
        return error.message
    return ""
