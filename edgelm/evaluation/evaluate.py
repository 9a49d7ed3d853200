"""Runs windows through a model, and a reference beside it, and keeps the tally.

Owns the order of the work: both see the same step at a time, so that the logits of one step are all that is held.
Knows executors by their protocol alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from edgelm.core import Chunk, Executor, ExecutorInfo, SamplingParams, Sequence, Step, Trim
from edgelm.evaluation.scores import Scores, join, score
from edgelm.evaluation.tally import Tally
from edgelm.evaluation.windows import Window, steps

LOGITS_BYTES = 64 * 2**20  # of the rows that a step may return
_SLOT = 0


def most_rows(num_vocab: int, window: int) -> int:
    """Return how many rows a step of an executor made for evaluation has at most."""
    return max(1, min(window, LOGITS_BYTES // (4 * num_vocab)))


def evaluate(model: Executor, reference: Executor | None, windows: Iterable[Window], tally: Tally) -> Iterator[Tally]:
    """Add each window to the tally, and yield it. Raises EngineError."""
    for window in windows:
        tally.add(_score_window(model, reference, window))
        yield tally


def _score_window(model: Executor, reference: Executor | None, window: Window) -> Scores:
    seq = Sequence(_SLOT, window.tokens, len(window.tokens), SamplingParams())
    both = [model, *([reference] if reference else [])]
    max_tokens = min(each.info.max_tokens for each in both)
    max_rows = min(each.info.max_rows for each in both)
    scored = []
    for start, end, rows in steps(window, max_tokens, max_rows):
        targets = np.array(window.tokens[end - rows + 1 : end + 1], np.int64)
        ran = [(each, _step(each.info, seq, start, end, rows)) for each in both]
        for each, step in ran:
            each.forward(step)
        if rows:
            logits = [each.logits(step) for each, step in ran]
            scored.append(score(logits[0], targets, logits[1] if reference else None))
    return join(scored)


def _step(info: ExecutorInfo, seq: Sequence, start: int, end: int, rows: int) -> Step:
    """Return the step of the only sequence of an executor, which begins in an empty cache."""
    tokens = seq.tokens[start:end]
    if info.block_len:
        return Step((Chunk(seq, start, tokens, rows, tuple(range(-(-end // info.block_len)))),))
    return Step((Chunk(seq, start, tokens, rows, _SLOT),), () if start else (Trim(_SLOT, 0),))
