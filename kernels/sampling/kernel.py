"""Sampling in Triton: a few passes over chunks of all rows at once, then one program per row.

Owns the kernels, their launch and their scratch memory. Each launch happens for any rows, with shapes that depend on
their number alone, so that a CUDA graph can hold it; a program with nothing to do ends at once.

    prepare   convert a chunk of logits to float32; find its greatest value, +inf if one is NaN or +inf
    bias      add a row's logit bias
    penalize  apply a row's penalties
    limit     apply a chunk's mask; find its most likely token
    weigh     sum a chunk's weights, count its tokens by distance from the greatest, find its log-probabilities
    collect   append a chunk's tokens that may be in the nucleus, or among the top k, to the row's list
    draw      find a row's threshold, by comparing the tokens of a short list or by bisection, and its token
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelm.kernels.pdl import begin_dependent, uses_pdl
from edgelm.kernels.sampling.draw_kernel import (
    ACTIVE,
    FLAGS,
    GREEDY,
    INF,
    LEAST,
    NUM_TOP,
    UNIT,
    WORDS,
    best_of,
    composites,
    draw_kernel,
    exponents,
    temperature_and_cut,
    top_k_and_p,
    value_of,
    weights,
)
from edgelm.kernels.sampling.layout import MAX_TOP, NUM_ANSWER, Batch, Flag, Word

CHUNK = 2048  # logits per program
CAPACITY = 8192  # tokens of a row's list
TILE = 2048  # tokens of a list or a row that `draw` reads at a time
FEW = 128  # tokens of a list, at most, that `draw` compares with each other
DRAW_WARPS = 8
ENTRIES = 1024  # of bias or history, processed at a time
OPTIONS = {"enable_fp_fusion": False}  # every operation is rounded as in the specification
_TOP_ROOM = triton.next_power_of_2(MAX_TOP)

# Distances d from the greatest logit are counted in bins of an eighth of an octave, from 2**-12 to 2**20.
_NUM_BINS = tl.constexpr(256)
_BIN_SHIFT = tl.constexpr(20)  # of float32 bits: three bits of the mantissa remain
_FIRST_BIN = tl.constexpr((127 - 12) << 3)

_MASKED = tl.constexpr(int(Flag.MASKED))
_REPETITION = tl.constexpr(int(Word.REPETITION))
_FREQUENCY = tl.constexpr(int(Word.FREQUENCY))
_PRESENCE = tl.constexpr(int(Word.PRESENCE))
_BIAS_START = tl.constexpr(int(Word.BIAS_START))
_HISTORY_START = tl.constexpr(int(Word.HISTORY_START))
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _bins(values, top):
    """Return the bin of each value, by its distance from `top`: int32 of the same shape."""
    bits = (top - values).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((bits >> _BIN_SHIFT) - _FIRST_BIN, 0), _NUM_BINS - 1)


@triton.jit
def prepare_kernel(
    logits_ptr,
    logits_stride,
    words_ptr,  # int64 [rows, WORDS]
    row_ptr,  # float32 [rows, row_stride]: the row, then the values of its list
    row_stride,
    maxima_ptr,  # float32 [rows, chunks]
    counts_ptr,  # int32 [rows, _NUM_BINS]
    listed_ptr,  # int32 [rows]
    num_vocab,
    CHUNK: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """Convert a chunk of logits. Grid: rows, chunks."""
    begin_dependent(launch_pdl)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(words_ptr + row * WORDS + FLAGS) & ACTIVE != 0:
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = at < num_vocab
        raw = tl.load(logits_ptr + row * logits_stride + at, inside, other=-INF).to(tl.float32)
        tl.store(row_ptr + row * row_stride + at, raw, inside)
        bad = (raw != raw) | (raw == INF)
        tl.store(maxima_ptr + row * tl.num_programs(1) + chunk, tl.max(tl.where(bad, INF, raw)))
        if chunk == 0:
            bins = tl.arange(0, _NUM_BINS)
            tl.store(counts_ptr + row * _NUM_BINS + bins, bins * 0)
            tl.store(listed_ptr + row, 0)


@triton.jit
def bias_kernel(
    words_ptr, ids_ptr, bias_ptr, row_ptr, row_stride, BLOCK: tl.constexpr, launch_pdl: tl.constexpr = False
):
    """Add a row's logit bias, BLOCK entries at a time. Grid: rows."""
    begin_dependent(launch_pdl)
    row = tl.program_id(0).to(tl.int64)
    row_ptr += row * row_stride
    start = tl.load(words_ptr + row * WORDS + _BIAS_START).to(tl.int32)
    end = tl.load(words_ptr + row * WORDS + _BIAS_START + 1).to(tl.int32)
    for first in range(start, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < end
        ids = tl.load(ids_ptr + at, inside, other=0)
        bias = tl.load(bias_ptr + at, inside, other=0.0)
        values = tl.load(row_ptr + ids, inside, other=-INF)
        possible = values > -INF
        biased = tl.where(possible, values, 0.0).to(tl.float64) + bias
        biased = tl.minimum(tl.maximum(biased, -_LARGEST), _LARGEST).to(tl.float32)
        tl.store(row_ptr + ids, tl.where(bias == -INF, -INF, biased), inside & possible)


@triton.jit
def penalize_kernel(
    words_ptr, floats_ptr, ids_ptr, counts_ptr, row_ptr, row_stride,
    BLOCK: tl.constexpr, launch_pdl: tl.constexpr = False,
):  # fmt: skip
    """Apply a row's penalties, BLOCK tokens of its history at a time. Grid: rows."""
    begin_dependent(launch_pdl)
    row = tl.program_id(0).to(tl.int64)
    row_ptr += row * row_stride
    start = tl.load(words_ptr + row * WORDS + _HISTORY_START).to(tl.int32)
    end = tl.load(words_ptr + row * WORDS + _HISTORY_START + 1).to(tl.int32)
    if start < end:
        repetition = tl.load(floats_ptr + row * WORDS + _REPETITION)
        frequency = tl.load(floats_ptr + row * WORDS + _FREQUENCY)
        presence = tl.load(floats_ptr + row * WORDS + _PRESENCE)
        for first in range(start, end, BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < end
            ids = tl.load(ids_ptr + at, inside, other=0)
            count = tl.load(counts_ptr + at, inside, other=0)
            values = tl.load(row_ptr + ids, inside, other=-INF)
            possible = values > -INF
            values = tl.where(possible, values, 0.0).to(tl.float64)
            values = tl.where(values > 0, values / repetition, values * repetition)
            values = tl.minimum(tl.maximum(values, -_LARGEST), _LARGEST)
            values -= count.to(tl.float64) * frequency + tl.where(count > 0, presence, 0.0)
            values = tl.minimum(tl.maximum(values, -_LARGEST), _LARGEST).to(tl.float32)
            tl.store(row_ptr + ids, values, inside & possible)


@triton.jit
def limit_kernel(
    words_ptr,
    masks_ptr,  # int32 [rows, masks_stride]
    masks_stride,
    row_ptr,
    row_stride,
    best_ptr,  # int64 [rows, chunks]
    num_vocab,
    CHUNK: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """Apply the mask to a chunk of a row. Grid: rows, chunks."""
    begin_dependent(launch_pdl)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    flags = tl.load(words_ptr + row * WORDS + FLAGS)
    if flags & ACTIVE != 0:
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = at < num_vocab
        values = tl.load(row_ptr + row * row_stride + at, inside, other=-INF)
        if flags & _MASKED != 0:
            allowed = tl.load(masks_ptr + row * masks_stride + at // 32, inside, other=0) >> (at % 32)
            values = tl.where(allowed & 1 != 0, values, -INF)
            tl.store(row_ptr + row * row_stride + at, values, inside)
        best = tl.max(tl.where(inside, composites(values, at), LEAST))
        tl.store(best_ptr + row * tl.num_programs(1) + chunk, best)


@triton.jit
def weigh_kernel(
    logits_ptr,
    logits_stride,
    words_ptr,
    floats_ptr,  # the same memory as float64
    row_ptr,
    row_stride,
    maxima_ptr,
    best_ptr,
    counts_ptr,
    sums_ptr,  # int64 [rows, chunks]
    raw_sums_ptr,  # int64 [rows, chunks]
    tops_ptr,  # int64 [rows, chunks, ROOM]
    num_vocab,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROOM: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """Weigh the tokens of a chunk. Grid: rows, chunks."""
    begin_dependent(launch_pdl)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_chunks = tl.num_programs(1)
    words_ptr += row * WORDS
    flags = tl.load(words_ptr + FLAGS)
    if flags & ACTIVE != 0:
        best, most, possible = best_of(best_ptr, maxima_ptr, row, num_chunks, CHUNKS)
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = at < num_vocab
        if possible & (flags & GREEDY == 0):
            temperature, cut = temperature_and_cut(floats_ptr + row * WORDS)
            top_k, top_p = top_k_and_p(words_ptr, floats_ptr + row * WORDS)
            top = value_of(best)
            values = tl.load(row_ptr + row * row_stride + at, inside, other=-INF)
            z = exponents(values, top, temperature, cut)
            tl.store(sums_ptr + row * num_chunks + chunk, tl.sum(weights(z)))
            if (top_k > 0) | (top_p < 1):
                counts = tl.histogram(_bins(values, top), _NUM_BINS, mask=z > -INF)
                tl.atomic_add(counts_ptr + row * _NUM_BINS + tl.arange(0, _NUM_BINS), counts, counts > 0, sem="relaxed")
        num_top = tl.load(words_ptr + NUM_TOP).to(tl.int32)
        if possible & (num_top >= 0):
            raw = tl.load(logits_ptr + row * logits_stride + at, inside, other=-INF).to(tl.float32)
            tl.store(raw_sums_ptr + row * num_chunks + chunk, tl.sum(weights(raw - most)))
            order = tl.where(inside, composites(raw, at), LEAST)
            for j in range(num_top):
                likeliest = tl.max(order)
                tl.store(tops_ptr + (row * num_chunks + chunk) * ROOM + j, likeliest)
                order = tl.where(order == likeliest, LEAST, order)


@triton.jit
def collect_kernel(
    words_ptr,
    floats_ptr,
    row_ptr,
    row_stride,
    ids_ptr,  # int32 [rows, CAPACITY]
    maxima_ptr,
    best_ptr,
    counts_ptr,
    sums_ptr,
    listed_ptr,
    num_vocab,
    list_start,  # where the list's values begin in a row
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """Append tokens of a chunk to the row's list. Grid: rows, chunks."""
    begin_dependent(launch_pdl)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_chunks = tl.num_programs(1)
    words_ptr += row * WORDS
    floats_ptr += row * WORDS
    flags = tl.load(words_ptr + FLAGS)
    top_k, top_p = top_k_and_p(words_ptr, floats_ptr)
    if (flags & (ACTIVE | GREEDY) == ACTIVE) & ((top_k > 0) | (top_p < 1)):
        best, _, possible = best_of(best_ptr, maxima_ptr, row, num_chunks, CHUNKS)
        if possible:
            temperature, cut = temperature_and_cut(floats_ptr)
            top = value_of(best)
            # the bins to collect: those that hold k tokens, or all except a tail that is too light to matter
            bins = tl.arange(0, _NUM_BINS)
            counts = tl.load(counts_ptr + row * _NUM_BINS + bins)
            if top_k > 0:
                enough = tl.cumsum(counts, 0) >= top_k
            else:
                chunks = tl.arange(0, CHUNKS)
                total = tl.sum(tl.load(sums_ptr + row * num_chunks + chunks, chunks < num_chunks, other=0))
                distance = tl.where(bins == 0, 0, (bins + _FIRST_BIN) << _BIN_SHIFT).to(tl.float32, bitcast=True)
                heaviest = counts.to(tl.float32) * tl.exp(-distance / temperature)  # at most, per bin
                tail = tl.cumsum(heaviest, 0, reverse=True) - heaviest
                enough = tail < (total.to(tl.float32) / UNIT) * (0.9999 - top_p.to(tl.float32))
            last = tl.min(tl.where(enough, bins, _NUM_BINS - 1))

            at = chunk * CHUNK + tl.arange(0, CHUNK)
            values = tl.load(row_ptr + row * row_stride + at, at < num_vocab, other=-INF)
            z = exponents(values, top, temperature, cut)
            taken = ((z > -INF) & (_bins(values, top) <= last)).to(tl.int32)
            count = tl.sum(taken)
            if count > 0:
                place = tl.atomic_add(listed_ptr + row, count, sem="relaxed") + tl.cumsum(taken, 0) - 1
                fits = (taken > 0) & (place < CAPACITY)
                tl.store(row_ptr + row * row_stride + list_start + place, values, fits)
                tl.store(ids_ptr + row * CAPACITY + place, at, fits)


def sample(logits: Tensor, batch: Batch, out: Tensor | None = None) -> Tensor:
    """Launch the kernels."""
    num_rows, num_vocab = logits.shape
    device = logits.device
    num_chunks = triton.cdiv(num_vocab, CHUNK)
    list_start = num_chunks * CHUNK
    row_stride = list_start + CAPACITY
    answers = torch.empty((num_rows, NUM_ANSWER), dtype=torch.int64, device=device) if out is None else out
    if not num_rows:
        return answers
    row = torch.empty((num_rows, row_stride), dtype=torch.float32, device=device)
    maxima = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device)
    # each part begins at a multiple of 16 bytes for any number of rows, or some numbers would compile other kernels
    integers = torch.empty(num_rows * (_NUM_BINS.value + CAPACITY + 1), dtype=torch.int32, device=device)
    counts, ids, listed = integers.split((num_rows * _NUM_BINS.value, num_rows * CAPACITY, num_rows))
    size = -(-num_rows * num_chunks // 2) * 2
    longs = torch.empty(size * (3 + _TOP_ROOM), dtype=torch.int64, device=device)
    best, sums, raw_sums, tops = longs.split((size, size, size, size * _TOP_ROOM))
    words, floats = batch.rows, batch.rows.view(torch.float64)
    chunks = {"CHUNK": CHUNK, "CHUNKS": triton.next_power_of_2(num_chunks)}
    by_chunk, by_row = (num_rows, num_chunks), (num_rows,)
    options = OPTIONS | {"launch_pdl": uses_pdl()}
    prepare_kernel[by_chunk](
        logits, logits.stride(0), words, row, row_stride, maxima, counts, listed, num_vocab, CHUNK=CHUNK, **options
    )
    if len(batch.bias_ids):
        bias_kernel[by_row](words, batch.bias_ids, batch.bias, row, row_stride, BLOCK=ENTRIES, **options)
    if len(batch.history_ids):
        penalize_kernel[by_row](
            words, floats, batch.history_ids, batch.history_counts, row, row_stride, BLOCK=ENTRIES, **options
        )
    limit_kernel[by_chunk](
        words, batch.masks, batch.masks.stride(0), row, row_stride, best, num_vocab, CHUNK=CHUNK, **options
    )
    weigh_kernel[by_chunk](
        logits, logits.stride(0), words, floats, row, row_stride, maxima, best, counts, sums, raw_sums, tops, num_vocab,
        ROOM=_TOP_ROOM, **chunks, **options,
    )  # fmt: skip
    collect_kernel[by_chunk](
        words, floats, row, row_stride, ids, maxima, best, counts, sums, listed, num_vocab, list_start,
        CAPACITY=CAPACITY, **chunks, **options,
    )  # fmt: skip
    draw_kernel[by_row](
        logits, logits.stride(0), words, floats, row, row_stride, ids, maxima, best, sums, raw_sums, tops, listed,
        answers, num_vocab, num_chunks, list_start,
        CAPACITY=CAPACITY, ROOM=_TOP_ROOM, TILE=TILE, FEW=FEW, num_warps=DRAW_WARPS, **chunks, **options,
    )  # fmt: skip
    return answers
