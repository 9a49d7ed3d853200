"""Loads the sides of an evaluation into llama.cpp: one model, or two side by side in one process.

Owns the checks before anything large is read. A model with two KV caches is loaded once. Where the KV mode of one side
needs flash attention, the other has it too: the difference is then that of the caches. Knows nothing of texts and
scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from edgelm.backends.llama.adapter import LlamaAdapter, find_adapters, with_adapters
from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.memory import kv_head_bytes
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.llama.offload import OffloadedMemory
from edgelm.backends.llama.placement import Wish
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.base.errors import ModelError
from edgelm.base.kv_modes import LLAMA_KV
from edgelm.base.machine.memory import available_memory_bytes
from edgelm.base.places import own_places
from edgelm.base.workers.messages import EvalSide
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.gguf_parse import Array
from edgelm.checkpoints.llama_checks import check_for_llama
from edgelm.checkpoints.summary import ModelFacts, ModelSummary, kind_and_pooling, model_facts
from edgelm.evaluation.evaluate import (
    LOGITS_BYTES,
    Evaluation,
    LoadedSide,
    choose_window,
    max_rows,
    require_kv,
    require_memory,
    vocabulary_error,
)

WORKSPACE_BYTES = 256 * 2**20  # compute buffers of one context without its logits, vocabulary, Python


class _Header(NamedTuple):
    """The facts of a file that are checked before it is loaded."""

    facts: ModelFacts
    files: tuple[Path, ...]
    vocabulary: tuple[object, ...]
    adapters: tuple[LlamaAdapter, ...]

    @property
    def summary(self) -> ModelSummary:
        return self.facts.summary


def load_llama_evaluation(
    model: EvalSide,
    reference: EvalSide | None,
    *,
    window: int | None,
    threads: int,
    repack: bool,
    wish: Wish | None = None,
    lora: Sequence[str] = (),
    progress: Callable[[float], bool] | None = None,
) -> Evaluation:
    """Load a model, and a reference beside it. Without `window` it is 512 tokens, or the context if that is shorter.

    `wish` places them on devices, each as if it were alone; None: they are with the processor. `lora` are adapters,
    which every model gets.

    Raises ModelError for a file that is damaged, not supported, does not fit in memory or has another vocabulary than
    the model, and for a KV mode that a model cannot have; EdgeLMError for a window that a model cannot have.
    """
    sides = [model, *([reference] if reference else [])]
    require_kv(sides, LLAMA_KV, "llama.cpp")
    headers = {side.model: _read_header(side.model, lora) for side in sides}
    if reference and headers[reference.model].vocabulary != headers[model.model].vocabulary:
        raise vocabulary_error(model.model, reference.model)
    window = choose_window(window, [header.summary for header in headers.values()])
    _require_memory(sides, headers, window)
    with ExitStack() as resources:
        models: dict[Path, LlamaModel] = {}
        loaded = []
        flash = any(LLAMA_KV[side.kv].flash for side in sides)
        for side in sides:
            header, native = headers[side.model], models.get(side.model)
            if native is None:
                part = _part_of(progress, len(models), len(headers))
                memory = OffloadedMemory(header.facts, wish or Wish(()), sequences=1)
                place = memory.placement(side.kv, window)
                native = LlamaModel(
                    header.files[0],
                    files=header.files,
                    repack=repack,
                    placement=place,
                    adapters=header.adapters,
                    progress=part,
                )
                models[side.model] = native
                resources.callback(native.close)
            options = LlamaOptions(
                context=window,
                kv=side.kv,
                flash=flash,
                max_sequences=1,
                max_rows=max_rows(native.num_vocab, window),
                threads=threads,
            )
            executor = LlamaExecutor(native, options)
            native.share()  # the executor closes it too
            resources.callback(executor.close)
            loaded.append(LoadedSide(header.summary.name, executor, options.flash_attention))
        tokenizer = LlamaTokenizer.of_model(models[model.model].native, models[model.model])
        return Evaluation(loaded[0], loaded[1] if reference else None, tokenizer, window, resources.pop_all())


def _read_header(path: Path, lora: Sequence[str]) -> _Header:
    with open_gguf(path) as gguf:
        check_for_llama(gguf)
        if kind_and_pooling(gguf)[0] != "text":
            raise ModelError(f"{gguf.name} writes no text, so there is nothing to evaluate", "take a model for chats")
        tokens = gguf.metadata.get("tokenizer.ggml.tokens")
        words = tuple(tokens.raw()) if isinstance(tokens, Array) else ()
        keys = ("model", "pre", "bos_token_id", "add_bos_token", "add_space_prefix")
        options = [gguf.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
        adapters = find_adapters(gguf, lora, own_places().cache) if lora else ()
        return _Header(with_adapters(model_facts(gguf), adapters), gguf.paths, (*options, words), adapters)


def _require_memory(sides: Sequence[EvalSide], headers: dict[Path, _Header], window: int) -> None:
    """Raise ModelError where the models and their contexts do not fit at the same time."""
    needed = float(sum(header.summary.nbytes for header in headers.values()))
    needed += LOGITS_BYTES  # held for the noise floor
    needed += sum(tensor.nbytes for header in headers.values() for side in header.adapters for tensor in side.tensors)
    for side in sides:
        summary = headers[side.model].summary
        layers = zip(summary.kv_heads, summary.key_lens, summary.value_lens, strict=True)
        needed += window * sum(heads * kv_head_bytes(side.kv, key, value) for heads, key, value in layers)
        needed += WORKSPACE_BYTES + 2 * LOGITS_BYTES  # the compute buffer holds the rows too
    require_memory(needed, available_memory_bytes(), headers, window)


def _part_of(progress: Callable[[float], bool] | None, done: int, total: int) -> Callable[[float], bool] | None:
    """Return the callback for one model, which reports the progress over all models."""
    return None if progress is None else lambda share: progress((done + share) / total)
