"""Attention in Triton for decode and verify: few rows per sequence. One kernel over chunks of contexts, one over rows.

Owns how a context is split, the two kernels, and their scratch. Knows nothing of prompts (prefill_kernel.py), but
`combine_chunks` adds up the parts of their contexts too.

`attend_chunks`: a program takes one KV head and some chunks of sequences, and all rows that attend to it: the query
heads of that KV head times the positions of a draft, 16 at a time. Each of its four warps takes every fourth block, as
the batch dimension of a 3-D dot, so no warp needs the results of another before the chunk's end. Codes go from memory
to the tensor cores through registers only: the cache has them in the order in which a lane multiplies them. Scales are
not applied to the codes: key scales multiply the logits of their group of dimensions, value scales the weights.
`combine_chunks`: a program per row adds up the chunks and the sink, and undoes the rotation.

The result of a row depends only on its own position and on what it sees. Chunks begin at fixed positions and are added
in a fixed order; the number of programs that share them makes no difference; a masked position adds exact zeros,
whatever it holds. Masks cost time, so only spans that some row does not see in full have them (EDGE): where a window
begins, and at the end. The loop between does the same arithmetic without masks; the compiler must not fuse operations
in only one of the two (enable_fp_fusion=False).
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgelm.kernels.attention.operands import (
    LOG2E,
    MAX_SEQS,
    ROOT,
    SHIFT,
    SIZES,
    TABLES,
    WARPS,
    finite,
    logits_of,
    not_finite,
    owner_of,
    part_rows,
    products,
    row_operand,
    row_part,
    rows_of,
    signs,
    token_scales,
    value_operands,
    warps_added,
    weights_operand,
)
from edgelm.kernels.pdl import begin_dependent

VERIFY_LEN = tl.constexpr(16)  # a sequence with more rows is a prompt
MANY_ROWS = tl.constexpr(1024)  # more than the rows of all sequences of a launch
SPAN = tl.constexpr(128)  # positions that a program reads at a time: one block per warp


# -- how a context is split --------------------------------------------------------------------------------------------


@triton.jit
def chunk_start(chunk):
    """Return the first position of a chunk: 64 chunks have 256 positions, the next 64 have 512, and so on."""
    octave = chunk >> 6
    return ((1 << octave) - 1) * 16384 + ((chunk & 63) << (octave + 8))


@triton.jit
def chunk_of(position):
    """Return the chunk of a position."""
    # the exponent of this float32 is the number of the octave; octaves have 16,384 positions, 32,768, and so on
    octave = (((position >> 14) + 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return (octave << 6) + ((position - ((1 << octave) - 1) * 16384) >> (octave + 8))


@triton.jit
def first_seen(position, window, WINDOWED: tl.constexpr):
    """Return the first position that `position` sees."""
    return tl.maximum(position - window + 1, 0) if WINDOWED else position * 0


# -- the kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def seen_of(logits):
    """Return 1.0 for seen positions, 0.0 for masked ones; in the layout of the logits, so no lane sends to another."""
    return tl.where(logits == -float("inf"), 0.0, 1.0)


@triton.jit
def blocks_of(block_table, block, end):
    """Return the blocks of a span, one for each warp; beyond the length the table may hold anything: block 0 there."""
    mine = block + tl.arange(0, WARPS)
    return tl.load(block_table + mine, mask=mine * 32 < end, other=0)


@triton.jit
def attend_span(
    state,
    rows,
    position,
    block,
    end,
    first_group,
    block_table,
    kv_head,
    keys,
    key_high,
    values,
    key_scales,
    value_scales,
    scale,
    softcap,
    window,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    OWN: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    EDGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    DOT: tl.constexpr,
    KW: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the state after SPAN more positions, from block `block` on.

    The state: sums, a tuple of OWN tensors [warps, 16 rows, 32]; the largest logit and the sum of weights, both
    [warps, 16]; the blocks of the span. EDGE: some rows do not see all positions, and what they do not see may hold
    anything.
    """
    acc, largest, total, blocks = state
    mine = block + tl.arange(0, WARPS)
    slab = blocks.to(tl.int64) * KV_HEADS + kv_head
    blocks = blocks_of(block_table, block + WARPS, end)  # of the next span: what it reads must not wait for them
    logits: tl.tuple = ()
    for half in tl.static_range(2):
        by_key = products(rows, keys, key_high, key_scales, slab, half, GROUPS, KEY, DOT, KW, ASM)
        by_key = logits_of(by_key, scale, softcap, CAPPED)
        if EDGE:
            key_at = (mine * 32)[:, None, None] + (16 * half + tl.arange(0, 16))[None, None, :]
            seen = key_at <= position[None, :, None]
            if WINDOWED:
                seen = seen & (key_at > position[None, :, None] - window)
            logits += (tl.where(seen, by_key, -float("inf")),)
        else:
            logits += (by_key,)
    new = tl.maximum(largest, tl.max(tl.maximum(logits[0], logits[1]), 2))
    base = tl.where(new == -float("inf"), 0.0, new)
    decay = tl.exp2(largest - base)
    low = tl.exp2(logits[0] - (base - SHIFT)[:, :, None])
    high = tl.exp2(logits[1] - (base - SHIFT)[:, :, None])
    total = tl.fma(total, decay, tl.sum(low + high, 2))
    VALUE_SCALES: tl.constexpr = 0 if VALUE == "f16" else 1 if VALUE == "fp8" else GROUPS
    NAN_AWARE: tl.constexpr = EDGE and VALUE_SCALES == 0
    if NAN_AWARE:
        low_bad = tl.zeros([WARPS, 16, 32], DOT)
        high_bad = tl.zeros([WARPS, 16, 32], DOT)
    moved: tl.tuple = ()
    for g in tl.static_range(OWN):
        low_values, high_values = value_operands(values, slab, first_group + g, GROUPS, VALUE, DOT, KW, ASM)
        part = acc[g] * decay[:, :, None]
        if VALUE_SCALES == 0:
            if EDGE:  # 0 * NaN is NaN
                low_bad = tl.fma(low_values, tl.zeros_like(low_values), low_bad)
                high_bad = tl.fma(high_values, tl.zeros_like(high_values), high_bad)
                low_values = finite(low_values)
                high_values = finite(high_values)
            low_weights, high_weights = low, high
        else:
            scale_group = 0 if VALUE_SCALES == 1 else first_group + g
            low_weights = low * token_scales(value_scales, slab, scale_group, 0, VALUE_SCALES)
            high_weights = high * token_scales(value_scales, slab, scale_group, 1, VALUE_SCALES)
            if EDGE:
                low_weights = tl.where(logits[0] == -float("inf"), 0.0, low_weights)
                high_weights = tl.where(logits[1] == -float("inf"), 0.0, high_weights)
        part = tl.dot(weights_operand(low_weights, DOT, KW), low_values, part, input_precision="ieee")
        moved += (tl.dot(weights_operand(high_weights, DOT, KW), high_values, part, input_precision="ieee"),)
    if NAN_AWARE:
        bad = tl.dot(weights_operand(seen_of(logits[0]), DOT, KW), not_finite(low_bad), input_precision="ieee")
        bad = tl.dot(weights_operand(seen_of(logits[1]), DOT, KW), not_finite(high_bad), bad, input_precision="ieee")
        poisoned_row = (tl.max(bad, 2) > 0.0)[:, :, None]
        poisoned: tl.tuple = ()
        for g in tl.static_range(OWN):
            poisoned += (tl.where(poisoned_row, float("nan"), moved[g]),)
        moved = poisoned
    return moved, new, total, blocks


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=TABLES)
def attend_chunks(
    q,
    keys,
    key_high,
    values,
    key_scales,
    value_scales,
    block_tables,
    query_start_loc,
    seq_lens,
    sums,
    stats,
    scale,
    softcap,
    window,
    num_tokens,
    num_seqs,
    block_table_len,
    max_query_len,
    max_rows,
    KV_HEADS: tl.constexpr,
    QUERIES_PER_KV: tl.constexpr,
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
    launch_pdl: tl.constexpr = False,
):
    """Write for each chunk and row: sums [width] of weights times values; stats: largest logit, sum of weights.

    sums: float32 [chunks, KV_HEADS, max_rows, width]. stats: float32 [chunks, KV_HEADS, max_rows, 2]. The planes of the
    cache are those of kernels/cache, codes as int32 words. Grid: KV heads; programs that share the chunks times PARTS.
    So the programs that begin first have the longest chunks of all heads.
    The accumulators of long heads do not fit the registers: PARTS programs compute the same weights, and each takes its
    own dimensions of the values.
    """
    begin_dependent(launch_pdl)
    kv_head = tl.program_id(0)
    program = tl.program_id(1) // PARTS
    programs = tl.num_programs(1) // PARTS
    OWN: tl.constexpr = GROUPS // PARTS
    TOGETHER: tl.constexpr = 4 if OWN % 4 == 0 else 2 if OWN % 2 == 0 else 1  # groups that warps exchange at a time
    first_group = (tl.program_id(1) % PARTS) * OWN  # of the values
    index = tl.arange(0, MAX_SEQS)
    _firsts, begins, few = rows_of(
        query_start_loc, seq_lens, index, num_seqs, num_tokens, block_table_len, max_query_len
    )
    few = tl.where(few <= VERIFY_LEN, few, 0)  # longer ones are prompts, for the other kernel
    last = chunk_of(tl.maximum(begins + few - 1, 0))
    chunks_of = tl.where(few > 0, last - chunk_of(first_seen(begins, window, WINDOWED)) + 1, 0)
    ends = tl.cumsum(chunks_of * MANY_ROWS + few, 0)  # chunks and rows, of each sequence and of all before it
    chunks = tl.max(ends, 0) // MANY_ROWS
    tiles = (tl.minimum(max_query_len, VERIFY_LEN) * QUERIES_PER_KV + 15) // 16  # of a chunk, at most
    half_share = (tiles > 1) & (programs >= 2 * chunks)
    quarter_share = (tiles > 2) & (programs >= 4 * chunks)
    shift = half_share.to(tl.int32) + quarter_share.to(tl.int32)  # 1, 2 or 4 programs share a chunk
    item = program
    ahead = 2 * (programs - program) - 1
    while item < chunks << shift:
        place = item >> shift
        sequence, before = owner_of(place * MANY_ROWS + MANY_ROWS - 1, ends)
        slot = before % MANY_ROWS  # rows of the sequences before it
        first, start, count = rows_of(
            query_start_loc, seq_lens, sequence, num_seqs, num_tokens, block_table_len, max_query_len
        )
        # the last chunks are the longest, so they go first
        chunk = chunk_of(start + count - 1) - (place - before // MANY_ROWS)
        block_table = block_tables + sequence.to(tl.int64) * block_table_len
        for tile in range((item - (place << shift)) * 16, count * QUERIES_PER_KV, 16 << shift):
            row = tile + tl.arange(0, 16)
            position = start + tl.minimum(row // QUERIES_PER_KV, count - 1)
            line = tile + part_rows(ROTATED)
            query = tl.minimum(line // QUERIES_PER_KV, count - 1)
            head = kv_head * QUERIES_PER_KV + line % QUERIES_PER_KV
            q_row = ((first + query).to(tl.int64) * (KV_HEADS * QUERIES_PER_KV) + head) * HEAD_DIM
            parts: tl.tuple = ()
            for g in tl.static_range(GROUPS):  # all loads before the first one is used
                parts += (row_part(q, q_row, line < count * QUERIES_PER_KV, g, HEAD_DIM),)
            # spans that this tile sees: an edge, the spans that all of its rows see, and another edge
            lowest = start + tile // QUERIES_PER_KV
            highest = start + tl.minimum((tile + 15) // QUERIES_PER_KV, count - 1)
            end = tl.minimum(chunk_start(chunk + 1), highest + 1)
            begin = tl.maximum(chunk_start(chunk), first_seen(lowest, window, WINDOWED)) // SPAN
            stop = tl.maximum((end + SPAN - 1) // SPAN, begin)
            inner = tl.minimum(tl.maximum((first_seen(highest, window, WINDOWED) + SPAN - 1) // SPAN, begin), stop)
            outer = tl.maximum(tl.minimum((lowest + 1) // SPAN, stop), inner)
            bounds = (begin, inner, outer, stop)
            blocks = blocks_of(block_table, begin * WARPS, end)
            rows: tl.tuple = ()
            for g in tl.static_range(GROUPS):
                rows += (row_operand(parts[g], ROTATED, DOT, KW),)
            sums_of: tl.tuple = ()
            for _group in tl.static_range(OWN):
                sums_of += (tl.zeros([WARPS, 16, 32], tl.float32),)
            nothing = tl.full([WARPS, 16], -float("inf"), tl.float32)
            state = (sums_of, nothing, tl.zeros([WARPS, 16], tl.float32), blocks)
            for phase in tl.static_range(0 if WINDOWED else 1, 3):
                for span in range(bounds[phase], bounds[phase + 1]):
                    state = attend_span(
                        state,
                        rows,
                        position,
                        span * WARPS,
                        end,
                        first_group,
                        block_table,
                        kv_head,
                        keys,
                        key_high,
                        values,
                        key_scales,
                        value_scales,
                        scale,
                        softcap,
                        window,
                        KV_HEADS,
                        GROUPS,
                        OWN,
                        KEY,
                        VALUE,
                        phase != 1,
                        WINDOWED,
                        CAPPED,
                        DOT,
                        KW,
                        ASM,
                    )
            acc, largest, total, _blocks = state
            # merge the warps
            top = tl.max(largest, 0)
            weight = tl.exp2(largest - tl.where(top == -float("inf"), 0.0, top)[None, :])
            there = (row < count * QUERIES_PER_KV) & (slot * QUERIES_PER_KV + row < max_rows)
            at = (chunk * KV_HEADS + kv_head).to(tl.int64) * max_rows + slot * QUERIES_PER_KV + row
            tl.store(stats + 2 * at, top, mask=there)
            tl.store(stats + 2 * at + 1, tl.sum(total * weight, 0), mask=there)
            for g in tl.static_range(0, OWN, TOGETHER):
                joined = warps_added(acc, weight, g, TOGETHER)
                column = 32 * (first_group + g) + tl.arange(0, 32 * TOGETHER)
                tl.store(sums + at[:, None] * (32 * GROUPS) + column[None, :], joined, mask=there[:, None])
        item += ahead  # turns go back and forth: a program that had the longest chunk gets the shortest one next
        ahead = 2 * programs - ahead


@triton.jit(do_not_specialize=(*SIZES, "splits"), do_not_specialize_on_alignment=TABLES)
def combine_chunks(
    sums,
    stats,
    sinks,
    query_start_loc,
    seq_lens,
    out,
    window,
    num_tokens,
    num_seqs,
    block_table_len,
    max_query_len,
    max_rows,
    splits,
    KV_HEADS: tl.constexpr,
    QUERIES_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    PROMPTS: tl.constexpr,
    ROTATED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """Write rows of `out`, [tokens, num_heads, HEAD_DIM]. Grid: rows, at least as many as exist; query heads; GROUPS.

    A program writes 32 columns. PROMPTS: the rows of prompts, which all have `splits` parts.
    """
    begin_dependent(launch_pdl)
    slot = tl.program_id(0)
    head = tl.program_id(1)
    index = tl.arange(0, MAX_SEQS)
    _firsts, _begins, rows = rows_of(
        query_start_loc, seq_lens, index, num_seqs, num_tokens, block_table_len, max_query_len
    )
    ends = tl.cumsum(tl.where((rows > VERIFY_LEN) == PROMPTS, rows, 0), 0)
    if slot < tl.max(ends, 0):
        sequence, before = owner_of(slot, ends)
        first, start, _count = rows_of(
            query_start_loc, seq_lens, sequence, num_seqs, num_tokens, block_table_len, max_query_len
        )
        query = slot - before
        if PROMPTS:
            begin = 0
            end = splits
        else:
            begin = chunk_of(first_seen(start + query, window, WINDOWED))
            end = chunk_of(start + query) + 1
        row = slot * QUERIES_PER_KV + head % QUERIES_PER_KV
        column = tl.program_id(2) * 32 + tl.arange(0, 32)
        some = tl.arange(0, AT_ONCE)
        top, total = -float("inf"), 0.0
        if SINKS:
            top, total = tl.load(sinks + head).to(tl.float32) * LOG2E, 2.0**SHIFT
        acc = tl.zeros([32], tl.float32)
        for chunk in range(begin, end, AT_ONCE):
            there = chunk + some < end
            at = ((chunk + some) * KV_HEADS + head // QUERIES_PER_KV).to(tl.int64) * max_rows + row
            largest = tl.load(stats + 2 * at, mask=there, other=-float("inf"))
            weight = tl.load(stats + 2 * at + 1, mask=there, other=0.0)
            part = tl.load(sums + at[:, None] * (32 * GROUPS) + column[None, :], mask=there[:, None], other=0.0)
            new = tl.maximum(top, tl.max(largest, 0))
            base = tl.where(new == -float("inf"), 0.0, new)
            factor = tl.exp2(largest - base)
            decay = tl.exp2(top - base)
            total = total * decay + tl.sum(factor * weight, 0)
            acc = acc * decay + tl.sum(part * factor[:, None], 0)
            top = new
        acc = acc / total
        if ROTATED:
            acc = tl.sum(acc[:, None] * signs(tl.arange(0, 32)), 0) * ROOT
        at = ((first + query).to(tl.int64) * (KV_HEADS * QUERIES_PER_KV) + head) * HEAD_DIM + column
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=column < HEAD_DIM)
