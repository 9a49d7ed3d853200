"""The composition root: settings and a model become an engine, or an evaluation.

Owns the dispatch between the engines; each is built by its own package. Every part is an argument, so that a test can
build an engine from other parts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgelm.backends.choice import EngineChoice, Situation, choose_engine, may_go_without_cuda, partly_used
from edgelm.backends.kept_trials import kept_trial
from edgelm.backends.llama.adapter import LlamaAdapter, find_adapters, with_adapters
from edgelm.backends.llama.placement import Wish
from edgelm.backends.model import LoadedModel, OpenedModel, open_model
from edgelm.backends.plan import MachineMemory
from edgelm.backends.projectors import fitting_projector
from edgelm.backends.reports import Reports
from edgelm.backends.torch.memory import plan_for_torch
from edgelm.backends.tuned import num_tuned
from edgelm.base.config import Settings
from edgelm.base.errors import (
    DeviceError,
    DoesNotFitError,
    EdgeLMError,
    EngineError,
    GpuLoadError,
    ModelError,
    RequestError,
)
from edgelm.base.machine.cpu import usable_cores
from edgelm.base.machine.cuda import find_cuda
from edgelm.base.machine.gpu import CudaState, has_torch, standing_gpu
from edgelm.base.machine.llama_build import gpu_backend_command
from edgelm.base.machine.memory import USABLE, available_memory_bytes
from edgelm.base.places import Places, own_places
from edgelm.base.workers.messages import EvalSide, Footprint
from edgelm.engine.watchdog import Watchdog
from edgelm.evaluation.evaluate import Evaluation, require_same_vocabulary
from edgelm.library.local import find_draft_model, require_gguf
from edgelm.library.projectors import find_projector
from edgelm.text.template_file import read_template_file

log = logging.getLogger(__name__)

PIECE = "a piece of loading the model"
WhenLost = Callable[[EdgeLMError], object]


def build(
    path: Path,
    settings: Settings,
    *,
    least_context: int = 0,
    repack: bool = True,
    progress: Callable[[float], bool] | None = None,
    prefixes: Path | None = None,
    places: Places | None = None,
    memory_bytes: int | None = None,
    cuda_problem: str = "",
    projector: Path | None = None,
    notify: Callable[[str], None] = log.info,
    warn: Callable[[str], None] = log.warning,
    when_lost: WhenLost = lambda _: None,
) -> LoadedModel:
    """Load a GGUF or a folder of safetensors and start an engine with it.

    Without --ctx the context has at least `least_context` tokens if the model has them. `prefixes` is the folder where
    idle conversations are kept for the next process; None: they end with this process. `places` are where drafting
    reads and stores its data; None: no drafting. `memory_bytes` is what the model may take; None: as much as is free.
    `cuda_problem` is why CUDA is not to be used. `projector` lets the model see pictures; None: that of the
    settings. `notify` takes lines for the person who waits, `warn` those that shall
    stay in sight. `when_lost` is called by another thread if the GPU hangs, with the error of that: it has to end the
    process. Raises ModelError for a file
    that is damaged, not supported or does not fit in memory; EdgeLMError for a context that the model cannot have, or
    an engine or device that is not available; GpuLoadError where CUDA fails and the settings allow a new process to go
    on without it.
    """
    template = read_template_file(settings.template) if settings.template else None
    loaded = _build(
        path,
        settings,
        least_context=least_context,
        repack=repack,
        progress=progress,
        prefixes=prefixes,
        places=places,
        memory_bytes=memory_bytes,
        notify=notify,
        warn=warn,
        cuda_problem=cuda_problem,
        projector=projector,
        when_lost=when_lost,
    )
    if template is not None:
        loaded.tokenizer.chat_template = template
    return loaded


def _build(
    path: Path,
    settings: Settings,
    *,
    least_context: int,
    repack: bool,
    progress: Callable[[float], bool] | None,
    prefixes: Path | None,
    places: Places | None,
    memory_bytes: int | None,
    notify: Callable[[str], None],
    warn: Callable[[str], None],
    cuda_problem: str,
    projector: Path | None,
    when_lost: WhenLost,
) -> LoadedModel:
    draft = find_draft_model(settings, places.hub) if places else None
    with open_model(path) as model:
        beside = draft.path if draft else None
        choice = choose(model, settings, draft=beside, least_context=least_context, cuda_problem=cuda_problem)
        for reason in choice.reasons:
            log.info("%s", reason)
        if choice.unused_gpu and not cuda_problem:  # that one was told already
            warn(choice.unused_gpu)
        if choice.engine == "torch":
            if projector or find_projector(settings, path):
                warn("the torch engine reads no pictures; --engine llama does")
            from edgelm.backends.torch.build import build_torch  # it imports torch, which is not on every machine

            with _gpu_load(choice, settings, when_lost) as alive:
                loaded = build_torch(
                    model,
                    settings,
                    device=choice.device,
                    draft=beside,
                    least_context=least_context,
                    prefixes=prefixes,
                    places=places,
                    memory_bytes=memory_bytes,
                    reports=Reports(progress, notify, alive),
                )
            return replace(loaded, unused_gpu=choice.unused_gpu)
        facts, files, adapters = model.facts, model.files, _adapters(model, settings, places)
    if projector is None and facts.summary.kind == "text":
        fitting = fitting_projector(settings, path, facts.summary, warn)
        projector = fitting.path if fitting else None
    from edgelm.backends.llama.build import build_llama  # it imports llama.cpp

    loaded = build_llama(
        path,
        files,
        facts,
        settings,
        least_context=least_context,
        draft=require_gguf(draft).path if draft else None,
        adapters=adapters,
        projector=projector,
        repack=repack,
        gpu=choice.device == "gpu",
        progress=progress,
        prefixes=prefixes,
        places=places,
        memory_bytes=memory_bytes,
        warn=warn,
    )
    unused_gpu = choice.unused_gpu or partly_used(loaded.engine.info.device, choice)
    if unused_gpu and not choice.unused_gpu:
        warn(unused_gpu)
    return replace(loaded, unused_gpu=unused_gpu)


def _adapters(model: OpenedModel, settings: Settings, places: Places | None = None) -> tuple[LlamaAdapter, ...]:
    """Return the adapters of the settings, as llama.cpp loads them. Raises ModelError, EdgeLMError."""
    if not settings.lora or model.gguf is None:
        return ()
    return find_adapters(model.gguf, settings.lora, (places or own_places()).cache)


@contextmanager
def _gpu_load(choice: EngineChoice, settings: Settings, when_lost: WhenLost) -> Iterator[Callable[[], None]]:
    """Raise GpuLoadError where CUDA fails while a model is loaded, and the settings do not ask for it.

    A new process goes on, since this one's memory on the GPU and its driver may be in any state. The block calls what
    this yields after each piece of its work: if it does not for long, the GPU hangs, and `when_lost` is told.
    """
    may_go_on = choice.device == "cuda" and may_go_without_cuda(settings)

    def lose(error: DeviceError) -> None:
        when_lost(GpuLoadError(error.message, error.hint) if may_go_on else error)

    watchdog = Watchdog(choice, lose)

    def alive() -> None:
        watchdog.begin(PIECE)

    watchdog.start()
    alive()
    try:
        yield alive
    except (EngineError, DoesNotFitError) as error:
        if may_go_on:
            raise GpuLoadError(error.message, error.hint) from error
        raise
    finally:
        watchdog.close()


def load_evaluation(
    model: EvalSide,
    reference: EvalSide | None,
    settings: Settings,
    *,
    window: int | None,
    repack: bool = True,
    progress: Callable[[float], bool] | None = None,
    cuda_problem: str = "",
    notify: Callable[[str], None] = log.info,
    warn: Callable[[str], None] = log.warning,
    when_lost: WhenLost = lambda _: None,
) -> Evaluation:
    """Load the sides of an evaluation, in one engine unless the reference names another.

    `notify`, `warn` and `when_lost` are those of `build`. Raises the errors of `load_llama_evaluation`, GpuLoadError.
    """
    if reference and reference.engine:
        options = {"progress": progress, "cuda_problem": cuda_problem, "notify": notify, "warn": warn}
        return _load_apart(model, reference, settings, window, {"repack": repack, "when_lost": when_lost, **options})
    choice = choose_for_all(dict.fromkeys(side.model for side in (model, reference) if side), settings, cuda_problem)
    if choice.unused_gpu and not cuda_problem:
        warn(choice.unused_gpu)
    if choice.engine == "torch":
        from edgelm.backends.torch.evaluation import load_torch_evaluation  # it imports torch

        with _gpu_load(choice, settings, when_lost) as alive:
            return load_torch_evaluation(
                model,
                reference,
                settings,
                device=choice.device,
                window=window,
                reports=Reports(progress, notify, alive),
            )
    from edgelm.backends.llama.devices import llama_devices  # these import llama.cpp
    from edgelm.backends.llama.evaluation import load_llama_evaluation

    wish = Wish.of(settings, llama_devices() if choice.device == "gpu" else ())
    threads = settings.threads or usable_cores().physical
    return load_llama_evaluation(
        model,
        reference,
        window=window,
        threads=threads,
        repack=repack,
        wish=wish,
        lora=settings.lora,
        progress=progress,
    )


def _load_apart(
    model: EvalSide, reference: EvalSide, settings: Settings, window: int | None, options: dict[str, Any]
) -> Evaluation:
    """Load two sides of which each has its own engine. The devices of one engine are none of the other's.

    `options` are the other arguments of `load_evaluation`.
    """
    device = settings.device if settings.device == "cpu" else "auto"
    there = replace(settings, engine=reference.engine, device=device)
    with ExitStack() as resources:
        own = resources.enter_context(load_evaluation(model, None, settings, window=window, **options))
        alone = replace(reference, engine="")
        other = resources.enter_context(load_evaluation(alone, None, there, window=own.window, **options))
        require_same_vocabulary(model.model, own.tokenizer, reference.model, other.tokenizer)
        if alone == model and _place(own) == _place(other):
            raise RequestError(
                f"--against {reference.engine} names the engine that the model has itself",
                f"give --engine {'torch' if reference.engine == 'llama' else 'llama'}, or another reference",
            )
        return Evaluation(own.model, other.model, own.tokenizer, own.window, resources.pop_all())


def _place(evaluation: Evaluation) -> tuple[str, str]:
    info = evaluation.model.executor.info
    return info.engine, info.device


def predict(
    path: Path,
    settings: Settings,
    *,
    draft: Path | None = None,
    repack: bool = True,
    usable_bytes: int | None = None,
    limited: bool = False,
    freed_gpu_bytes: int = 0,
    cuda_problem: str = "",
) -> Footprint:
    """Predict the memory that `build` takes for a model, where it may take `usable_bytes` of this machine's; None: all.

    `limited`: --max-memory bounds it. `freed_gpu_bytes` of a GPU's memory are taken now and will be free. Raises
    ModelError, EdgeLMError.
    """
    draft = draft if settings.drafts else None
    with open_model(path) as model, open_model(draft) if draft else nullcontext() as small:
        choice = choose(model, settings, draft=draft, freed_gpu_bytes=freed_gpu_bytes, cuda_problem=cuda_problem)
        on_gpu = choice.device == "cuda"
        usable = available_memory_bytes() if usable_bytes is None else int(usable_bytes / USABLE) + 1
        cuda = find_cuda() if on_gpu else CudaState("")
        free = cuda.free_bytes + freed_gpu_bytes if on_gpu else usable
        limit = usable_bytes if limited and not on_gpu else None
        machine = MachineMemory(free_bytes=free, cores=usable_cores().physical, limit_bytes=limit)
        if choice.engine == "torch":
            beside, context = small.facts if small else None, cuda.context_bytes
            footprint = plan_for_torch(
                model.facts, beside, settings, machine, choice.device, context_bytes=context
            ).plan.footprint(choice.device)
            return footprint.with_bytes(context) if on_gpu else footprint
        from edgelm.backends.llama.build import plan_context  # these import llama.cpp
        from edgelm.backends.llama.devices import llama_devices

        facts = with_adapters(model.facts, _adapters(model, settings))
        wish = Wish.of(settings, llama_devices(facts) if choice.device == "gpu" else ())
        beside = small.facts if small else None
        planned = plan_context(path, facts, settings, wish, draft_facts=beside, repack=repack, machine=machine)
        return planned.footprint(choice.device)


def choose(
    model: OpenedModel,
    settings: Settings,
    *,
    draft: Path | None = None,
    least_context: int = 0,
    freed_gpu_bytes: int = 0,
    cuda_problem: str = "",
) -> EngineChoice:
    """Choose the engine of an open model, and of its draft model, on this machine.

    `freed_gpu_bytes` of the GPU's memory are taken now and will be free. `cuda_problem` is why CUDA is not to be used.
    Raises ModelError, EdgeLMError.
    """
    from edgelm.backends.llama.binding import BUILD, gpu_problem
    from edgelm.backends.llama.devices import llama_devices  # these import llama.cpp

    prefers_torch = settings.engine == "torch" or settings.device == "cuda"
    may_use_cuda = settings.engine != "llama" and settings.device in ("auto", "cuda")
    cuda = CudaState(cuda_problem or "the settings say so")
    if may_use_cuda and not cuda_problem:
        cuda = find_cuda()
    cuda = replace(cuda, free_bytes=cuda.free_bytes + freed_gpu_bytes)
    may_use_torch = has_torch() and (prefers_torch or not cuda.problem or model.gguf is None)
    torch_problem = model.torch_problem() if may_use_torch else ""
    kernel_problem = fit_problem = draft_problem = ""
    with open_model(draft) if draft else nullcontext() as draft_model:
        if draft_model and may_use_torch:
            draft_problem = draft_model.torch_problem("reference" if cuda.problem else "triton")
        if not cuda.problem and not torch_problem:
            from edgelm.backends.torch.kept_checks import kept_problem  # only with a GPU

            kernel_problem = model.torch_problem("triton") or kept_problem(model, settings, own_places().cache)
            if not kernel_problem:
                fit_problem = _fit_problem(model, draft_model, settings, cuda, least_context)
    gpu = standing_gpu()
    devices = llama_devices() if model.gguf is not None else ()
    trial = None if cuda.problem else kept_trial(own_places().cache)
    choice = choose_engine(
        settings,
        Situation(
            model=model.name,
            llama_problem=model.llama_problem,
            torch_problem=torch_problem,
            kernel_problem=kernel_problem,
            fit_problem=fit_problem,
            draft_problem=draft_problem,
            has_torch=has_torch(),
            has_offload=bool(devices),
            has_card=any(not device.shared for device in devices),
            faster=trial.faster if trial else None,
            offload_problem=gpu_problem,
            offload_hint=gpu_backend_command(BUILD, gpu.backend) if gpu else "",
            gpu=gpu,
            cuda=cuda,
        ),
    )
    if choice.device != "cuda":
        return choice
    from edgelm.backends.torch.kept_checks import kept_reasons  # only with a GPU

    reasons = [*choice.reasons, *kept_reasons(model, settings, own_places().cache)]
    if settings.tune and not num_tuned(own_places().cache, cuda.name):
        reasons.append("no kernel is tuned for this GPU yet: that is done while the model is loaded")
    return replace(choice, reasons=tuple(reasons))


def choose_for_all(paths: Iterable[Path], settings: Settings, cuda_problem: str = "") -> EngineChoice:
    """Choose one engine for several models: the torch engine where one of them needs it."""
    choices = _choices(paths, settings, cuda_problem)
    if len({choice.engine for choice in choices}) > 1:
        choices = _choices(paths, replace(settings, engine="torch"), cuda_problem)
    return next((choice for choice in choices if choice.device == "cpu"), choices[0])


def _choices(paths: Iterable[Path], settings: Settings, cuda_problem: str) -> list[EngineChoice]:
    choices = []
    for path in paths:
        with open_model(path) as model:
            choices.append(choose(model, settings, cuda_problem=cuda_problem))
    return choices


def _fit_problem(
    model: OpenedModel, draft: OpenedModel | None, settings: Settings, cuda: CudaState, least_context: int
) -> str:
    """Return why a model does not fit in the GPU's memory, with its draft model; empty: it does."""
    machine = MachineMemory(free_bytes=cuda.free_bytes, cores=1)
    try:
        plan_for_torch(
            model.facts,
            draft.facts if draft else None,
            settings,
            machine,
            "cuda",
            context_bytes=cuda.context_bytes,
            least_context=least_context,
        ).plan.require()
    except ModelError as error:
        if settings.engine == "torch":
            raise
        return error.message
    return ""
