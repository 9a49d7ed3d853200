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
from edgelm.executors.llama import LlamaExecutor, LlamaOptions, kv_head_bytes
from edgelm.executors.llama_model import LlamaModel
from edgelm.executors.memory import available_memory_bytes
from edgelm.text.tokenizer import LlamaTokenizer, Tokenizer
from edgelm.weights.checks import check_for_llama
from edgelm.weights.gguf import open_gguf
from edgelm.weights.summary import ModelSummary, model_summary

DEFAULT_CONTEXT = 8192  # at most, where --ctx does not say
LEAST_CONTEXT = 512  # that is worth starting with, where it does not
WORKSPACE_BYTES = 512 * 2**20  # compute and output buffers, vocabulary, Python
SNAPSHOT_SHARE = 0.1  # of the memory that is free before loading: idle prefixes


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine that runs, and the text side of its model. Close the engine before dropping it."""

    name: str
    engine: Engine
    tokenizer: Tokenizer


def build(
    path: Path,
    settings: Settings,
    *,
    least_context: int = 0,
    repack: bool = True,
    progress: Callable[[float], bool] | None = None,
) -> Loaded:
    """Load a GGUF and start an engine over it. Without --ctx there are `least_context` tokens if the model has them.

    Raises ModelError for a file that is damaged, not supported or does not fit in memory; EdgeLMError for a context
    that the model cannot have.
    """
    with open_gguf(path) as gguf:
        check_for_llama(gguf)
        summary = model_summary(gguf)
        files = gguf.paths
    kv = "f16" if settings.kv == "auto" else settings.kv
    free = available_memory_bytes()
    context = _choose_context(summary, settings, kv, least_context, free)
    needed = _bytes_needed(summary, kv, context)
    if needed > free:
        raise ModelError(
            f"{path.name} needs about {_gib(needed)} GiB with {context:,} tokens of context, {_gib(free)} GiB are free",
            "lower --ctx, choose --kv k8v4, or take a smaller model",
        )
    cores = usable_cores()
    threads = settings.threads or cores.physical
    model = LlamaModel(path, files=files, repack=repack, progress=progress)
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


def _choose_context(summary: ModelSummary, settings: Settings, kv: str, least: int, free: int) -> int:
    """Return what --ctx says, or else as much as the model has, the default allows and memory holds."""
    if settings.ctx is not None:
        if settings.ctx > summary.context:
            raise EdgeLMError(
                f"--ctx {settings.ctx:,} is more than the {summary.context:,} tokens that this model was made for",
                f"give at most {summary.context}",
            )
        return settings.ctx
    context = min(summary.context, max(DEFAULT_CONTEXT, least))
    while context // 2 >= LEAST_CONTEXT and _bytes_needed(summary, kv, context) > free:
        context //= 2
    return context


def _bytes_needed(summary: ModelSummary, kv: str, context: int) -> int:
    layers = zip(summary.kv_heads, summary.key_lens, summary.value_lens, strict=True)
    position = sum(heads * kv_head_bytes(kv, key_len, value_len) for heads, key_len, value_len in layers)
    return summary.nbytes + int(position * context) + WORKSPACE_BYTES


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"
