"""An engine over llama.cpp, from settings and a GGUF.

Owns the choices that need all sides: how much context, which threads, whether it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from llama_cpp import llama_cpp as L

from edgelm.build.loaded import Loaded
from edgelm.config import Places, Settings
from edgelm.core import Drafter
from edgelm.drafting import find_draft_model, guarded, load_draft_model, measured_clock, ngram_drafter
from edgelm.engine.clock import StepClock
from edgelm.engine.engine import Engine
from edgelm.engine.scheduler import Scheduler
from edgelm.engine.slots import SlotKV
from edgelm.errors import EdgeLMError, ModelError
from edgelm.executors.cores import usable_cores
from edgelm.executors.llama import LlamaExecutor, LlamaOptions
from edgelm.executors.llama_buffers import LlamaBuffers
from edgelm.executors.llama_memory import LlamaMemory, repacked_types
from edgelm.executors.llama_model import LlamaModel
from edgelm.executors.memory import available_memory_bytes
from edgelm.executors.snapshot_files import CHATS, Bounds
from edgelm.executors.snapshots import SnapshotStore
from edgelm.executors.state_identity import snapshot_folder, state_identity
from edgelm.library.plan import MachineMemory, Plan, plan
from edgelm.text.known_chats import KnownChats
from edgelm.text.tokenizer import LlamaTokenizer, Tokenizer
from edgelm.weights.checks import check_for_llama
from edgelm.weights.facts import ModelFacts, model_facts
from edgelm.weights.gguf import open_gguf

ALL_LAYERS = 10_000


def has_offload() -> bool:
    """Whether this build of llama.cpp can compute on a GPU."""
    return bool(L.llama_supports_gpu_offload())


def build_llama(
    path: Path,
    files: Sequence[Path],
    facts: ModelFacts,
    settings: Settings,
    *,
    least_context: int = 0,
    repack: bool = True,
    gpu: bool = False,
    progress: Callable[[float], bool] | None = None,
    prefixes: Path | None = None,
    places: Places | None = None,
) -> Loaded:
    """Load a GGUF that was checked, whose parts are `files`; on `gpu` as many layers as --gpu-layers says.

    Raises ModelError for a file that llama.cpp refuses or that does not fit in memory; EdgeLMError for a context that
    the model cannot have.
    """
    if settings.quantize != "off":
        raise EdgeLMError("--quantize is of the torch engine", "pull a quantized GGUF, or use --engine torch")
    drafting = places if settings.spec != "off" else None
    small = find_draft_model(settings, drafting) if drafting else None
    reserved = _draft_model_bytes(small, settings, least_context, repack) if small else 0
    chosen = choose(path, facts, settings, least_context=least_context, repack=repack, reserved_bytes=reserved)
    option = chosen.require()
    model = LlamaModel(path, files=files, repack=repack, gpu_layers=_gpu_layers(settings, gpu), progress=progress)
    options = LlamaOptions(
        context=option.context,
        kv=option.kv,
        max_sequences=settings.parallel,
        threads=chosen.threads,
        batch_threads=chosen.threads,
    )
    try:
        tokenizer = LlamaTokenizer.of_model(model.native, model)
        folder = None
        if prefixes:
            bounds = Bounds(int(settings.prefix_cache_disk * 2**30), settings.prefix_cache_days * 86400)
            folder = snapshot_folder(prefixes, model, files, options, bounds)
        ram = settings.prefix_cache_ram
        snapshot_bytes = chosen.snapshot_bytes if ram is None else int(ram * 2**30)
        store = SnapshotStore(snapshot_bytes, folder)
        executor = LlamaExecutor(model, options, store)
    except EdgeLMError:
        model.close()
        raise
    clock, drafter = StepClock(), None
    if drafting and executor.info.can_trim:
        try:
            clock, drafter = _drafting(executor, model, files, options, tokenizer, settings, drafting, small, repack)
        except EdgeLMError:
            executor.close()
            raise
    scheduler = Scheduler(executor.info, SlotKV(executor.info, snapshot_bytes, store), clock, drafter)
    chats = KnownChats(folder.path / CHATS if folder else None)
    return Loaded(chosen.name, Engine(executor, scheduler, clock).start(), tokenizer, chats)


def _gpu_layers(settings: Settings, gpu: bool) -> int:
    """Return how many layers llama.cpp computes on a GPU."""
    if not gpu:
        return 0
    return ALL_LAYERS if settings.gpu_layers == "auto" else int(settings.gpu_layers)


def _drafting(
    executor: LlamaExecutor,
    model: LlamaModel,
    files: Sequence[Path],
    options: LlamaOptions,
    tokenizer: Tokenizer,
    settings: Settings,
    places: Places,
    small: Path | None,
    repack: bool,
) -> tuple[StepClock, Drafter]:
    """Return what drafting needs: a clock that knows what rows cost, and the drafter."""
    try:
        identity = state_identity(model, files, options)
    except OSError as error:
        raise ModelError(f"{files[0].name} cannot be read any more: {error.strerror}", "try again") from None
    clock = measured_clock(executor, settings, places, identity)
    drafters: list[Drafter] = [ngram_drafter(tokenizer, settings, places, identity)]
    if small:
        drafters.append(load_draft_model(small, options, repack, tokenizer, clock))
    return clock, guarded(drafters, clock, settings)


def _draft_model_bytes(path: Path, settings: Settings, least_context: int, repack: bool) -> int:
    """Return what a draft model takes beside the model. Raises ModelError where it alone does not fit."""
    with open_gguf(path) as gguf:
        check_for_llama(gguf)
        facts = model_facts(gguf)
    ctx = settings.ctx and min(settings.ctx, facts.summary.context or settings.ctx)
    alone = replace(settings, kv="f16", ctx=ctx)
    return choose(path, facts, alone, least_context=least_context, repack=repack).require().total_bytes


def choose(
    path: Path,
    facts: ModelFacts,
    settings: Settings,
    *,
    least_context: int = 0,
    repack: bool = True,
    reserved_bytes: int = 0,
) -> Plan:
    """Plan what a model gets: by formulas, and by llama.cpp's own sizes where the last megabytes decide."""
    free = max(available_memory_bytes() - reserved_bytes, 0)
    machine = MachineMemory(free_bytes=free, cores=usable_cores().physical)
    types = repacked_types() if repack else frozenset()
    memory = LlamaMemory(facts, sequences=settings.parallel, copied_types=types)
    estimated = plan(facts, settings, machine, memory, least_context=least_context)
    if estimated.comfortable:
        return estimated
    with LlamaBuffers(path, facts.summary, sequences=settings.parallel, repack=repack) as buffers:
        return plan(facts, settings, machine, memory.measured_by(buffers), least_context=least_context)
