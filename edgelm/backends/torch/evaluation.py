"""Loads the sides of an evaluation into the torch engine, as backends/llama/evaluation.py does for llama.cpp.

Owns the checks before anything large is read. Both sides are loaded on one device, and a model with two KV caches once.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from edgelm.backends.model import OpenedModel, open_model
from edgelm.backends.reports import Reports
from edgelm.backends.torch.build import check_ops, load_decoder, tokenizer_of
from edgelm.backends.torch.executor import TorchExecutor, TorchOptions
from edgelm.backends.torch.failures import gpu_errors
from edgelm.backends.torch.memory import BLOCK_LEN, SCRATCH_BYTES, TorchMemory
from edgelm.base.config import Settings
from edgelm.base.kv_modes import TORCH_KV
from edgelm.base.machine.cuda import gpu_memory
from edgelm.base.machine.memory import available_memory_bytes
from edgelm.base.workers.messages import EvalSide
from edgelm.evaluation.evaluate import (
    LOGITS_BYTES,
    Evaluation,
    LoadedSide,
    choose_window,
    max_rows,
    require_kv,
    require_memory,
    require_same_vocabulary,
)
from edgelm.models.decoder import Decoder

MAX_TOKENS = 512  # of a step


@gpu_errors()
def load_torch_evaluation(
    model: EvalSide,
    reference: EvalSide | None,
    settings: Settings,
    *,
    device: str,
    window: int | None,
    reports: Reports,
) -> Evaluation:
    """Load a model, and a reference beside it, on a device. Raises the errors of `load_llama_evaluation`."""
    sides = [model, *([reference] if reference else [])]
    require_kv(sides, TORCH_KV, "the torch engine")
    with ExitStack() as resources:
        models = {
            path: resources.enter_context(open_model(path)) for path in dict.fromkeys(side.model for side in sides)
        }
        window = choose_window(window, [opened.facts.summary for opened in models.values()])
        tokenizers = {path: tokenizer_of(opened) for path, opened in models.items()}
        if reference:
            require_same_vocabulary(model.model, tokenizers[model.model], reference.model, tokenizers[reference.model])
        _require_memory(sides, models, window, settings, device)
        for side in sides if device == "cuda" else ():
            check_ops(models[side.model], settings, side.kv, reports.say)
        decoders: dict[Path, Decoder] = {}
        loaded = []
        for side in sides:
            if side.model not in decoders:
                decoders[side.model] = load_decoder(models[side.model], settings, device, window, reports)
            decoder = decoders[side.model]
            options = TorchOptions(
                context=window,
                capacity=-(-window // BLOCK_LEN) * BLOCK_LEN,
                kv=side.kv,
                max_sequences=1,
                max_tokens=MAX_TOKENS,
                max_rows=max_rows(decoder.vocab_size, window),
                graphs=False,
            )
            executor = TorchExecutor(decoder, options, reports=reports)
            resources.callback(executor.close)
            loaded.append(LoadedSide(models[side.model].name, executor))
        second = loaded[1] if reference else None
        return Evaluation(loaded[0], second, tokenizers[model.model], window, resources.pop_all())


def _require_memory(
    sides: list[EvalSide], models: dict[Path, OpenedModel], window: int, settings: Settings, device: str
) -> None:
    """Raise ModelError where the models and their contexts do not fit on the device at the same time."""
    memories = {
        path: TorchMemory(opened.facts, sequences=1, device=device, max_tokens=MAX_TOKENS, quantize=settings.quantize)
        for path, opened in models.items()
    }
    needed = sum(memory.weights.resident for memory in memories.values()) + SCRATCH_BYTES  # of the output matrix
    if device == "cpu":
        needed += LOGITS_BYTES  # held for the noise floor
    for side in sides:
        memory = memories[side.model]
        needed += memory.kv_bytes(side.kv, window) + memory.workspace_bytes(side.kv, window) + 2 * LOGITS_BYTES
    free = gpu_memory()[0] if device == "cuda" else available_memory_bytes()
    require_memory(needed, free, models, window)
