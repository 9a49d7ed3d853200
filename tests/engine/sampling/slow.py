"""The distribution that `edgelm.engine.sampling.reference` specifies, computed the simple way: sort all, in float64.

Shares no code with the samplers that are tested against it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgelm.engine.core import SamplingParams

FLOAT32_MAX = float(np.finfo(np.float32).max)


class Exact(NamedTuple):
    """The possible tokens in ascending order, the upper end of their shares of [0, 1), and the closest call."""

    ids: list[int]
    ends: NDArray[np.float64]
    margin: float  # distance between a bound of min_p or top_p and the nearest sum or ratio


def rounded(value: float) -> float:
    return float(np.float32(max(-FLOAT32_MAX, min(FLOAT32_MAX, value))))


def processed(
    logits: NDArray[np.float32],
    params: SamplingParams,
    prompt: Sequence[int],
    answer: Sequence[int],
    allowed: Sequence[bool] | None,
) -> list[float]:
    row = [float(logit) for logit in logits]
    for token, bias in dict(params.logit_bias).items():
        if row[token] != -math.inf:
            row[token] = -math.inf if bias == -math.inf else rounded(row[token] + bias)
    counts = Counter(answer)
    for token in {*prompt, *answer} if params.penalized else ():
        logit = row[token]
        if logit != -math.inf:
            r = params.repetition_penalty
            logit = max(-FLOAT32_MAX, min(FLOAT32_MAX, logit / r if logit > 0 else logit * r))
            if counts[token]:
                logit -= params.frequency_penalty * counts[token] + params.presence_penalty
            row[token] = rounded(logit)
    if allowed is not None:
        row = [logit if ok else -math.inf for logit, ok in zip(row, allowed, strict=True)]
    return row


def exact(
    logits: NDArray[np.float32],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    answer: Sequence[int] = (),
    allowed: Sequence[bool] | None = None,
) -> Exact | None:
    """Return the specified distribution; None: no token can be sampled."""
    if any(math.isnan(x) or x == math.inf for x in logits) or all(x == -math.inf for x in logits):
        return None
    row = processed(logits, params, prompt, answer, allowed)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if row[order[0]] == -math.inf:
        return None
    if params.temperature == 0:
        return Exact([order[0]], np.ones(1), 1.0)
    temperature = min(max(params.temperature, 1e-6), 1e30)
    z = [(row[i] - row[order[0]]) / temperature for i in order]  # likeliest first
    margin = 1.0
    if params.min_p:
        bound = math.log(params.min_p) - 1e-6
        margin = min(abs(x - bound) for x in z)
        z = [x for x in z if x >= bound]
    if params.top_k:
        z = z[: params.top_k]
    weights = np.exp(np.array(z))
    if params.top_p < 1:
        sums = np.cumsum(weights) / weights.sum()
        bound = params.top_p - 1e-6
        margin = min(margin, float(np.abs(sums - bound).min()))
        count = next(i for i, total in enumerate(sums, 1) if total >= bound)
        weights = weights[:count]
    left = sorted(zip(order, weights.tolist(), strict=False))
    ends = np.cumsum([weight for _, weight in left])
    return Exact([i for i, _ in left], ends / ends[-1], margin)


def packed(allowed: Sequence[bool]) -> NDArray[np.int32]:
    """Return the mask, with all bits beyond the vocabulary set: they have no meaning."""
    words = [0] * (-(-len(allowed) // 32))
    for i in range(len(words) * 32):
        words[i // 32] |= (i >= len(allowed) or allowed[i]) << (i % 32)
    return np.array(words, dtype=np.uint32).view(np.int32)
