"""From files and KV modes to the torch executors of an evaluation, as load.py does it for llama.cpp.

Owns that both sides are loaded on one device, one model with two KV caches once, and the checks before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from edgelm.build.opened import OpenedModel, open_model
from edgelm.build.torch import load_decoder, tokenizer_of
from edgelm.config import Settings
from edgelm.errors import ModelError
from edgelm.evaluation.evaluate import LOGITS_BYTES, most_rows
from edgelm.evaluation.load import Contender, Contenders, Source, choose_window
from edgelm.executors.memory import available_memory_bytes
from edgelm.executors.torch import TorchExecutor, TorchOptions
from edgelm.executors.torch_memory import BLOCK_LEN, KV_BITS, TorchMemory
from edgelm.models.decoder import Decoder
from edgelm.text.tokenizer import Tokenizer

MAX_TOKENS = 512  # of a step


def load_torch_contenders(
    model: Source,
    reference: Source | None,
    settings: Settings,
    *,
    device: str,
    window: int | None,
    progress: Callable[[float], bool] | None = None,
) -> Contenders:
    """Load a model, and a reference beside it, on a device. Raises what `load_contenders` does."""
    sources = [model, *([reference] if reference else [])]
    for source in sources:
        if source.kv not in KV_BITS:
            raise ModelError(
                f"{source.kv} is not among the KV caches of the torch engine", f"one of {', '.join(KV_BITS)}"
            )
    with ExitStack() as opened:
        models = {path: opened.enter_context(open_model(path)) for path in dict.fromkeys(each.path for each in sources)}
        window = choose_window(window, [each.facts.summary for each in models.values()])
        tokenizers = {path: tokenizer_of(each) for path, each in models.items()}
        _require_one_vocabulary([tokenizers[source.path] for source in sources], sources)
        _require_memory(sources, models, window, settings, device)
        decoders: dict[Path, Decoder] = {}
        contenders = []
        for source in sources:
            if source.path not in decoders:
                decoders[source.path] = load_decoder(models[source.path], settings, device, window, progress)
            decoder = decoders[source.path]
            options = TorchOptions(
                context=window,
                capacity=-(-window // BLOCK_LEN) * BLOCK_LEN,
                kv=source.kv,
                max_sequences=1,
                max_tokens=MAX_TOKENS,
                max_rows=most_rows(decoder.vocab_size, window),
                graphs=False,
            )
            executor = TorchExecutor(decoder, options)
            opened.callback(executor.close)
            contenders.append(Contender(models[source.path].name, executor))
        second = contenders[1] if reference else None
        return Contenders(contenders[0], second, tokenizers[model.path], window, opened.pop_all())


def _require_one_vocabulary(tokenizers: list[Tokenizer], sources: list[Source]) -> None:
    """Raise ModelError where a token is not the same text on both sides. About special ones, formats may differ."""
    first, last = tokenizers[0], tokenizers[-1]
    same = first is last or (
        first.num_tokens == last.num_tokens
        and all(one == other for one, other in zip(_pieces(first), _pieces(last), strict=True) if one and other)
    )
    if not same:
        raise ModelError(
            f"{sources[-1].path.name} has another vocabulary than {sources[0].path.name}",
            "compare files that were made from the same model",
        )


def _pieces(tokenizer: Tokenizer) -> Iterator[bytes]:
    return map(tokenizer.piece, range(tokenizer.num_tokens))


def _require_memory(
    sources: list[Source], models: dict[Path, OpenedModel], window: int, settings: Settings, device: str
) -> None:
    """Raise ModelError where the models and their contexts do not fit on the device at the same time."""
    memories = {
        path: TorchMemory(each.facts, sequences=1, device=device, max_tokens=MAX_TOKENS, quantize=settings.quantize)
        for path, each in models.items()
    }
    needed = sum(each.weights.resident for each in memories.values())
    for source in sources:
        memory = memories[source.path]
        needed += memory.kv_bytes(source.kv, window) + memory.workspace_bytes(source.kv, window) + 2 * LOGITS_BYTES
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_memory_bytes()
    if needed > free:
        both = " and ".join(path.name for path in models)
        raise ModelError(
            f"{both} need about {needed / 2**30:.1f} GiB with a window of {window:,}, {free / 2**30:.1f} GiB are free",
            "give a smaller --window, or smaller models",
        )
