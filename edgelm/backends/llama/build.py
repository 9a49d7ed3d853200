"""Builds an engine over llama.cpp from settings and a GGUF.

Owns the choices that need several parts: context and memory, threads, snapshots on disk, and the draft model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edgelm.backends.drafting import (
    NO_HEADS,
    heads_proof,
    measured_clock,
    ngram_drafter,
    require_same_vocabulary,
    throttled,
)
from edgelm.backends.llama.binding import load_mtmd
from edgelm.backends.llama.buffers import LlamaBuffers
from edgelm.backends.llama.devices import llama_devices
from edgelm.backends.llama.embedding import embedder_of
from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions, state_identity
from edgelm.backends.llama.heads import has_heads_api
from edgelm.backends.llama.memory import LlamaMemory, repacked_types
from edgelm.backends.llama.model import DeviceMemoryError, LlamaModel
from edgelm.backends.llama.offload import OffloadedMemory
from edgelm.backends.llama.placement import Placement, Wish
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.backends.model import LoadedModel
from edgelm.backends.plan import DRAFT_KV, DraftModel, MachineMemory, Plan, draft_layouts, plan
from edgelm.backends.reports import Reports
from edgelm.backends.snapshot_files import PROMPT_TOKENS, Bounds, SnapshotFolder
from edgelm.backends.snapshots import SnapshotStore
from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError, EngineError, ModelError
from edgelm.base.machine.cpu import usable_cores
from edgelm.base.machine.memory import USABLE, available_memory_bytes
from edgelm.base.places import Places
from edgelm.base.workers.messages import EngineJob
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.llama_checks import check_for_llama
from edgelm.checkpoints.projector import read_projector
from edgelm.checkpoints.summary import ModelFacts, model_facts
from edgelm.engine.clock import StepClock
from edgelm.engine.core import Drafter
from edgelm.engine.engine import Engine
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.scheduler import Scheduler
from edgelm.engine.speculation.model_drafter import ModelDrafter
from edgelm.engine.speculation.mtp_drafter import MtpDrafter
from edgelm.engine.step_times import DEPTH
from edgelm.text.prompt_token_cache import PromptTokenCache
from edgelm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgelm.backends.llama.adapter import LlamaAdapter
    from edgelm.backends.llama.projector import Projector
    from edgelm.backends.projectors import HeadsFile

ROLLBACK_LEN = 3  # tokens of a draft that recurrent states can go back: each costs another copy of the states
RETRIES = 8  # to halve and halve again what was on the devices

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LlamaFiles:
    """The files of a model, and those that are loaded beside it."""

    parts: tuple[Path, ...]  # of the GGUF
    draft: Path | None = None  # the GGUF of a model that drafts
    adapters: tuple[LlamaAdapter, ...] = ()
    projector: Path | None = None
    heads: HeadsFile | None = None  # beside a model without heads of its own, or in place of them


def build_llama(
    job: EngineJob, facts: ModelFacts, files: LlamaFiles, *, gpu: bool, places: Places, reports: Reports
) -> LoadedModel:
    """Load the checked GGUF of a job and start an engine over it. With `gpu`, as much as fits goes to the devices.

    Raises ModelError for a file that llama.cpp refuses or that does not fit in memory; EdgeLMError for a context that
    the model cannot have.
    """
    settings, repack = job.settings, job.repack
    if settings.quantize != "off":
        raise EdgeLMError("only the torch engine has --quantize", "pull a quantized GGUF, or use --engine torch")
    repeatable = settings.repeatable and facts.summary.kind == "text"
    if repeatable and gpu:
        raise EdgeLMError("llama.cpp is not repeatable on a GPU", "add --device cpu, or omit --repeatable")
    if files.adapters:
        from edgelm.backends.llama.adapter import with_adapters

        facts = with_adapters(facts, files.adapters)
    projector = _usable(files.projector, settings, reports.warn)
    drafting = job.drafts and settings.drafts
    draft_facts = _read_facts(files.draft) if files.draft and drafting else None
    wish = Wish.of(settings, llama_devices(facts) if gpu else ())
    if job.gpu_bytes is not None:  # what is free now may be promised to a model that loads beside this one
        wish = wish.with_room(limit_bytes=int(job.gpu_bytes / USABLE) + 1)
    planned = plan_context(
        job.model,
        facts,
        settings,
        wish,
        draft_facts=draft_facts,
        heads=files.heads if drafting else None,
        least_context=job.least_context,
        repack=repack,
        machine=machine_memory(job.memory_bytes),
        projector_bytes=read_projector(projector).memory_bytes if projector else 0,
    )
    option = planned.require()
    for text in filter(None, (planned.note, planned.warning)):
        reports.warn(text)
    if files.heads and drafting and not planned.heads:
        reports.warn(f"the heads of {files.heads.path.name} do not draft: {_why_no_heads(job.model, facts, wish)}")
    options = LlamaOptions(
        context=option.context,
        kv=option.kv,
        max_sequences=settings.parallel,
        threads=planned.threads,
        rollback=planned.rollback,
        heads=planned.heads,
    )
    if repeatable:
        repack, options = _made_repeatable(job, files, options, places, reports)
    load_weights = partial(
        LlamaModel,
        job.model,
        files=files.parts,
        repack=repack,
        heads=options.heads and not files.heads,
        adapters=files.adapters,
        progress=reports.progress,
    )
    if facts.summary.kind != "text":
        from edgelm.backends.llama.encoder import build_encoder  # most models write text

        placement = OffloadedMemory(facts, wish, sequences=1).placement(option.kv, option.context)
        model = load_weights(placement=placement)
        footprint = planned.footprint("gpu" if gpu else "cpu", 0)
        return build_encoder(model, facts, option.context, planned.threads, footprint)
    ram = settings.prefix_cache_ram
    snapshot_bytes = planned.snapshot_bytes if ram is None else int(ram * 2**30)
    memory = OffloadedMemory(facts, wish, sequences=settings.parallel)
    load = partial(_load, job, files, options, load_weights, projector, snapshot_bytes)
    loaded = _first_that_loads(load, memory.from_placement(option.kv, option.context))
    clock, drafter = StepClock(), None
    if drafting:
        clock, drafter = _clock_and_drafter(loaded, replace(job, repack=repack), facts, files, options, places, reports)
    kv = SlotKV(loaded.executor.info, snapshot_bytes, loaded.store, shared_share=settings.prefix_cache_shared / 100)
    scheduler = Scheduler(loaded.executor.info, kv, clock, drafter)
    prompt_tokens = PromptTokenCache(loaded.folder.path / PROMPT_TOKENS if loaded.folder else None)
    footprint = planned.footprint("gpu" if gpu else "cpu", snapshot_bytes)
    make_embedder = partial(embedder_of, loaded.model, facts, options.context, planned.threads)
    engine = Engine(loaded.executor, scheduler, clock, make_embedder=make_embedder).start()
    return LoadedModel(planned.name, engine, loaded.tokenizer, prompt_tokens, footprint, pictures=loaded.eyes)


def _load(
    job: EngineJob,
    files: LlamaFiles,
    options: LlamaOptions,
    load_weights: Callable[..., LlamaModel],
    projector: Path | None,
    snapshot_bytes: int,
    placement: Placement,
) -> _Loaded:
    """Load a model with one placement, and what reads its texts and pictures; nothing stays where that fails."""
    with ExitStack() as if_it_fails:
        model = load_weights(placement=placement)
        if_it_fails.callback(model.close)
        eyes, own = _with_eyes(projector, model, options)
        if eyes:
            if_it_fails.callback(eyes.close)
        heads = None
        if files.heads and options.heads:
            heads = LlamaModel(files.heads.path, repack=job.repack, heads=True)
            if_it_fails.callback(heads.close)
        tokenizer = LlamaTokenizer.of_model(model.native, model)
        folder = snapshot_folder(job.prefixes, model, files.parts, options, Bounds.of(job.settings))
        store = SnapshotStore(snapshot_bytes, folder)
        loaded = _Loaded(model, tokenizer, folder, store, LlamaExecutor(model, own, store, eyes, heads), eyes)
        if_it_fails.pop_all()
    return loaded


def _clock_and_drafter(
    loaded: _Loaded,
    job: EngineJob,
    facts: ModelFacts,
    files: LlamaFiles,
    options: LlamaOptions,
    places: Places,
    reports: Reports,
) -> tuple[StepClock, Drafter | None]:
    """Return the clock of the steps and the drafter, and warn where nothing drafts."""
    if not loaded.executor.info.can_draft:
        reports.warn(f"nothing is drafted: {_why_no_drafts(job.model, facts)}")
        return StepClock(), None
    deep_row_s = LlamaMemory(facts, sequences=1).flash_seconds(DEPTH) / options.threads
    try:
        clock, drafter = _drafting(loaded, job, files, options, places, deep_row_s)
    except EdgeLMError:
        loaded.executor.close()
        raise
    if not drafter and not files.heads:  # of those that are left out, the reason was said
        reports.warn(NO_HEADS)
    return clock, drafter


def machine_memory(limit_bytes: int | None = None) -> MachineMemory:
    """Return the memory of this machine, of which a model may take so much."""
    return MachineMemory(free_bytes=available_memory_bytes(), cores=usable_cores().physical, limit_bytes=limit_bytes)


def plan_context(
    path: Path,
    facts: ModelFacts,
    settings: Settings,
    wish: Wish | None = None,
    *,
    draft_facts: ModelFacts | None = None,
    heads: HeadsFile | None = None,
    projector_bytes: int = 0,
    least_context: int = 0,
    repack: bool = True,
    machine: MachineMemory | None = None,
) -> Plan:
    """Choose context and KV mode: by formulas, and by llama.cpp's own sizes where the last megabytes decide.

    Where `wish` has devices, all sizes are by formulas.
    `draft_facts` are those of a model that drafts, whose sizes are by formulas. `heads` draft in place of the model's
    own. `machine` is this one as it is now, unless another is given.
    """
    machine = machine or machine_memory()
    types = repacked_types() if repack else frozenset()
    repeatable = settings.repeatable and facts.summary.kind == "text"
    draft = None
    if draft_facts:
        beside = LlamaMemory(draft_facts, sequences=settings.parallel, copied_types=types)
        draft = DraftModel.of(draft_facts, beside)

    def planned(facts: ModelFacts, rollback: int, heads: Path | None) -> Plan:
        choose = partial(plan, facts, settings, machine, draft=draft, projector_bytes=projector_bytes)
        choose = partial(choose, least_context=least_context)
        memory = LlamaMemory(
            facts, sequences=settings.parallel, copied_types=types, repeatable=repeatable, heads=heads is not None
        )
        if wish and wish.devices:
            offloaded = OffloadedMemory(facts, wish, sequences=settings.parallel)
            return choose(offloaded)
        estimated = choose(memory)
        if estimated.comfortable or repeatable or facts.summary.kind != "text":  # an embedder allocates by its inputs
            return estimated
        with LlamaBuffers(
            path, facts.summary, sequences=settings.parallel, repack=repack, rollback=rollback, heads=heads
        ) as buffers:
            return choose(memory.measured_by(buffers))

    length = rollback_len(path, facts) if settings.drafts else 0
    with_heads = facts.with_heads(heads.facts) if heads else facts
    for rollback, by_heads in draft_layouts(length, may_use_heads(with_heads, settings, length, wish)):
        drafting_facts = (with_heads if by_heads else facts).with_rollback(rollback)
        heads_path = (heads.path if heads else path) if by_heads else None
        drafting = planned(drafting_facts, rollback, heads_path)
        if drafting.preferred:
            return replace(drafting, rollback=rollback, heads=by_heads)
    return planned(facts, 0, None)


def may_use_heads(facts: ModelFacts, settings: Settings, rollback: int, wish: Wish | None = None) -> bool:
    """Tell whether the heads of a model can draft. They do on the processor only, whose memory is planned for them."""
    can_draft = rollback > 0 or not facts.state_bytes
    return (
        settings.may_draft("mtp")
        and facts.mtp_heads > 0
        and can_draft
        and has_heads_api()
        and not (wish and wish.devices)
    )


def rollback_len(path: Path, facts: ModelFacts) -> int:
    """Return how many drafted tokens llama.cpp can take back in a model with recurrent layers: it alone knows."""
    if not facts.state_bytes or facts.summary.kind != "text":
        return 0
    with LlamaBuffers(path, facts.summary, sequences=1, rollback=ROLLBACK_LEN) as buffers:
        return buffers.rollback("f16")


def snapshot_folder(
    root: Path | None, model: LlamaModel, files: Sequence[Path], options: LlamaOptions, bounds: Bounds
) -> SnapshotFolder | None:
    """Return the folder for a model's snapshots; None without a root, or where the bounds or the files forbid it."""
    if root is None or not bounds.max_bytes:
        return None
    try:
        return SnapshotFolder(root, state_identity(model, files, options), bounds)
    except OSError as error:
        log.warning("conversations are not kept on disk: %s", error)
        return None


def _with_eyes(
    projector: Path | None, model: LlamaModel, options: LlamaOptions
) -> tuple[Projector | None, LlamaOptions]:
    """Return the projector, loaded, and options for its pictures."""
    if projector is None:
        return None, options
    from edgelm.backends.llama.projector import Projector  # most models see nothing

    eyes = Projector(projector, model, options.threads)
    return eyes, replace(options, picture_tokens=eyes.max_tokens if eyes.whole else 0)


def _usable(projector: Path | None, settings: Settings, warn: Callable[[str], None]) -> Path | None:
    """Return a projector that can be used here. Calls `warn` with the reason if one is left out. Raises EngineError."""
    if projector and settings.repeatable:
        warn("--repeatable: no pictures are read")
        return None
    try:
        if projector:
            load_mtmd()
    except EngineError as error:
        if settings.mmproj != "auto":
            raise
        warn(f"no pictures are read: {error}")
        return None
    return projector


def _made_repeatable(
    job: EngineJob, files: LlamaFiles, options: LlamaOptions, places: Places, reports: Reports
) -> tuple[bool, LlamaOptions]:
    """Return whether to repack the weights, and the options, so that answers repeat. Raises ModelError."""
    from edgelm.backends.llama.repeatable import MOST_ROWS, rule_for  # only with --repeatable

    def load(repacked: bool) -> LlamaModel:
        return LlamaModel(job.model, files=files.parts, repack=repacked, adapters=files.adapters)

    known = places.cache / "repeatable"
    try:
        rule = rule_for(load, options, files.parts, files.adapters, known, repack=job.repack)
    except OSError as error:
        raise ModelError(f"{files.parts[0].name} cannot be read any more: {error.strerror}", "try again") from None
    if rule.rows < MOST_ROWS:
        reports.warn(f"--repeatable: this model's prompts are read {rule.rows} tokens at a time, which is slow")
    return rule.repack, replace(options, repeatable_rows=rule.rows)


def _identity(model: LlamaModel, files: Sequence[Path], options: LlamaOptions) -> bytes:
    try:
        return state_identity(model, files, options)
    except OSError as error:
        raise ModelError(f"{files[0].name} cannot be read any more: {error.strerror}", "try again") from None


def _why_no_heads(path: Path, facts: ModelFacts, wish: Wish) -> str:
    if not has_heads_api():
        return "this build of llama.cpp cannot run heads"
    if facts.state_bytes and not rollback_len(path, facts):
        return _cannot_take_back(facts)
    return "heads draft on the processor only" if wish.devices else "there is no memory for them"


def _why_no_drafts(path: Path, facts: ModelFacts) -> str:
    if rollback_len(path, facts):
        return "there is no memory for the states that a rejected draft goes back to; a smaller --parallel needs less"
    return _cannot_take_back(facts)


def _cannot_take_back(facts: ModelFacts) -> str:
    return f"llama.cpp cannot take tokens back in a model of {facts.summary.architecture}"


class _Loaded(NamedTuple):
    model: LlamaModel
    tokenizer: Tokenizer
    folder: SnapshotFolder | None
    store: SnapshotStore
    executor: LlamaExecutor
    eyes: Projector | None


def _first_that_loads(load: Callable[[Placement], _Loaded], placements: Sequence[Placement]) -> _Loaded:
    """Load a model with the first placement that the devices have memory for.

    A driver may have less than it says. Raises DeviceMemoryError where no placement remains.
    """
    for num_tries in range(RETRIES):
        placement, rest = placements[0], placements[1:]
        try:
            return load(placement)
        except DeviceMemoryError as error:
            if not rest:
                raise
            skipped = len(rest) - 1 if num_tries == RETRIES - 2 else len(rest) // 4
            placements = rest[skipped:]
            log.warning("%s; trying %d layers", error.message, placements[0].gpu_layers)
    raise AssertionError


def _drafting(
    loaded: _Loaded, job: EngineJob, files: LlamaFiles, options: LlamaOptions, places: Places, deep_row_s: float
) -> tuple[StepClock, Drafter | None]:
    """Return the measured times of steps, and the drafters that the settings allow; None: there is none."""
    settings, tokenizer, executor = job.settings, loaded.tokenizer, loaded.executor
    identity = _identity(loaded.model, files.parts, options)
    clock = measured_clock(executor, settings, places, identity, deep_row_s)
    drafters: dict[str, Drafter] = {}  # in the order in which they are asked
    if settings.may_draft("ngram"):
        drafters["ngram"] = ngram_drafter(tokenizer, settings, places, identity)
    if executor.heads:
        drafters["mtp"] = MtpDrafter(executor.heads, clock.token_s)
    if files.draft:
        drafters["model"] = _load_draft_model(files.draft, options, job.repack, tokenizer, clock)
    proof = heads_proof(places, identity, files.heads.path if files.heads else None)
    return clock, throttled(drafters, clock, settings, proof) if drafters else None


# -- the draft model ---------------------------------------------------------------------------------------------------


def _read_facts(path: Path) -> ModelFacts:
    with open_gguf(path) as gguf:
        check_for_llama(gguf)
        return model_facts(gguf)


def _load_draft_model(
    path: Path, options: LlamaOptions, repack: bool, tokenizer: Tokenizer, clock: StepClock
) -> ModelDrafter:
    """Load a draft model beside the model that has `tokenizer` and `options`.

    Raises ModelError for a file that cannot be loaded, or that has another vocabulary.
    """
    model = LlamaModel(path, repack=repack)
    try:
        require_same_vocabulary(tokenizer, LlamaTokenizer.of_model(model.native, model), path.name)
        context = min(options.context, model.train_context or options.context)
        own = replace(
            options,
            context=context,
            kv=DRAFT_KV,
            max_rows=options.max_sequences,
            repeatable_rows=0,
            heads=False,
            picture_tokens=0,
        )
        executor = LlamaExecutor(model, own)
    except EdgeLMError:
        model.close()
        raise
    return ModelDrafter(executor, clock.token_s)
