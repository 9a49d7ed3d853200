"""From files and KV modes to the executors of an evaluation: one, or two side by side in one process.

Owns the choice of the window, and the checks before anything large is read. One model with two KV caches is loaded
once. Knows nothing of texts and scores.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from edgelm.core import Executor
from edgelm.errors import EdgeLMError, ModelError
from edgelm.evaluation.evaluate import LOGITS_BYTES, most_rows
from edgelm.evaluation.windows import LEAST_WINDOW
from edgelm.executors.llama import LlamaExecutor, LlamaOptions
from edgelm.executors.llama_memory import KV_MODES, kv_head_bytes
from edgelm.executors.llama_model import LlamaModel
from edgelm.executors.memory import available_memory_bytes
from edgelm.text.tokenizer import LlamaTokenizer, Tokenizer
from edgelm.weights.checks import check_for_llama
from edgelm.weights.gguf import open_gguf
from edgelm.weights.gguf_parse import Array
from edgelm.weights.summary import ModelSummary, model_summary

DEFAULT_WINDOW = 512
WORKSPACE_BYTES = 256 * 2**20  # compute buffers of one context beside its logits, vocabulary, Python


class Source(NamedTuple):
    """A model file, and how its keys and values are stored."""

    path: Path
    kv: str


@dataclass(frozen=True, slots=True)
class Contender:
    """A model that is evaluated, or the reference."""

    name: str
    executor: Executor


@dataclass(frozen=True, slots=True)
class Contenders:
    """What an evaluation runs. A context manager: leaving it frees everything."""

    model: Contender
    reference: Contender | None
    tokenizer: Tokenizer
    window: int
    _open: ExitStack

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


class _Checked(NamedTuple):
    """What is known of a file before it is loaded."""

    summary: ModelSummary
    files: tuple[Path, ...]
    vocabulary: tuple[object, ...]


def load_contenders(
    model: Source,
    reference: Source | None,
    *,
    window: int | None,
    threads: int,
    repack: bool,
    progress: Callable[[float], bool] | None = None,
) -> Contenders:
    """Load a model, and a reference beside it; without `window` it is 512 tokens or what the models have.

    Raises ModelError for a file that is damaged, not supported, does not fit in memory or has another vocabulary than
    the model, and for a KV mode that a model cannot have; EdgeLMError for a window that a model cannot have.
    """
    sources = [model, *([reference] if reference else [])]
    for source in sources:
        if source.kv not in KV_MODES:
            modes = ", ".join(KV_MODES)
            raise ModelError(f"{source.kv} is not among the KV caches of llama.cpp ({modes})", "choose one of them")
    checked = {source.path: _check(source.path) for source in sources}
    if reference and checked[reference.path].vocabulary != checked[model.path].vocabulary:
        raise ModelError(
            f"{reference.path.name} has another vocabulary than {model.path.name}",
            "compare files that were made from the same model",
        )
    window = choose_window(window, [each.summary for each in checked.values()])
    _require_memory(sources, checked, window)
    with ExitStack() as opened:
        models: dict[Path, LlamaModel] = {}
        executors = []
        for source in sources:
            native = models.get(source.path)
            if native is None:
                share = _share(progress, len(models), len(checked))
                files = checked[source.path].files
                native = models[source.path] = LlamaModel(files[0], files=files, repack=repack, progress=share)
                opened.callback(native.close)
            rows = most_rows(native.num_vocab, window)
            options = LlamaOptions(
                context=window, kv=source.kv, max_sequences=1, max_rows=rows, threads=threads, batch_threads=threads
            )
            executor = LlamaExecutor(native, options)
            native.share()  # it is the executor's as well now
            opened.callback(executor.close)
            executors.append(Contender(checked[source.path].summary.name, executor))
        tokenizer = LlamaTokenizer.of_model(models[model.path].native, models[model.path])
        second = executors[1] if reference else None
        return Contenders(executors[0], second, tokenizer, window, opened.pop_all())


def _check(path: Path) -> _Checked:
    with open_gguf(path) as gguf:
        check_for_llama(gguf)
        tokens = gguf.metadata.get("tokenizer.ggml.tokens")
        words = tuple(tokens.raw()) if isinstance(tokens, Array) else ()
        keys = ("model", "pre", "bos_token_id", "add_bos_token", "add_space_prefix")
        kind = [gguf.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
        return _Checked(model_summary(gguf), gguf.paths, (*kind, words))


def choose_window(asked: int | None, summaries: list[ModelSummary]) -> int:
    """Return the window: what was asked for, if the models have it. Raises EdgeLMError."""
    most = min([summary.context for summary in summaries if summary.context], default=DEFAULT_WINDOW)
    if asked is None:
        return min(DEFAULT_WINDOW, most)
    if not LEAST_WINDOW <= asked <= most:
        raise EdgeLMError(f"--window is {asked:,}", f"give {LEAST_WINDOW} to {most}, what the model was made for")
    return asked


def _require_memory(sources: list[Source], checked: dict[Path, _Checked], window: int) -> None:
    """Raise ModelError where the models and their contexts do not fit at the same time."""
    needed = float(sum(each.summary.nbytes for each in checked.values()))
    for source in sources:
        summary = checked[source.path].summary
        layers = zip(summary.kv_heads, summary.key_lens, summary.value_lens, strict=True)
        needed += window * sum(heads * kv_head_bytes(source.kv, key, value) for heads, key, value in layers)
        needed += WORKSPACE_BYTES + 2 * LOGITS_BYTES  # the rows are in the compute buffer as well
    free = available_memory_bytes()
    if needed > free:
        both = " and ".join(path.name for path in checked)
        raise ModelError(
            f"{both} need about {needed / 2**30:.1f} GiB with a window of {window:,}, {free / 2**30:.1f} GiB are free",
            "give a smaller --window, or smaller models",
        )


def _share(progress: Callable[[float], bool] | None, done: int, total: int) -> Callable[[float], bool] | None:
    """Return the progress of one model as a part of all."""
    return None if progress is None else lambda share: progress((done + share) / total)
