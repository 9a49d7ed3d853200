"""Choose a token from a row of logits, in numpy: the CPU's sampler, and the specification of the GPU's sampler.

Owns the meaning of every sampling parameter. Knows nothing of models, text, grammars (it gets their masks) or the
source of a row.

A row is sampled in this order. "Likely" always refers to the logits as they are at that step; of equal logits, the
lower token id is the likelier.

 1. If any logit is NaN or +inf, or if none is finite, the answer is `Sampled(NOT_A_TOKEN)`. A logit of -inf is an
    impossible token, and remains one through all steps.
 2. Log-probabilities, if requested, are those of the model: log-softmax of the logits as they came, before all steps
    below. Included are the N most likely tokens, likeliest first, without impossible ones.
 3. Logit bias is added; -inf forbids the token, +inf makes it win. Of two entries for one token the last counts.
 4. Repetition penalty r for each token of prompt and answer: l / r if l > 0, else l * r.
 5. For each token of the answer, which has it n times: l - n * frequency penalty - presence penalty.
 6. Tokens that the grammar mask does not allow become -inf. If no finite logit is left: `Sampled(NOT_A_TOKEN)`.
 7. Temperature 0: the most likely token. Done.
 8. z = (l - max l) / temperature, weight w = exp(z). Temperatures are clamped to [1e-6, 1e30].
 9. min_p keeps w >= min_p * max w.
10. top_k keeps the k most likely.
11. top_p keeps the fewest most likely tokens whose weights sum to at least top_p of the sum of all remaining weights:
    the token that crosses the bound is in. At least one token is kept.
12. With u = uniform(seed, position, choice), the token is the first, in ascending order of token id, at which the
    running sum of the remaining weights is greater than u times their sum.

Steps 8 to 11 are in vLLM's order. (llama.cpp's default differs: top_k, top_p, min_p, and temperature last.) Steps 9
and 10 give the same result in either order, 11 must come last. `position` is the index, in its sequence, of the token
to be sampled.

Precision: 3 to 5 are done in float64, and rounded to float32 once after 3 and once after 5; a result too large for
float32 becomes the largest finite number of its sign. z and w are float32, sums are float64. The bounds of 9 and 11
hold within SLACK, so that min_p = 0.5 keeps a token of exactly half the greatest weight. Another implementation may
differ where u is within 1e-5 of a boundary between two tokens, or a sum or ratio is within 1e-5 of its bound.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from edgelm.base.sampling import SamplingParams
from edgelm.engine.core import NOT_A_TOKEN, Sampled
from edgelm.engine.sampling.history import History

SLACK = 1e-6  # relative: a sum or ratio of weights that is so little below its bound still reaches it

_LARGEST = float(np.finfo(np.float32).max)
COLDEST, HOTTEST = 1e-6, 1e30  # beyond these temperatures, float32 overflows into NaN
_BLOCK = 512  # weights for one partial sum: a running sum of all weights costs five times as much
_ROWS = 64  # of a grid of logits; its column maxima are a lower bound of the k-th logit
_FEW = 2048  # values; so few are sorted without a cut
_FEW_WORDS = 512  # of a mask that are not empty
_NUCLEUS_CUTS = 3.5, 1.5, -math.inf  # above the cut that always suffices; the first suffices for most models

# Philox4x32-10
_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF

# Upper limits of eight logits for each byte of a mask: +inf where the bit is set, else -inf.  # [256, 8]
_LIMITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1,
    np.float32(math.inf),
    np.float32(-math.inf),
)

Words = tuple[int, int, int, int]
Floats = NDArray[np.float32]
Indices = NDArray[np.intp]


class Workspace:
    """Buffers for rows of one vocabulary size, so that sampling a row allocates little. Not thread-safe."""

    def __init__(self, num_vocab: int) -> None:
        self.num_vocab = num_vocab
        self.row = np.empty(num_vocab, dtype=np.float32)  # the logits after steps 3 to 6
        self.scratch = np.empty(-(-num_vocab // 32) * 32, dtype=np.float32)  # limits of a mask, then weights
        self.flags = np.empty(num_vocab, dtype=np.bool_)


def sample(
    logits: Floats,  # [vocab], read only
    params: SamplingParams,
    position: int,
    history: History | None = None,
    mask: NDArray[np.int32] | None = None,  # [ceil(vocab / 32)], bit i of word j allows token 32 * j + i
    work: Workspace | None = None,
) -> Sampled:
    """Sample one row as the module's docstring specifies; `history` is required if `params.penalized`."""
    assert logits.ndim == 1, logits.shape
    assert logits.dtype == np.float32, logits.dtype
    best = int(logits.argmax())  # the first NaN, if there is one
    if not math.isfinite(logits[best]):
        return Sampled(NOT_A_TOKEN)
    if work is None:
        work = Workspace(len(logits))
    assert work.num_vocab == len(logits), (work.num_vocab, len(logits))
    row, ids = logits, _few_allowed(mask, len(logits))
    if params.logit_bias or params.penalized or (mask is not None and ids is None):
        row = _processed(logits, params, history, mask if ids is None else None, work)
    if ids is not None:
        row = row[ids]
    if mask is not None or row is not logits:
        best = int(row.argmax()) if len(row) else 0
        if not len(row) or row[best] == -math.inf:
            return Sampled(NOT_A_TOKEN)
    if params.greedy and params.num_logprobs is None:
        return Sampled(best if ids is None else int(ids[best]))
    with np.errstate(over="ignore", under="ignore"):  # the difference of two logits may underflow
        token = best if params.greedy or len(row) == 1 else _draw(row, row[best], params, position, work)
        if ids is not None:
            token = int(ids[token])
        if params.num_logprobs is None:
            return Sampled(token)
        return _with_logprobs(token, logits, params.num_logprobs, work)


def _few_allowed(mask: NDArray[np.int32] | None, num_vocab: int) -> Indices | None:
    """Return the allowed tokens in ascending order if they are few; None: all the others matter too.

    A grammar mostly allows one token or some. A row with 100,000 impossible tokens takes a hundred times longer, and
    top_k, whose cut then lies among these, a thousand times.
    """
    if mask is None:
        return None
    words = np.flatnonzero(mask)
    if len(words) > _FEW_WORDS:
        return None
    bits = np.unpackbits(mask[words].view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    word, bit = np.nonzero(bits)
    ids: Indices = 32 * words[word] + bit
    return ids[: np.searchsorted(ids, num_vocab)]  # the bits that fill the last word may be set


def _processed(
    logits: Floats, params: SamplingParams, history: History | None, mask: NDArray[np.int32] | None, work: Workspace
) -> Floats:
    """Return the logits after bias, penalties and mask, in the workspace."""
    row = logits
    if params.logit_bias or params.penalized:
        np.copyto(work.row, logits)
        row = work.row
        with np.errstate(over="ignore", under="ignore"):
            if params.logit_bias:
                _add_bias(row, params.logit_bias)
            if params.penalized:
                assert history is not None, "penalties need a history"
                _penalize(row, params, history)
    if mask is not None:
        assert mask.dtype == np.int32, mask.dtype
        assert mask.shape == (len(work.scratch) // 32,), mask.shape
        limits = work.scratch.reshape(-1, 8)
        np.take(_LIMITS, mask.view(np.uint8), axis=0, out=limits, mode="clip")  # any other mode copies `out`
        row = np.minimum(row, work.scratch[: len(row)], out=work.row)
    return row


@lru_cache(maxsize=64)
def _bias_arrays(logit_bias: tuple[tuple[int, float], ...]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    merged = dict(logit_bias)
    return np.array(list(merged), dtype=np.int64), np.array(list(merged.values()), dtype=np.float64)


def _add_bias(row: Floats, logit_bias: tuple[tuple[int, float], ...]) -> None:
    ids, bias = _bias_arrays(logit_bias)
    assert ids.max() < len(row), "a biased token is outside of the vocabulary"
    possible = row[ids] > -math.inf
    ids, bias = ids[possible], bias[possible]
    row[ids] = np.where(bias == -math.inf, -math.inf, np.clip(row[ids] + bias, -_LARGEST, _LARGEST))


def _penalize(row: Floats, params: SamplingParams, history: History) -> None:
    values = row[history.ids].astype(np.float64)
    possible = values > -math.inf
    values = values[possible]
    repetition = params.repetition_penalty
    values = np.where(values > 0, values / repetition, values * repetition)
    counts = history.counts[possible]
    penalties = counts * params.frequency_penalty + (counts > 0) * params.presence_penalty
    # Clipped twice: the difference of two infinities is not a number.
    values = np.clip(values, -_LARGEST, _LARGEST) - penalties
    row[history.ids[possible]] = np.clip(values, -_LARGEST, _LARGEST)


def _draw(row: Floats, top: np.float32, params: SamplingParams, position: int, work: Workspace) -> int:
    """Apply steps 8 to 12 to a row whose greatest logit `top` is finite."""
    temperature = min(max(params.temperature, COLDEST), HOTTEST)
    cut = math.log(params.min_p) - SLACK if params.min_p > 0 else -math.inf
    ids: Indices | None = None  # remaining tokens, in ascending order; None: all
    values = row
    if 0 < params.top_k < len(row):
        ids = _top(row, params.top_k, work.flags)
    elif params.min_p > 0:
        ids = _at_least(row, float(top), temperature * cut, work.flags)
    if ids is None:
        z = _exponents(row, top, temperature, work.scratch[: len(row)])
    else:
        values = row[ids]
        z = _exponents(values, top, temperature)
        if params.min_p > 0:
            kept = np.flatnonzero(z >= cut)
            ids, values, z = ids[kept], values[kept], z[kept]
    weights = np.exp(z, out=z)
    if params.top_p < 1:
        kept = _nucleus(values, top, temperature, weights, params.top_p, work.flags)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    sums = _running_sums(weights)
    drawn = _index_past(weights, sums, uniform(params.seed, position, params.choice) * float(sums[-1]))
    return drawn if ids is None else int(ids[drawn])


def _exponents(values: Floats, top: np.float32, temperature: float, out: Floats | None = None) -> Floats:
    """Return z of step 8."""
    out = np.subtract(values, top, out=out)
    return out if temperature == 1 else np.divide(out, np.float32(temperature), out=out)


def _running_sums(weights: Floats) -> NDArray[np.float64]:  # [ceil(n / _BLOCK)]
    """Return, for each block, the sum of all weights up to its end."""
    return np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64))


def _index_past(weights: Floats, sums: NDArray[np.float64], target: float) -> int:
    """Return the first index at which the running sum exceeds `target`; `sums` are its values at the ends of blocks."""
    block = int(np.searchsorted(sums, target, side="right"))
    start = block * _BLOCK
    inside = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    remaining = target - sums[block - 1] if block else target
    # The two orders of summation may differ in the last bit; the crossing is in this block nevertheless.
    return start + int(np.searchsorted(inside, min(remaining, np.nextafter(inside[-1], 0)), side="right"))


def _nucleus(
    values: Floats, top: np.float32, temperature: float, weights: Floats, top_p: float, flags: NDArray[np.bool_]
) -> Indices:
    """Return the indices that top_p keeps, in ascending order.

    Only values above a cut are sorted. A cut is low enough as soon as the sum above it reaches the bound, because the
    sums of the greatest values do not depend on the others: the cut affects the time, never the result.
    """
    total = float(_running_sums(weights)[-1])
    bound = (top_p - SLACK) * total
    enough = math.log((1 - top_p) * total / len(weights))  # n weights below exp(enough) sum to at most 1 - top_p
    for above in _NUCLEUS_CUTS if len(values) > _FEW else _NUCLEUS_CUTS[-1:]:
        kept = _at_least(values, float(top), temperature * min(enough + above, 0.0), flags)
        descending = np.sort(values[kept])[::-1]
        sorted_weights = np.exp(_exponents(descending, top, temperature))
        sums = _running_sums(sorted_weights)
        if sums[-1] > bound:
            break
    count = _index_past(sorted_weights, sums, bound) + 1
    return kept[_first(values[kept], descending[count - 1], count)]


def _at_least(values: Floats, top: float, below: float, flags: NDArray[np.bool_]) -> Indices:
    """Return the indices of the values that are at least `top + below`, and perhaps a few more, in ascending order."""
    bound = top + below
    bound -= SLACK * (abs(top) + abs(below)) if below > -math.inf else 0.0  # more than the error of float32
    return np.flatnonzero(np.greater_equal(values, np.float32(bound), out=flags[: len(values)]))


def _top(values: Floats, k: int, flags: NDArray[np.bool_]) -> Indices:
    """Return the indices of the k greatest values (k < n), lower indices first among equals, in ascending order."""
    candidates = np.flatnonzero(np.greater_equal(values, _kth_at_least(values, k), out=flags[: len(values)]))
    values = values[candidates]
    at = len(values) - k
    return candidates[_first(values, np.partition(values, at)[at], k)]


def _kth_at_least(values: Floats, k: int) -> np.float32:
    """Return a lower bound of the k-th greatest value: the k-th greatest of the column maxima of a grid."""
    rows = min(_ROWS, len(values) // (4 * k))
    if rows < 2:
        return np.float32(-math.inf)
    columns = len(values) // rows
    maxima = values[: rows * columns].reshape(rows, columns).max(axis=0)
    kth: np.float32 = np.partition(maxima, columns - k)[columns - k]
    return kth


def _first(values: Floats, last: np.float32, count: int) -> Indices:
    """Return the indices of the `count` greatest values, the least of which is `last`, in ascending order."""
    kept = values > last
    equals = np.flatnonzero(values == last)
    kept[equals[: count - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


def _with_logprobs(token: int, logits: Floats, num_top: int, work: Workspace) -> Sampled:
    """Return the token with its log-probability, and the most likely tokens with theirs."""
    top = logits.max()
    weights = np.subtract(logits, top, out=work.scratch[: len(logits)])
    np.exp(weights, out=weights)
    log_sum = math.log(weights.sum())  # by pairs in float32: an error of 1e-6 at most, in a third of float64's time

    def logprob(i: int) -> float:
        return float(logits[i]) - float(top) - log_sum  # in this order: `top + log_sum` may lose `log_sum` to rounding

    if num_top == 0:
        return Sampled(token, logprob(token))
    ids = np.arange(len(logits)) if num_top >= len(logits) else _top(logits, num_top, work.flags)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    return Sampled(token, logprob(token), tuple((int(i), logprob(i)) for i in ids if logits[i] > -math.inf))


def uniform(seed: int, position: int, choice: int) -> float:
    """Return a multiple of 2**-24 in [0, 1) for a 64-bit seed, a position and the number of a choice.

    It is a function and no state: the same on every machine, in any order, with speculation on or off. The key is the
    seed (low word first), the counter (position, choice, 0, 0); the number is the upper 24 bits of word 0. This is not
    `tl.rand`, which takes 31 bits and another range.
    """
    assert 0 <= seed < 2**64, seed
    assert 0 <= position < 2**32, position
    assert 0 <= choice < 2**32, choice
    word, _, _, _ = philox((position, choice, 0, 0), (seed & _LOW, seed >> 32))
    return (word >> 8) * 2.0**-24


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Return the four 32-bit words of Philox4x32-10 for a counter and a key, both in 32-bit words.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11), section 3.3. The words come in the order of
    `tl.philox` with 32-bit counters.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    m0, m1 = _MULTIPLIERS
    s0, s1 = _KEY_STEPS
    for _ in range(_ROUNDS):
        p0 = m0 * c0
        p1 = m1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32) ^ c3 ^ k1, p0 & _LOW
        k0 = (k0 + s0) & _LOW
        k1 = (k1 + s1) & _LOW
    return c0, c1, c2, c3
