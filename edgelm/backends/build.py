"""The composition root: settings and a model become an engine, or an evaluation.

Owns the dispatch between the engines; each is built by its own package. Every part is an argument, so that a test can
build an engine from other parts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgelm.backends.choice import EngineChoice, Situation, choose_engine, may_be_told, may_go_without_cuda, partly_used
from edgelm.backends.llama.placement import Wish
from edgelm.backends.model import LoadedModel, OpenedModel, open_heads, open_model
from edgelm.backends.plan import MachineMemory
from edgelm.backends.projectors import fitting_heads, fitting_projector, names_heads
from edgelm.backends.reports import LOGGED, Reports
from edgelm.base.config import Settings
from edgelm.base.errors import DeviceError, DoesNotFitError, EngineError, GpuLoadError, ModelError, RequestError
from edgelm.base.machine.cpu import usable_cores
from edgelm.base.machine.cuda import find_cuda
from edgelm.base.machine.gpu import CudaState, has_torch, llama_backend, standing_gpu
from edgelm.base.machine.llama_build import gpu_backend_command
from edgelm.base.machine.memory import USABLE, available_memory_bytes
from edgelm.base.places import Places, own_places
from edgelm.base.workers.messages import EngineJob, EvalJob, EvalSide, Footprint
from edgelm.engine.watchdog import Place, Watchdog
from edgelm.library.local import find_draft_model, require_gguf
from edgelm.library.projectors import find_projector
from edgelm.text.template_file import read_template_file

if TYPE_CHECKING:  # most models have no adapter, and are not evaluated
    from edgelm.backends.llama.adapter import LlamaAdapter
    from edgelm.evaluation.evaluate import Evaluation

log = logging.getLogger(__name__)

PIECE = "a piece of loading the model"
START = "the start of CUDA"


def build(job: EngineJob, reports: Reports = LOGGED, places: Places | None = None) -> LoadedModel:
    """Load the GGUF or the folder of safetensors of a job and start an engine with it.

    `places` are where drafting and checks of this machine keep their data; None: the user's own. Raises ModelError for
    a file that is damaged, not supported or does not fit in memory; EdgeLMError for a context that the model cannot
    have, or an engine or device that is not available; GpuLoadError where CUDA fails and the settings allow a new
    process to go on without it.
    """
    settings, places = job.settings, places or own_places()
    template = read_template_file(settings.template) if settings.template else None
    draft = find_draft_model(settings, places.hub) if job.drafts else None
    named = draft.path if draft else None
    has_heads = names_heads(named)
    with ExitStack() as files:
        model = files.enter_context(open_model(job.model))
        heads = fitting_heads(settings, job.model, model.facts, named, reports.warn) if job.drafts else None
        drafting = files.enter_context(open_heads(model, heads.path if heads else None))
        beside = None if has_heads else named
        with _cuda_start(settings, job.cuda_problem, reports):
            choice = choose(
                drafting,
                settings,
                draft=beside,
                least_context=job.least_context,
                held_gpu_bytes=job.held_gpu_bytes,
                cuda_problem=job.cuda_problem,
            )
        for reason in choice.reasons:
            log.info("%s", reason)
        if choice.unused_gpu and not job.cuda_problem:  # that one was told already
            reports.warn(choice.unused_gpu)
        if choice.engine == "torch":
            if find_projector(settings, job.model):
                reports.warn("the torch engine reads no pictures; --engine llama does")
            from edgelm.backends.torch.build import build_torch  # it imports torch, which is not on every machine

            with _gpu_load(choice, settings, reports) as watched:
                loaded = build_torch(drafting, job, device=choice.device, draft=beside, places=places, reports=watched)
        facts, parts, adapters = model.facts, model.files, _adapters(model, settings, places)
        sampling = model.sampling
    if choice.engine == "llama":
        from edgelm.backends.llama.build import LlamaFiles, build_llama  # it imports llama.cpp

        eyes = None
        if facts.summary.kind == "text":
            eyes = fitting_projector(settings, job.model, facts.summary, reports.warn)
        projector = eyes.path if eyes else None
        small = require_gguf(draft).path if draft and not has_heads else None
        llama_files = LlamaFiles(parts, small, adapters, projector, heads)
        loaded = build_llama(job, facts, llama_files, gpu=choice.device == "gpu", places=places, reports=reports)
    unused_gpu = choice.unused_gpu or partly_used(loaded.engine.info.device, choice, settings)
    if unused_gpu and not choice.unused_gpu:
        reports.warn(unused_gpu)
    loaded = replace(loaded, unused_gpu=unused_gpu, sampling=sampling)
    if template is not None:
        loaded.tokenizer.chat_template = template
    return loaded


def _adapters(model: OpenedModel, settings: Settings, places: Places) -> tuple[LlamaAdapter, ...]:
    """Return the adapters of the settings, as llama.cpp loads them. Raises ModelError, EdgeLMError."""
    if not settings.lora or model.gguf is None:
        return ()
    from edgelm.backends.llama.adapter import find_adapters

    return find_adapters(model.gguf, settings.lora, places.cache)


@contextmanager
def _gpu_load(choice: EngineChoice, settings: Settings, reports: Reports) -> Iterator[Reports]:
    """Raise GpuLoadError where CUDA fails while a model is loaded, and the settings do not ask for it.

    A new process goes on, since this one's memory on the GPU and its driver may be in any state. Yields reports that a
    watchdog sees too.
    """
    may_go_on = choice.device == "cuda" and may_go_without_cuda(settings)
    with _watched(choice, PIECE, reports, may_go_on=may_go_on) as watched:
        try:
            yield watched
        except (EngineError, DoesNotFitError) as error:
            if may_go_on:
                raise GpuLoadError(error.message, error.hint) from error
            raise


def _cuda_start(settings: Settings, cuda_problem: str, reports: Reports) -> AbstractContextManager[object]:
    """Return what watches the choice of an engine, where that starts CUDA: a GPU may hang there already."""
    if cuda_problem or not _may_use_cuda(settings):
        return nullcontext()
    return _watched(EngineChoice("torch", "cuda"), START, reports, may_go_on=may_go_without_cuda(settings))


@contextmanager
def _watched(place: Place, work: str, reports: Reports, *, may_go_on: bool) -> Iterator[Reports]:
    """Yield reports that a watchdog sees too: without one for long, the GPU hangs.

    Then `when_lost` of the reports gets the error: GpuLoadError where another process `may_go_on` without the GPU.
    """

    def lose(error: DeviceError) -> None:
        reports.when_lost(GpuLoadError(error.message, error.hint) if may_go_on else error)

    watchdog = Watchdog(place, lose)

    def alive() -> None:
        watchdog.begin(work)

    watchdog.start()
    alive()
    try:
        yield replace(reports, alive=alive)
    finally:
        watchdog.close()


def load_evaluation(job: EvalJob, reports: Reports) -> Evaluation:
    """Load the sides of an evaluation, in one engine unless the reference names another.

    Raises the errors of `load_llama_evaluation`, GpuLoadError.
    """
    model, reference, settings = EvalSide(job.model, job.kv), job.against, job.settings
    if reference and reference.engine:
        return _load_apart(job, reference, reports)
    paths = dict.fromkeys(side.model for side in (model, reference) if side)
    with _cuda_start(settings, job.cuda_problem, reports):
        choice = choose_for_all(paths, settings, job.cuda_problem)
    if choice.unused_gpu and not job.cuda_problem:
        reports.warn(choice.unused_gpu)
    if choice.engine == "torch":
        from edgelm.backends.torch.evaluation import load_torch_evaluation  # it imports torch

        with _gpu_load(choice, settings, reports) as watched:
            return load_torch_evaluation(
                model, reference, settings, device=choice.device, window=job.window, reports=watched
            )
    from edgelm.backends.llama.devices import llama_devices  # these import llama.cpp
    from edgelm.backends.llama.evaluation import load_llama_evaluation

    return load_llama_evaluation(
        model,
        reference,
        window=job.window,
        threads=settings.threads or usable_cores().physical,
        repack=job.repack,
        wish=Wish.of(settings, llama_devices() if choice.device == "gpu" else ()),
        lora=settings.lora,
        progress=reports.progress,
    )


def _load_apart(job: EvalJob, reference: EvalSide, reports: Reports) -> Evaluation:
    """Load two sides of which each has its own engine. The devices of one engine are none of the other's."""
    device = job.settings.device if job.settings.device == "cpu" else "auto"
    there = replace(job.settings, engine=reference.engine, device=device)
    alone = replace(job, against=None)
    with ExitStack() as resources:
        own = resources.enter_context(load_evaluation(alone, reports))
        beside = replace(alone, model=reference.model, kv=reference.kv, settings=there, window=own.window)
        other = resources.enter_context(load_evaluation(beside, reports))
        from edgelm.evaluation.evaluate import Evaluation, require_same_vocabulary

        require_same_vocabulary(job.model, own.tokenizer, reference.model, other.tokenizer)
        if (beside.model, beside.kv) == (job.model, job.kv) and _place(own) == _place(other):
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

    `limited`: --max-memory bounds it. `freed_gpu_bytes` of a GPU's memory are taken now and will be free; negative:
    promised to others. Raises ModelError, EdgeLMError.
    """
    named = draft if settings.drafts else None
    draft = None if names_heads(named) else named
    with ExitStack() as files:
        model = files.enter_context(open_model(path))
        small = files.enter_context(open_model(draft)) if draft else None
        heads = fitting_heads(settings, path, model.facts, named)
        drafting = files.enter_context(open_heads(model, heads.path if heads else None))
        choice = choose(drafting, settings, draft=draft, freed_gpu_bytes=freed_gpu_bytes, cuda_problem=cuda_problem)
        on_gpu = choice.device == "cuda"
        usable = available_memory_bytes() if usable_bytes is None else int(usable_bytes / USABLE) + 1
        cuda = find_cuda() if on_gpu else CudaState("")
        free = cuda.free_bytes + freed_gpu_bytes if on_gpu else usable
        limit = usable_bytes if limited and not on_gpu else None
        machine = MachineMemory(free_bytes=free, cores=usable_cores().physical, limit_bytes=limit)
        if choice.engine == "torch":
            from edgelm.backends.torch.memory import plan_for_torch

            beside, context = small.facts if small else None, cuda.context_bytes
            footprint = plan_for_torch(
                drafting.facts, beside, settings, machine, choice.device, context_bytes=context
            ).plan.footprint(choice.device)
            return footprint.with_bytes(context) if on_gpu else footprint
        from edgelm.backends.llama.build import plan_context  # these import llama.cpp
        from edgelm.backends.llama.devices import llama_devices

        facts = model.facts
        if adapters := _adapters(model, settings, own_places()):
            from edgelm.backends.llama.adapter import with_adapters

            facts = with_adapters(facts, adapters)
        wish = Wish.of(settings, llama_devices(facts) if choice.device == "gpu" else ()).with_room(freed_gpu_bytes)
        planned = plan_context(
            path,
            facts,
            settings,
            wish,
            draft_facts=small.facts if small else None,
            heads=heads,
            repack=repack,
            machine=machine,
        )
        return planned.footprint(choice.device)


def choose(
    model: OpenedModel,
    settings: Settings,
    *,
    draft: Path | None = None,
    least_context: int = 0,
    freed_gpu_bytes: int = 0,
    held_gpu_bytes: int = 0,
    cuda_problem: str = "",
) -> EngineChoice:
    """Choose the engine of an open model, and of its draft model, on this machine.

    `freed_gpu_bytes` of the GPU's memory are taken now and will be free; other engines of this server have
    `held_gpu_bytes`. `cuda_problem` is why CUDA is not to be used.
    Raises ModelError, EdgeLMError.
    """
    from edgelm.backends.llama.binding import BUILD, gpu_problem
    from edgelm.backends.llama.devices import llama_devices  # these import llama.cpp

    prefers_torch = settings.engine == "torch" or settings.device == "cuda"
    cuda = CudaState(cuda_problem or "the settings say so")
    if _may_use_cuda(settings) and not cuda_problem:
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
    gpu = standing_gpu() if may_be_told(settings) else None  # nvidia-smi takes up to a second
    devices = llama_devices() if model.gguf is not None else ()
    trial = None
    if devices and not cuda.problem:
        from edgelm.backends.kept_trials import kept_trial  # only with a GPU

        trial = kept_trial(own_places().cache)
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
            offload_hint=gpu_backend_command(BUILD, llama_backend(gpu)) if gpu and not devices else "",
            gpu=gpu,
            held_bytes=held_gpu_bytes,
            cuda=cuda,
        ),
    )
    if choice.device != "cuda":
        return choice
    from edgelm.backends.torch.kept_checks import kept_reasons  # only with a GPU
    from edgelm.backends.tuned import num_tuned

    reasons = [*choice.reasons, *kept_reasons(model, settings, own_places().cache)]
    if settings.tune and not num_tuned(own_places().cache, cuda.name):
        reasons.append("no kernel is tuned for this GPU yet: that is done while the model is loaded")
    return replace(choice, reasons=tuple(reasons))


def _may_use_cuda(settings: Settings) -> bool:
    return settings.engine != "llama" and settings.device in ("auto", "cuda")


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
    from edgelm.backends.torch.memory import plan_for_torch  # only with a GPU

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
        # Others, and other parts of it (MIG), may have room: it is the one that CUDA counts first.
        return f"{error.message} on {cuda.name}" if error.message.endswith("are free") else error.message
    return ""
