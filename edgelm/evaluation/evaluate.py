"""Runs the windows of a text through a model, and through a reference beside it; and each against itself.

Owns the loaded sides of an evaluation and the order of the work: both sides run the same step at a time, so that only
the logits of one step are in memory. Knows executors by their protocol; each backend loads its own.

The noise floor of a side is its divergence from itself where the same tokens are computed one a step, as an answer is,
and many a step, as a prompt is: in llama.cpp and in the torch engine these two are rounded differently.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from edgelm.base.errors import DeviceError, EdgeLMError, ModelError
from edgelm.base.sampling import SamplingParams
from edgelm.base.workers.messages import EvalSide
from edgelm.checkpoints.summary import ModelSummary
from edgelm.engine.core import Chunk, Executor, ExecutorInfo, Sequence, Step, Trim
from edgelm.evaluation.scores import Logits, Scores, Tally, join, score
from edgelm.evaluation.text import MIN_WINDOW, Window, steps
from edgelm.evaluation.watched import WatchedExecutor
from edgelm.text.tokenizer import Tokenizer

DEFAULT_WINDOW = 512  # tokens
LOGITS_BYTES = 64 * 2**20  # bound on the logits of a step
NOISE_TOKENS = 500  # by which a noise floor is known to about 10 %
_SLOT = 0


@dataclass(frozen=True, slots=True)
class LoadedSide:
    """The model of an evaluation, or its reference."""

    name: str
    executor: Executor
    flash: bool | None = None  # whether llama.cpp computes with flash attention; None: another engine


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The loaded sides of an evaluation. A context manager: leaving it frees everything."""

    model: LoadedSide
    reference: LoadedSide | None
    tokenizer: Tokenizer
    window: int  # tokens
    _resources: ExitStack

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()


def evaluate(
    model: Executor,
    reference: Executor | None,
    windows: Iterable[Window],
    tally: Tally,
    on_hang: Callable[[DeviceError], None] = lambda _: None,
    *,
    noise: tuple[Tally, ...] = (),
) -> Iterator[Tally]:
    """Add each window to the tally, and yield it. Raises EngineError.

    `noise` are the noise floors of the model and of the reference, to which the first windows are added; empty: they
    are not measured. If a device hangs, `on_hang` is called by another thread: it has to end the process.
    """
    with ExitStack() as watches:
        executors: list[Executor] = [
            watches.enter_context(closing(WatchedExecutor(executor, on_hang)))
            for executor in (model, reference)
            if executor
        ]
        for window in windows:
            tally.add(_score_window(executors, window))
            for executor, floor in zip(executors, noise, strict=False):
                if floor.divergence.count < NOISE_TOKENS:
                    floor.add(_noise_scores(executor, window))
            yield tally


def choose_window(requested: int | None, summaries: Iterable[ModelSummary]) -> int:
    """Return the window: the requested one, or 512 tokens if the models have them. Raises EdgeLMError."""
    limit = min([summary.context for summary in summaries if summary.context], default=DEFAULT_WINDOW)
    if requested is None:
        return min(DEFAULT_WINDOW, limit)
    if not MIN_WINDOW <= requested <= limit:
        raise EdgeLMError(f"--window is {requested:,}", f"give {MIN_WINDOW} to {limit}: the model's context length")
    return requested


def max_rows(num_vocab: int, window: int) -> int:
    """Return how many rows a step may sample: an executor for evaluation is made with this bound."""
    return max(1, min(window, LOGITS_BYTES // (4 * num_vocab)))


def require_kv(sides: Iterable[EvalSide], modes: Collection[str], engine: str) -> None:
    """Raise ModelError for a KV mode that an engine does not have."""
    for side in sides:
        if side.kv not in modes:
            message = f"{side.kv} is not among the KV caches of {engine} ({', '.join(modes)})"
            raise ModelError(message, "choose one of them")


def vocabulary_error(model: Path, reference: Path) -> ModelError:
    """Return the error for two files whose tokens differ."""
    return ModelError(
        f"{reference.name} has another vocabulary than {model.name}", "compare files that were made from the same model"
    )


def require_same_vocabulary(model: Path, one: Tokenizer, reference: Path, other: Tokenizer) -> None:
    """Raise ModelError unless each token has the same text in both. Tokens without a text are skipped: formats differ.

    A file and a folder of the same model may be compared, in one engine or in two.
    """
    if one is other:
        return
    pairs = zip(_pieces(one), _pieces(other), strict=False)
    if one.num_tokens != other.num_tokens or any(a != b for a, b in pairs if a and b):
        raise vocabulary_error(model, reference)


def _pieces(tokenizer: Tokenizer) -> Iterator[bytes]:
    return map(tokenizer.piece, range(tokenizer.num_tokens))


def require_memory(needed_bytes: float, free_bytes: int, models: Iterable[Path], window: int) -> None:
    """Raise ModelError where all models and their contexts do not fit at the same time."""
    if needed_bytes > free_bytes:
        names = " and ".join(path.name for path in models)
        raise ModelError(
            f"{names} need about {needed_bytes / 2**30:.1f} GiB with a window of {window:,}, "
            f"{free_bytes / 2**30:.1f} GiB are free",
            "give a smaller --window, or smaller models",
        )


def _score_window(executors: list[Executor], window: Window) -> Scores:
    seq = Sequence(_SLOT, window.tokens, len(window.tokens), SamplingParams())
    step_tokens = min(executor.info.max_tokens for executor in executors)
    step_rows = min(executor.info.max_rows for executor in executors)
    parts = []
    for start, end, rows in steps(window, step_tokens, step_rows):
        targets = np.array(window.tokens[end - rows + 1 : end + 1], np.int64)
        runs = [(executor, _step(executor.info, seq, start, end, rows)) for executor in executors]
        for executor, step in runs:
            executor.forward(step)
        if rows:
            logits, *reference = (executor.logits(step) for executor, step in runs)
            parts.append(score(logits, targets, reference[0] if reference else None))
    return join(parts)


def _noise_scores(executor: Executor, window: Window) -> Scores:
    """Score the first scored tokens of a window one a step, against the same tokens in one step."""
    seq, info = Sequence(_SLOT, window.tokens, len(window.tokens), SamplingParams()), executor.info
    for start, end, rows in steps(window, info.max_tokens, info.max_rows):
        step = _step(info, seq, start, end, rows)
        executor.forward(step)
        if rows:
            break
    together = np.array(executor.logits(step))  # the next step overwrites them
    first = end - rows
    for start in range(0, first, info.max_tokens):
        executor.forward(_step(info, seq, start, min(first, start + info.max_tokens), 0))
    parts = []
    for row, at in enumerate(range(first, end)):
        step = _step(info, seq, at, at + 1, 1)
        executor.forward(step)
        target = np.array(window.tokens[at + 1 : at + 2], np.int64)
        parts.append(score(executor.logits(step), target, together[row : row + 1]))
    return join(parts)


def window_logits(executor: Executor, window: Window) -> Iterator[tuple[Logits, NDArray[np.int64]]]:
    """Run a window through one model; yield the logits of some tokens and these tokens, which they predict.

    The logits are valid until the next step: [rows, vocab], [rows]. Raises EngineError.
    """
    seq = Sequence(_SLOT, window.tokens, len(window.tokens), SamplingParams())
    for start, end, rows in steps(window, executor.info.max_tokens, executor.info.max_rows):
        step = _step(executor.info, seq, start, end, rows)
        executor.forward(step)
        if rows:
            yield executor.logits(step), np.array(window.tokens[end - rows + 1 : end + 1], np.int64)


def _step(info: ExecutorInfo, seq: Sequence, start: int, end: int, rows: int) -> Step:
    """Return a step over `tokens[start:end]` of an executor's only sequence; the first one empties the cache."""
    tokens = seq.tokens[start:end]
    if info.block_len:
        return Step((Chunk(seq, start, tokens, rows, tuple(range(-(-end // info.block_len)))),))
    return Step((Chunk(seq, start, tokens, rows, _SLOT),), () if start else (Trim(_SLOT, 0),))


def run_tokens(executor: Executor, tokens: Collection[int]) -> NDArray[np.float32]:
    """Return the logits of all tokens of one text [tokens, vocabulary]."""
    seq = Sequence(0, list(tokens), len(tokens), SamplingParams())
    info = executor.info
    blocks = tuple(range(-(-len(tokens) // info.block_len))) if info.block_len else 0
    step = Step((Chunk(seq, 0, seq.tokens, len(tokens), blocks),), () if info.block_len else (Trim(0, 0),))
    executor.forward(step)
    return np.array(executor.logits(step), np.float32)
