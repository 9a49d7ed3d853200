"""The last pass of sampling in Triton, one program per row: the threshold of top_k and top_p, and the token.

Owns weights and composites in Triton, and the searches. top_k and top_p keep the tokens from some composite up (see
`reference.composites`), so both search for that threshold: they halve its range until the count, or the sum of weights,
is right. Nothing is sorted.

A search measures the row's list: a few of its tokens in any order, which the earlier passes have collected. The first
tile of them stays in registers for the whole search. If the list has no room for all tokens, a search reads the whole
row instead, which is slower and has the same result. A short list is not searched: each of its tokens is compared with
all others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgelm.kernels.pdl import begin_dependent
from edgelm.kernels.sampling.layout import NUM_ANSWER, WEIGHT_BITS, Answer, Flag, Word

WORDS = tl.constexpr(len(Word))
FLAGS = tl.constexpr(int(Word.FLAGS))
NUM_TOP = tl.constexpr(int(Word.NUM_TOP))
ACTIVE = tl.constexpr(int(Flag.ACTIVE))
GREEDY = tl.constexpr(int(Flag.GREEDY))
INF = tl.constexpr(float("inf"))
LEAST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # less than every composite
UNIT = tl.constexpr(2.0**WEIGHT_BITS)

_OTHERS = tl.constexpr(32)  # tokens of a list that all of it is compared with at a time
_TEMPERATURE = tl.constexpr(int(Word.TEMPERATURE))
_CUT = tl.constexpr(int(Word.CUT))
_TOP_P = tl.constexpr(int(Word.TOP_P))
_TOP_K = tl.constexpr(int(Word.TOP_K))
_SEED = tl.constexpr(int(Word.SEED))
_POSITION = tl.constexpr(int(Word.POSITION))
_CHOICE = tl.constexpr(int(Word.CHOICE))
_ANSWERS = tl.constexpr(int(NUM_ANSWER))
_TOKEN = tl.constexpr(int(Answer.TOKEN))
_SUM = tl.constexpr(int(Answer.SUM))
_MOST = tl.constexpr(int(Answer.MOST))
_OWN = tl.constexpr(int(Answer.OWN))
_TOP = tl.constexpr(int(Answer.TOP))


@triton.jit
def composites(values, ids):
    """Return the same as `reference.composites`: int64 of the shape of values and ids."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def value_of(composite):
    """Return the value in a composite."""
    bits = (composite >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def exponents(values, top, temperature, cut):
    """Return z = (value - top) / temperature, or -inf if min_p removes the token."""
    z = tl.div_rn(values - top, temperature)
    return tl.where(z >= cut, z, -INF)


@triton.jit
def weights(z):
    """Return exp(z) in units of 2**-WEIGHT_BITS: int64."""
    return (tl.exp(z) * UNIT).to(tl.int64)


@triton.jit
def temperature_and_cut(floats_ptr):
    """Return these two parameters of a row."""
    return tl.load(floats_ptr + _TEMPERATURE).to(tl.float32), tl.load(floats_ptr + _CUT).to(tl.float32)


@triton.jit
def top_k_and_p(words_ptr, floats_ptr):
    """Return these two parameters of a row."""
    return tl.load(words_ptr + _TOP_K), tl.load(floats_ptr + _TOP_P)


@triton.jit
def best_of(best_ptr, maxima_ptr, row, num_chunks, CHUNKS: tl.constexpr):
    """Return the most likely token as a composite, the greatest raw logit, and whether any token is possible."""
    chunk = tl.arange(0, CHUNKS)
    best = tl.max(tl.load(best_ptr + row * num_chunks + chunk, chunk < num_chunks, other=LEAST))
    most = tl.max(tl.load(maxima_ptr + row * num_chunks + chunk, chunk < num_chunks, other=-INF))
    return best, most, (most > -INF) & (most < INF) & (value_of(best) > -INF)


@triton.jit
def _tile(values_ptr, ids_ptr, start, count, first, listed, best, temperature, cut, TILE: tl.constexpr):
    """Return ids, composites and z of the tokens from `start` on, each [TILE]; z is -inf where there is no token.

    They are in the list if its length `listed` is not 0, else in the row, where the first token has the id `first`.
    """
    at = start + tl.arange(0, TILE)
    values = tl.load(values_ptr + at, at < count, other=-INF)
    ids = tl.where(at < listed, tl.load(ids_ptr + at, at < listed, other=0), first + at)
    return ids, composites(values, ids), exponents(values, value_of(best), temperature, cut)


@triton.jit
def _weighed(values_ptr, ids_ptr, start, count, first, listed, best, temperature, cut, TILE: tl.constexpr):
    """Return ids, composites and weights of the tokens from `start` on; LEAST and 0 where there is no token."""
    ids, order, z = _tile(values_ptr, ids_ptr, start, count, first, listed, best, temperature, cut, TILE)
    return ids, tl.where(z > -INF, order, LEAST), tl.where(z > -INF, weights(z), 0)


@triton.jit
def _measure(held, values_ptr, ids_ptr, count, first, listed, best, temperature, cut, low, last, TILE: tl.constexpr):
    """Return the number and the weight of the tokens with composites >= `low` and ids <= `last`.

    `held` has the first TILE tokens, weighed; only the others are read. `low` is greater than LEAST.
    """
    ids, order, weight = held
    kept = (order >= low) & (ids <= last)
    counts = kept.to(tl.int32)
    sums = tl.where(kept, weight, 0)
    for start in range(TILE, count, TILE):
        ids, order, weight = _weighed(values_ptr, ids_ptr, start, count, first, listed, best, temperature, cut, TILE)
        kept = (order >= low) & (ids <= last)
        counts += kept.to(tl.int32)
        sums += tl.where(kept, weight, 0)
    return tl.sum(counts), tl.sum(sums)


@triton.jit
def _least(held, values_ptr, ids_ptr, count, listed, best, temperature, cut, TILE: tl.constexpr):
    """Return the least composite of all tokens."""
    _, order, _ = held
    least = tl.where(order > LEAST, order, best)
    for start in range(TILE, count, TILE):
        _, order, _ = _weighed(values_ptr, ids_ptr, start, count, 0, listed, best, temperature, cut, TILE)
        least = tl.where(order > LEAST, tl.minimum(least, order), least)
    return tl.min(least)


@triton.jit
def _threshold(
    held, values_ptr, ids_ptr, count, listed, best, total, top_k, top_p, temperature, cut, num_vocab, TILE: tl.constexpr
):
    """Return the least composite that top_k and top_p keep, and the weight of all kept tokens."""
    low = _least(held, values_ptr, ids_ptr, count, listed, best, temperature, cut, TILE)
    number, weight = _measure(held, values_ptr, ids_ptr, count, 0, listed, best, temperature, cut, low, num_vocab, TILE)
    if top_k > 0:
        high, number_above = best + 1, number * 0  # the threshold is in [low, high)
        while (number > top_k) & (number - number_above > 1):
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            number_at, weight_at = _measure(
                held, values_ptr, ids_ptr, count, 0, listed, best, temperature, cut, middle, num_vocab, TILE
            )
            if number_at >= top_k:
                low, number, weight = middle, number_at, weight_at
            else:
                high, number_above = middle, number_at
        total = weight
    if top_p < 1:
        bound = tl.maximum(top_p * total.to(tl.float64), 0.0).to(tl.int64)
        high, number_above = best + 1, number * 0
        while number - number_above > 1:
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            number_at, weight_at = _measure(
                held, values_ptr, ids_ptr, count, 0, listed, best, temperature, cut, middle, num_vocab, TILE
            )
            if weight_at > bound:
                low, number, weight = middle, number_at, weight_at
            else:
                high, number_above = middle, number_at
    return low, weight


@triton.jit
def _target(words_ptr, total):
    """Return the row's random number times the total weight, rounded down."""
    word = tl.philox(
        tl.load(words_ptr + _SEED),
        tl.load(words_ptr + _POSITION).to(tl.uint32),
        tl.load(words_ptr + _CHOICE).to(tl.uint32),
        0,
        0,
    )[0]
    u = (word >> 8).to(tl.int64)  # 24 bits
    return u * (total >> 24) + ((u * (total & 0xFFFFFF)) >> 24)


@triton.jit
def _drawn_of_few(words_ptr, list_ptr, ids_ptr, listed, best, total, top_k, top_p, temperature, cut, FEW: tl.constexpr):
    """Return the token that the row's random number selects, for a list of at most FEW tokens.

    Each token is compared with all others, some at a time. So there is no search, which waits for each of its sums.
    """
    ids, order, weight = _weighed(list_ptr, ids_ptr, 0, listed, 0, listed, best, temperature, cut, FEW)
    number_above, weight_above = tl.zeros([FEW], tl.int32), tl.zeros([FEW], tl.int64)
    for start in range(0, listed, _OTHERS):
        _, other, heavy = _weighed(list_ptr, ids_ptr, start, listed, 0, listed, best, temperature, cut, _OTHERS)
        above = other[None, :] > order[:, None]
        number_above += tl.sum(above.to(tl.int32), 1)
        weight_above += tl.sum(tl.where(above, heavy[None, :], 0), 1)
    kept = order > LEAST
    if top_k > 0:
        kept = kept & (number_above < top_k)
        total = tl.sum(tl.where(kept, weight, 0))
    if top_p < 1:
        kept = kept & (weight_above <= tl.maximum(top_p * total.to(tl.float64), 0.0).to(tl.int64))
    low = tl.min(tl.where(kept, order, best))
    target = _target(words_ptr, tl.sum(tl.where(kept, weight, 0)))
    weight_before = tl.zeros([FEW], tl.int64)  # of the kept tokens with ids up to this one's
    for start in range(0, listed, _OTHERS):
        others, other, heavy = _weighed(list_ptr, ids_ptr, start, listed, 0, listed, best, temperature, cut, _OTHERS)
        before = (others[None, :] <= ids[:, None]) & (other >= low)[None, :]
        weight_before += tl.sum(tl.where(before, heavy[None, :], 0), 1)
    return tl.min(tl.where(kept & (weight_before > target), ids, 0x7FFFFFFF))


@triton.jit
def _drawn(
    words_ptr,
    floats_ptr,
    values_ptr,
    ids_ptr,
    sums_ptr,
    num_listed,
    best,
    num_vocab,
    num_chunks,
    list_start,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
):
    """Return the token that the row's random number selects."""
    temperature, cut = temperature_and_cut(floats_ptr)
    top_k, top_p = top_k_and_p(words_ptr, floats_ptr)
    chunk = tl.arange(0, CHUNKS)
    sums = tl.load(sums_ptr + chunk, chunk < num_chunks, other=0)
    total = tl.sum(sums)
    truncated = (top_k > 0) | (top_p < 1)
    listed = tl.where(truncated & (num_listed <= CAPACITY), num_listed, 0)  # 0: read the whole row
    low = best * 0 + LEAST
    list_ptr = values_ptr + list_start
    if (listed > 0) & (listed <= FEW):
        token = _drawn_of_few(words_ptr, list_ptr, ids_ptr, listed, best, total, top_k, top_p, temperature, cut, FEW)
    elif listed > 0:
        held = _weighed(list_ptr, ids_ptr, 0, listed, 0, listed, best, temperature, cut, TILE)
        low, total = _threshold(
            held, list_ptr, ids_ptr, listed, listed, best, total, top_k, top_p, temperature, cut, num_vocab, TILE
        )
        target = _target(words_ptr, total)
        below, token = listed * 0 - 1, num_vocab - 1
        while token - below > 1:  # weight up to `below` <= target < weight up to `token`
            middle = (below + token) // 2
            weight_at = _measure(held, list_ptr, ids_ptr, listed, 0, listed, best, temperature, cut, low, middle, TILE)[
                1
            ]
            if weight_at > target:
                token = middle
            else:
                below = middle
    else:
        if truncated:
            held = _weighed(values_ptr, ids_ptr, 0, num_vocab, 0, 0, best, temperature, cut, TILE)
            low, total = _threshold(
                held, values_ptr, ids_ptr, num_vocab, 0, best, total, top_k, top_p, temperature, cut, num_vocab, TILE
            )
            sums = tl.zeros([CHUNKS], tl.int64)
            for i in range(num_chunks):
                size = tl.minimum(num_vocab - i * CHUNK, CHUNK)
                chunk_ptr, own = values_ptr + i * CHUNK, i * CHUNK
                held = _weighed(chunk_ptr, ids_ptr, 0, size, own, 0, best, temperature, cut, TILE)
                weight_in = _measure(
                    held, chunk_ptr, ids_ptr, size, own, 0, best, temperature, cut, low, num_vocab, TILE
                )[1]
                sums = tl.where(chunk == i, weight_in, sums)
        target = _target(words_ptr, total)
        ends = tl.cumsum(sums, 0)
        first = tl.sum((ends <= target).to(tl.int32)) * CHUNK  # first id of the chunk with the token
        before = tl.max(tl.where(ends <= target, ends, 0))
        ids = first + tl.arange(0, CHUNK)
        values = tl.load(values_ptr + ids, ids < num_vocab, other=-INF)
        z = exponents(values, value_of(best), temperature, cut)
        inside = tl.cumsum(tl.where(composites(values, ids) >= low, weights(z), 0), 0)
        token = first + tl.sum((inside <= target - before).to(tl.int32))
    return token


@triton.jit
def draw_kernel(
    logits_ptr,
    logits_stride,
    words_ptr,  # int64 [rows, WORDS]
    floats_ptr,  # the same memory as float64
    row_ptr,  # float32 [rows, row_stride]: the processed logits, and from `list_start` on the values of the list
    row_stride,
    ids_ptr,  # int32 [rows, CAPACITY]
    maxima_ptr,  # float32 [rows, chunks]
    best_ptr,  # int64 [rows, chunks]
    sums_ptr,  # int64 [rows, chunks]
    raw_sums_ptr,  # int64 [rows, chunks]
    tops_ptr,  # int64 [rows, chunks, ROOM]
    listed_ptr,  # int32 [rows]
    answers_ptr,  # int64 [rows, _ANSWERS]
    num_vocab,
    num_chunks,
    list_start,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,  # a power of two, at least num_chunks
    CAPACITY: tl.constexpr,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,  # tokens of a list, at most, that are compared with each other; a power of two
    launch_pdl: tl.constexpr = False,
):
    """Draw a row's token, and write its answer. Grid: rows."""
    begin_dependent(launch_pdl)
    row = tl.program_id(0).to(tl.int64)
    words_ptr += row * WORDS
    answers_ptr += row * _ANSWERS
    flags = tl.load(words_ptr + FLAGS)
    token = tl.full((), -1, tl.int32)
    if flags & ACTIVE != 0:
        best, most, possible = best_of(best_ptr, maxima_ptr, row, num_chunks, CHUNKS)
        if possible:
            token = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
            if flags & GREEDY == 0:
                token = _drawn(
                    words_ptr,
                    floats_ptr + row * WORDS,
                    row_ptr + row * row_stride,
                    ids_ptr + row * CAPACITY,
                    sums_ptr + row * num_chunks,
                    tl.load(listed_ptr + row),
                    best,
                    num_vocab,
                    num_chunks,
                    list_start,
                    CHUNK,
                    CHUNKS,
                    CAPACITY,
                    TILE,
                    FEW,
                )
            num_top = tl.load(words_ptr + NUM_TOP).to(tl.int32)
            if num_top >= 0:
                chunk = tl.arange(0, CHUNKS)
                sums = tl.load(raw_sums_ptr + row * num_chunks + chunk, chunk < num_chunks, other=0)
                tl.store(answers_ptr + _SUM, tl.sum(sums))
                tl.store(answers_ptr + _MOST, composites(most, token))
                own = tl.load(logits_ptr + row * logits_stride + token).to(tl.float32)
                tl.store(answers_ptr + _OWN, composites(own, token))
                place = tl.arange(0, CHUNKS * ROOM)
                valid = (place < num_chunks * ROOM) & (place % ROOM < num_top)
                order = tl.load(tops_ptr + row * num_chunks * ROOM + place, valid, other=LEAST)
                for j in range(num_top):
                    likeliest = tl.max(order)
                    tl.store(answers_ptr + _TOP + j, likeliest)
                    order = tl.where(order == likeliest, LEAST, order)
    tl.store(answers_ptr + _TOKEN, token.to(tl.int64))
