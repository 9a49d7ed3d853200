"""Attention in Triton for few rows a sequence: decode and verify. Two kernels, over parts of the context and over rows.

Owns how a context is cut, the two kernels, and their scratch. Knows nothing of prompts (prefill/triton.py).

`attend_chunks`: a program takes one head of the cache and some chunks of its sequence, and all rows that attend to it:
the siblings of grouped queries times the positions of a draft, 16 at a time. Its warps ("streams") take every fourth
block each, as the batch of a 3-D dot, so no warp needs what another one has before the chunk's end. Codes go from
memory to the tensor cores through registers only: the cache has them in the order in which a lane multiplies them.
Scales do not touch the codes: those of keys multiply the logits of their group of dimensions, those of values the
weights. `combine_chunks`: a program a row adds up the chunks, with the sink, and undoes the rotation.

A row's result is a function of its own position and what it sees. Chunks begin at fixed positions and are folded in a
fixed order; how many programs share them makes no difference; a hidden position adds exact zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgelm.kernels.attention.operands.triton import (
    LOG2E,
    Q_UP,
    ROOT,
    STREAMS,
    capped,
    products,
    row_operand,
    signs,
    stored_only,
    token_scales,
    value_operands,
    weights_operand,
)

SHIFT = tl.constexpr(4.0)  # weights are at most 2 ** SHIFT: more of the small ones are normal numbers in float16


# -- how a context is cut ----------------------------------------------------------------------------------------------


@triton.jit
def chunk_start(chunk):
    """Return where a chunk begins: 32 chunks have 256 positions, 32 have 512, and so on."""
    octave = chunk >> 5
    return ((1 << octave) - 1) * 8192 + ((chunk & 31) << (octave + 8))


@triton.jit
def chunk_of(position):
    """Return the chunk of a position."""
    # the exponent of a float32 is the number of the octave: 8,192 positions, 16,384 and so on
    octave = (((position >> 13) + 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return (octave << 5) + ((position - ((1 << octave) - 1) * 8192) >> (octave + 8))


# -- the kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def attend_chunks(
    q,
    keys,
    key_high,
    values,
    key_scales,
    value_scales,
    tables,
    starts,
    lengths,
    sums,
    stats,
    scale,
    softcap,
    window,
    table_len,
    max_chunks,
    max_rows,
    KV_HEADS: tl.constexpr,
    SIBLINGS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    ROTATED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    DOT: tl.constexpr,
    KW: tl.constexpr,
    ASM: tl.constexpr,
):
    """Write for each row and chunk: sums [width] of weights times values; stats: largest logit, sum of weights.

    Grid: programs that share a sequence's chunks times PARTS, kv_heads, sequences. The accumulators of long heads do
    not fit the registers: PARTS programs find the same weights, and each takes its own dimensions of the values.
    """
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    first = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - first
    length = tl.load(lengths + sequence)
    start = length - count  # the first row's position
    num_rows = count * SIBLINGS
    lowest = tl.maximum(start - window + 1, 0) if WINDOWED else 0
    few = (count > 0) & (count <= 16)  # longer ones are prompts: another kernel's
    end_chunk = tl.where(few, chunk_of(length - 1) + 1, 0)
    table = tables + sequence.to(tl.int64) * table_len
    stream = tl.arange(0, STREAMS)
    OWN: tl.constexpr = GROUPS // PARTS
    first_group = (tl.program_id(0) % PARTS) * OWN  # of the values
    token = tl.arange(0, 16)
    VALUE_SCALES: tl.constexpr = 0 if VALUE == "f16" else 1 if VALUE == "fp8" else GROUPS
    for chunk in range(chunk_of(lowest) + tl.program_id(0) // PARTS, end_chunk, tl.num_programs(0) // PARTS):
        for tile in range(0, num_rows, 16):
            row = tile + tl.arange(0, 16)
            query = tl.minimum(row // SIBLINGS, count - 1)
            position = start + query
            head = kv_head * SIBLINGS + row % SIBLINGS
            q_row = ((first + query).to(tl.int64) * (KV_HEADS * SIBLINGS) + head) * HEAD_DIM
            q_row = tl.where(row < num_rows, q_row, -1)
            rows: tl.tuple = ()
            for g in tl.static_range(GROUPS):
                rows += (row_operand(q, q_row, g, HEAD_DIM, ROTATED, DOT, KW),)
            acc: tl.tuple = ()
            for _ in tl.static_range(OWN):
                acc += (tl.zeros([STREAMS, 16, 32], tl.float32),)
            largest = tl.full([STREAMS, 16], -float("inf"), tl.float32)
            total = tl.zeros([STREAMS, 16], tl.float32)
            # blocks in which this tile sees something, from a multiple of STREAMS on: chunks begin at such
            begin = (
                tl.maximum(chunk_start(chunk), start + tile // SIBLINGS - window + 1)
                if WINDOWED
                else chunk_start(chunk)
            )
            end = tl.minimum(chunk_start(chunk + 1), start + tl.minimum((tile + 15) // SIBLINGS, count - 1) + 1)
            for block in range(begin // (32 * STREAMS) * STREAMS, (end + 31) // 32, STREAMS):
                mine = block + stream
                # a table may hold anything beyond the length: such blocks read block 0, and nothing of it counts
                slab = tl.load(table + mine, mask=mine * 32 < end, other=0).to(tl.int64) * KV_HEADS + kv_head
                logits: tl.tuple = ()
                for half in tl.static_range(2):
                    by_key = products(rows, keys, key_high, key_scales, slab, half, GROUPS, KEY, DOT, KW, ASM)
                    key_at = (mine * 32)[:, None, None] + (16 * half + token)[None, None, :]
                    seen = key_at <= position[None, :, None]
                    if WINDOWED:
                        seen = seen & (key_at > position[None, :, None] - window)
                    logits += (tl.where(seen, capped(by_key * (scale * Q_UP), softcap, CAPPED), -float("inf")),)
                new = tl.maximum(largest, tl.max(tl.maximum(logits[0], logits[1]), 2))
                base = tl.where(new == -float("inf"), 0.0, new)
                decay = tl.exp2(largest - base)
                low = tl.exp2(logits[0] - (base - SHIFT)[:, :, None])
                high = tl.exp2(logits[1] - (base - SHIFT)[:, :, None])
                total = total * decay + tl.sum(low + high, 2)
                largest = new
                low_stored = ((mine * 32)[:, None] + token[None, :] < length)[:, None, :]
                high_stored = ((mine * 32 + 16)[:, None] + token[None, :] < length)[:, None, :]
                moved: tl.tuple = ()
                for g in tl.static_range(OWN):
                    low_values, high_values = value_operands(values, slab, first_group + g, GROUPS, VALUE, DOT, KW, ASM)
                    if VALUE_SCALES == 0:
                        low_operand = weights_operand(low, DOT, KW)
                        high_operand = weights_operand(high, DOT, KW)
                        # what is not stored may be anything, and 0 * NaN is NaN
                        low_values = stored_only(low_values, mine * 32, length, KW)
                        high_values = stored_only(high_values, mine * 32 + 16, length, KW)
                    else:
                        scale_group = 0 if VALUE_SCALES == 1 else first_group + g
                        factor = token_scales(value_scales, slab, scale_group, 0, VALUE_SCALES)
                        low_operand = weights_operand(low * tl.where(low_stored, factor, 0.0), DOT, KW)
                        factor = token_scales(value_scales, slab, scale_group, 1, VALUE_SCALES)
                        high_operand = weights_operand(high * tl.where(high_stored, factor, 0.0), DOT, KW)
                    part = acc[g] * decay[:, :, None]
                    part = tl.dot(low_operand, low_values, part, input_precision="ieee")
                    moved += (tl.dot(high_operand, high_values, part, input_precision="ieee"),)
                acc = moved
            # the streams become one
            top = tl.max(largest, 0)
            weight = tl.exp2(largest - tl.where(top == -float("inf"), 0.0, top)[None, :])
            at = ((sequence * KV_HEADS + kv_head).to(tl.int64) * max_chunks + chunk) * max_rows + row
            tl.store(stats + 2 * at, top, mask=row < num_rows)
            tl.store(stats + 2 * at + 1, tl.sum(total * weight, 0), mask=row < num_rows)
            for g in tl.static_range(OWN):
                joined = tl.sum(acc[g] * weight[:, :, None], 0)
                column = 32 * (first_group + g) + tl.arange(0, 32)
                tl.store(sums + at[:, None] * (32 * GROUPS) + column[None, :], joined, mask=(row < num_rows)[:, None])


@triton.jit
def combine_chunks(
    sums,
    stats,
    sinks,
    starts,
    lengths,
    out,
    window,
    max_chunks,
    max_rows,
    KV_HEADS: tl.constexpr,
    SIBLINGS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    ROTATED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Write the rows of `out`. Grid: queries of a sequence, heads, sequences. PADDED: a power of two >= 32 * GROUPS."""
    query = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - first
    position = tl.load(lengths + sequence) - count + query
    lowest = tl.maximum(position - window + 1, 0) if WINDOWED else 0
    begin = chunk_of(lowest)
    num_queries = tl.where(count <= 16, count, 0)
    end = tl.where(query < num_queries, chunk_of(position) + 1, 0)
    row = query * SIBLINGS + head % SIBLINGS
    base = (sequence * KV_HEADS + head // SIBLINGS).to(tl.int64) * max_chunks
    column = tl.arange(0, PADDED)
    some = tl.arange(0, AT_ONCE)
    top = -float("inf")
    if SINKS:
        top = tl.load(sinks + head).to(tl.float32) * LOG2E
    for chunk in range(begin, end, AT_ONCE):
        at = (base + chunk + some) * max_rows + row
        top = tl.maximum(top, tl.max(tl.load(stats + 2 * at, mask=chunk + some < end, other=-float("inf")), 0))
    total = 0.0
    if SINKS:
        total = tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2E - top + SHIFT)
    acc = tl.zeros([PADDED], tl.float32)
    for chunk in range(begin, end, AT_ONCE):
        there = chunk + some < end
        at = (base + chunk + some) * max_rows + row
        factor = tl.exp2(tl.load(stats + 2 * at, mask=there, other=-float("inf")) - top)
        total += tl.sum(factor * tl.load(stats + 2 * at + 1, mask=there, other=0.0), 0)
        inside = there[:, None] & (column < 32 * GROUPS)[None, :]
        part = tl.load(sums + at[:, None] * (32 * GROUPS) + column[None, :], mask=inside, other=0.0)
        acc += tl.sum(part * factor[:, None], 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)  # a program without a row
    if ROTATED:
        turned = tl.sum(tl.reshape(acc, [PADDED // 32, 32, 1]) * signs(tl.arange(0, 32))[None, :, :], 1)
        acc = tl.reshape(turned * ROOT, [PADDED])
    at = ((first + query).to(tl.int64) * (KV_HEADS * SIBLINGS) + head) * HEAD_DIM + column
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=column < tl.where(query < num_queries, HEAD_DIM, 0))
