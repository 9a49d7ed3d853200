"""From logits to how likely a text's tokens were, and how far two distributions are from each other.

Owns the formulas. Everything is computed in float64 from float32 logits, in blocks of rows that bound the memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgelm.errors import EngineError

Floats = NDArray[np.float64]
Logits = NDArray[np.float32]

BLOCK_NUMBERS = 2**20  # of logits that are in float64 at a time


class Scores(NamedTuple):
    """What is known of each scored token: [tokens] each. The last three compare with a reference, or are empty."""

    surprise: Floats  # -ln p(token), in nats
    reference_surprise: Floats
    divergence: Floats  # KL(reference || model), in nats
    same_top: NDArray[np.bool_]  # both find the same token the most likely


def score(logits: Logits, targets: NDArray[np.int64], reference: Logits | None = None) -> Scores:
    """Score targets by the logits that predict them: [rows, vocabulary], [rows], [rows, vocabulary].

    Raises EngineError for logits that are not numbers.
    """
    height = max(1, BLOCK_NUMBERS // logits.shape[1])
    blocks = [slice(start, start + height) for start in range(0, len(targets), height)]
    scored = [_score(logits[rows], targets[rows], None if reference is None else reference[rows]) for rows in blocks]
    return join(scored)


def join(parts: list[Scores]) -> Scores:
    """Return the scores of consecutive tokens as one."""
    return Scores(*map(np.concatenate, zip(*parts, strict=True)))


def log_softmax(logits: Logits) -> Floats:
    """Return ln p of each token, with the largest logit taken off first so that no exponential overflows."""
    shifted = logits.astype(np.float64)
    if not np.isfinite(shifted).all():
        raise EngineError("the model computed values that are not numbers", "its file may be damaged")
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _score(logits: Logits, targets: NDArray[np.int64], reference: Logits | None) -> Scores:
    rows = np.arange(len(targets))
    log_q = log_softmax(logits)  # [rows, vocabulary]
    surprise = -log_q[rows, targets]
    if reference is None:
        return Scores(surprise, np.empty(0), np.empty(0), np.empty(0, np.bool_))
    log_p = log_softmax(reference)
    same_top = logits.argmax(axis=1) == reference.argmax(axis=1)
    reference_surprise = -log_p[rows, targets]
    # KL(P || Q) = sum p (ln p - ln q), Kullback and Leibler 1951. It is not negative, its rounding may be.
    log_q -= log_p
    divergence = np.maximum(-np.einsum("rv,rv->r", np.exp(log_p), log_q), 0)
    return Scores(surprise, reference_surprise, divergence, same_top)
