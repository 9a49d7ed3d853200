"""From files and KV modes to the torch executors of an evaluation, as load.py does it for llama.cpp.

Owns that both sides are loaded on one device, and that one model with two KV caches is loaded once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from edgelm.build.opened import OpenedModel, open_model
from edgelm.build.torch import load_decoder, tokenizer_of
from edgelm.config import Settings
from edgelm.errors import ModelError
from edgelm.evaluation.evaluate import most_rows
from edgelm.evaluation.load import Contender, Contenders, Source, choose_window
from edgelm.executors.torch import TorchExecutor, TorchOptions
from edgelm.executors.torch_memory import BLOCK_LEN, KV_BITS
from edgelm.models.decoder import Decoder

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
        _require_one_vocabulary(models, {path: each.num_tokens for path, each in tokenizers.items()})
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


def _require_one_vocabulary(models: dict[Path, OpenedModel], sizes: dict[Path, int]) -> None:
    if len(set(sizes.values())) > 1:
        names = " and ".join(each.name for each in models.values())
        raise ModelError(f"{names} have different vocabularies", "compare files that were made from the same model")
