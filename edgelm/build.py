"""The composition root: settings and a model file become an engine.

Owns the choices that need all sides: how much context, which threads, whether it fits. Everything is an argument to
what is built here, so that a test builds the same with other parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgelm.config import Settings
from edgelm.engine.clock import StepClock
from edgelm.engine.engine import Engine
from edgelm.engine.scheduler import Scheduler
from edgelm.engine.slots import SlotKV
from edgelm.errors import EdgeLMError, ModelError
from edgelm.executors.cores import usable_cores
from edgelm.executors.llama import LlamaExecutor, LlamaOptions
from edgelm.executors.llama_model import LlamaModel
from edgelm.executors.memory import available_memory_bytes
from edgelm.text.tokenizer import LlamaTokenizer, Tokenizer
from edgelm.weights.checks import check_for_llama
from edgelm.weights.gguf import open_gguf
from edgelm.weights.summary import ModelSummary, model_summary

DEFAULT_CONTEXT = 8192  # at most, where --ctx does not say
WORKSPACE_BYTES = 512 * 2**20  # compute and output buffers, vocabulary, Python
SNAPSHOT_SHARE = 0.1  # of the memory that is free before loading: idle prefixes


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine that runs, and the text side of its model. Close the engine before dropping it."""

    name: str
    engine: Engine
    tokenizer: Tokenizer


def build(
    path: Path, settings: Settings, *, repack: bool = True, progress: Callable[[float], bool] | None = None
) -> Loaded:
    """Load a GGUF and start an engine over it.

    Raises ModelError for a file that is damaged, not supported or does not fit in memory; EdgeLMError for a context
    that the model cannot have.
    """
    with open_gguf(path) as gguf:
        check_for_llama(gguf)
        summary = model_summary(gguf)
    context = _choose_context(summary, settings)
    free = available_memory_bytes()
    kv = "f16" if settings.kv == "auto" else settings.kv
    needed = summary.nbytes + summary.kv_bytes_per_token * context + WORKSPACE_BYTES
    if needed > free:
        raise ModelError(
            f"{path.name} needs about {_gib(needed)} GiB with {context:,} tokens of context, {_gib(free)} GiB are free",
            "lower --ctx, choose --kv int8, or take a smaller model",
        )
    cores = usable_cores()
    threads = settings.threads or cores.physical
    model = LlamaModel(path, repack=repack, progress=progress)
    options = LlamaOptions(
        context=context, kv=kv, max_sequences=settings.parallel, threads=threads, batch_threads=threads
    )
    try:
        tokenizer = LlamaTokenizer.of_model(model.native, model)
        executor = LlamaExecutor(model, options)
    except EdgeLMError:
        model.close()
        raise
    clock = StepClock()
    scheduler = Scheduler(executor.info, SlotKV(executor.info, int(SNAPSHOT_SHARE * free)), clock)
    return Loaded(summary.name or path.stem, Engine(executor, scheduler, clock).start(), tokenizer)


def _choose_context(summary: ModelSummary, settings: Settings) -> int:
    if settings.ctx is None:
        return min(summary.context, DEFAULT_CONTEXT)
    if settings.ctx > summary.context:
        raise EdgeLMError(
            f"--ctx {settings.ctx:,} is more than the {summary.context:,} tokens that this model was made for",
            f"give at most {summary.context}",
        )
    return settings.ctx


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"
