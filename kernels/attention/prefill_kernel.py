"""Attention in Triton for prompts: tiles of rows, each tile against all that its sequence has stored.

Owns the kernel. Knows nothing of decode and verify, whose rows it skips (decode_kernel.py).

A program takes a tile of rows of one KV head: its query heads times positions. Two blocks of the cache at a time become
16-bit operands, with their scales applied; a tile has so many rows that this conversion costs little. Nothing is
dequantized to memory: such a scratch would be as long as the context. Tokens stay in the order in which a block stores
its values, so only keys are gathered.

A short prompt on a long context (a question about cached text) has few tiles, which would leave most of the GPU idle.
Then each context is split into as many parts as fill the GPU, and `combine_chunks` adds them up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgelm.kernels.attention.decode_kernel import VERIFY_LEN, first_seen
from edgelm.kernels.attention.operands import (
    LOG2E,
    MAX_SEQS,
    Q_DOWN,
    ROOT,
    SHIFT,
    SIZES,
    TABLES,
    finite,
    logits_of,
    not_finite,
    owner_of,
    rows_of,
    signs,
)
from edgelm.kernels.pdl import begin_dependent
from edgelm.kernels.unpack import unpack_bytes, unpack_nibbles


@triton.jit
def token_of(column, NIBBLES: tl.constexpr):
    """Return the token of a block that is in `column` of a value plane (kernels/cache)."""
    jb = column % 2 if NIBBLES else column // 2 % 2
    h = column // 2 % 2 if NIBBLES else column % 2
    return column // 4 % 2 * 16 + jb * 8 + column // 8 * 2 + h


@triton.jit
def key_tile(
    keys,
    key_high,
    scales,
    slabs,
    token,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the keys of some tokens, [TOKENS, 32 * ALL], with dimensions in natural order.

    slabs, token: [TOKENS], the slab of each token and its offset in the block.
    """
    if KEY == "f16":
        column = tl.arange(0, 32 * ALL)
        at = (slabs * (32 * 32 * GROUPS) + token * (32 * GROUPS))[:, None] + column[None, :]
        if ALL == GROUPS:
            return tl.load(keys + at).to(DOT)
        else:
            return tl.load(keys + at, mask=(column < 32 * GROUPS)[None, :], other=0.0).to(DOT)
    else:
        if KEY == "int6":
            unit = tl.arange(0, 4 * ALL)
            group = unit // 4
            lm = unit % 4
            inside = (group < GROUPS)[None, :]
            SPAN: tl.constexpr = 4 if GROUPS % 4 == 0 else 2 if GROUPS % 2 == 0 else 1
            PAIRS: tl.constexpr = (GROUPS + 1) // 2
            WIDE: tl.constexpr = 4 if PAIRS % 4 == 0 else 2 if PAIRS % 2 == 0 else 1
            column = group // SPAN * (4 * SPAN) + lm * SPAN + group % SPAN
            at = (slabs * (32 * 4 * GROUPS) + token * (4 * GROUPS))[:, None] + column[None, :]
            words = tl.load(keys + at, mask=inside, other=0)
            pair = group // 2
            column = pair // WIDE * (4 * WIDE) + lm * WIDE + pair % WIDE
            at = (slabs * (32 * 4 * PAIRS) + token * (4 * PAIRS))[:, None] + column[None, :]
            high = tl.load(key_high + at, mask=inside, other=0) >> (8 * (group % 2))[None, :]
            u = unpack_nibbles(words, high, 6, 32, 0, DOT, ASM)  # [2 * (2 * kk + jb) + h]
            parts = tl.join(
                tl.join(tl.join(u[0], u[4]), tl.join(u[2], u[6])), tl.join(tl.join(u[1], u[5]), tl.join(u[3], u[7]))
            )
        else:
            word = tl.arange(0, 8 * ALL)  # in natural order: group, lm, kk
            group = word // 8
            TWO: tl.constexpr = 2 - GROUPS % 2
            column = group // TWO * (8 * TWO) + word // 2 % 4 * (2 * TWO) + group % TWO * 2 + word % 2
            at = (slabs * (32 * 8 * GROUPS) + token * (8 * GROUPS))[:, None] + column[None, :]
            words = tl.load(keys + at, mask=(group < GROUPS)[None, :], other=0)
            n0, n1, n2, n3 = unpack_bytes(words, "fp8" if KEY == "fp8" else "signed", 0, DOT, ASM)
            parts = tl.join(tl.join(n0, n2), tl.join(n1, n3))
        codes = tl.reshape(parts, [TOKENS, ALL, 32])
        return scaled(codes, scales, slabs, token, GROUPS, ALL, TOKENS, KEY == "fp8", DOT)


@triton.jit
def scaled(
    codes,
    scales,
    slabs,
    token,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
    TOKENS: tl.constexpr,
    ONE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Return codes [TOKENS, ALL, 32] times their scales, as [TOKENS, 32 * ALL]. ONE: there is one scale per head."""
    group = tl.arange(0, ALL)
    at = (slabs * (32 if ONE else 32 * GROUPS) + token)[:, None] + (group * (0 if ONE else 32))[None, :]
    factor = tl.load(scales + at, mask=(group < GROUPS)[None, :], other=0.0).to(tl.float32)
    return tl.reshape((codes.to(tl.float32) * factor[:, :, None]).to(DOT), [TOKENS, 32 * ALL])


@triton.jit
def value_tile(
    values,
    scales,
    slabs,
    token,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
    TOKENS: tl.constexpr,
    VALUE: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the values of some blocks, [32 * ALL, TOKENS], with tokens in the order of a block."""
    BLOCKS: tl.constexpr = TOKENS // 32
    slab = tl.max(tl.reshape(slabs, [BLOCKS, 32]), 1)  # equal within a block
    dim = tl.arange(0, 32 * ALL)
    if VALUE == "f16":
        at = slab[None, :, None] * (32 * 32 * GROUPS) + dim[:, None, None] * 32 + tl.arange(0, 32)[None, None, :]
        codes = tl.load(values + at, mask=(dim < 32 * GROUPS)[:, None, None], other=0.0)
        return tl.reshape(codes, [32 * ALL, TOKENS]).to(DOT)
    else:
        if VALUE == "int4":
            line = tl.arange(0, 16 * ALL)  # i, l4
            at = slab[None, :, None] * (32 * 4 * GROUPS) + line[:, None, None] * 8 + tl.arange(0, 8)[None, None, :]
            words = tl.load(values + at, mask=(line < 16 * GROUPS)[:, None, None], other=0)
            u = unpack_nibbles(words, words, 4, 8, 0, DOT, ASM)  # [2 * (2 * jb + rb) + h]
            parts = tl.join(
                tl.join(tl.join(u[0], u[2]), tl.join(u[1], u[3])), tl.join(tl.join(u[4], u[6]), tl.join(u[5], u[7]))
            )  # [.., rb, h, jb]
            parts = tl.reshape(parts, [2 * ALL, 8, BLOCKS, 8, 2, 2, 2])
            parts = tl.permute(parts, [0, 4, 1, 2, 3, 5, 6])
        else:
            at = slab[None, :, None] * (32 * 8 * GROUPS) + dim[:, None, None] * 8 + tl.arange(0, 8)[None, None, :]
            words = tl.load(values + at, mask=(dim < 32 * GROUPS)[:, None, None], other=0)
            n0, n1, n2, n3 = unpack_bytes(words, "fp8" if VALUE == "fp8" else "signed", 0, DOT, ASM)
            parts = tl.join(tl.join(n0, n2), tl.join(n1, n3))
        codes = tl.reshape(parts, [ALL, 32, TOKENS])
        group = tl.arange(0, ALL)
        ONE: tl.constexpr = VALUE == "fp8"
        at = (group * (0 if ONE else 32))[:, None] + (slabs * (32 if ONE else 32 * GROUPS) + token)[None, :]
        factor = tl.load(scales + at, mask=(group < GROUPS)[:, None], other=0.0).to(tl.float32)
        return tl.reshape((codes.to(tl.float32) * factor[:, None, :]).to(DOT), [32 * ALL, TOKENS])


@triton.jit
def turn(rows, ROWS: tl.constexpr, ALL: tl.constexpr):
    """Rotate each group of 32 of some rows, [ROWS, 32 * ALL], by the Hadamard matrix; returns float32."""
    flat = tl.reshape(rows, [ROWS * ALL, 32])
    turned = tl.dot(flat, signs(tl.arange(0, 32)).to(flat.dtype), input_precision="ieee") * ROOT
    return tl.reshape(turned, [ROWS, 32 * ALL])


@triton.jit
def attend_tokens(
    state,
    operand,
    position,
    begin,
    end,
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
    ALL: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    EDGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the state after TOKENS more positions, from `begin` on.

    The state: sums [ROWS, 32 * ALL], the largest logit [ROWS], the sum of weights [ROWS]. EDGE: some rows do not see
    all positions, and what they do not see may hold anything.
    """
    acc, largest, total = state
    i = tl.arange(0, TOKENS)
    token = token_of(i % 32, VALUE == "int4")
    mine = begin // 32 + i // 32
    slabs = tl.load(block_table + mine, mask=mine * 32 < end, other=0).to(tl.int64) * KV_HEADS + kv_head
    key = key_tile(keys, key_high, key_scales, slabs, token, GROUPS, ALL, TOKENS, KEY, DOT, ASM)
    logits = logits_of(tl.dot(operand, tl.trans(key), input_precision="ieee"), scale, softcap, CAPPED)
    if EDGE:
        key_at = mine * 32 + token
        seen = key_at[None, :] <= position[:, None]
        if WINDOWED:
            seen = seen & (key_at[None, :] > position[:, None] - window)
        logits = tl.where(seen, logits, -float("inf"))
    new = tl.maximum(largest, tl.max(logits, 1))
    base = tl.where(new == -float("inf"), 0.0, new)
    decay = tl.exp2(largest - base)
    weights = tl.exp2(logits - (base - SHIFT)[:, None])
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    value = value_tile(values, value_scales, slabs, token, GROUPS, ALL, TOKENS, VALUE, DOT, ASM)
    if EDGE:  # 0 * NaN is NaN: one dot has only finite values, the other counts the NaN and inf that a row sees
        bad = tl.dot(seen.to(DOT), tl.trans(not_finite(value)), input_precision="ieee")
        acc = tl.where(bad > 0.0, float("nan"), acc)
        value = finite(value)
    acc = tl.dot(weights.to(DOT), tl.trans(value), acc, input_precision="ieee")
    return acc, new, total


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=TABLES)
def attend_tiles(
    q,
    keys,
    key_high,
    values,
    key_scales,
    value_scales,
    sinks,
    block_tables,
    query_start_loc,
    seq_lens,
    out,
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
    ALL: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    ROTATED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """Write rows of prompts to `out`, or with SPLIT the sums and stats of equal parts of their contexts.

    The arguments are those of `attend_chunks`, with parts instead of chunks. Grid: tiles of ROWS rows, at least as many
    as exist; KV heads; parts. ALL: GROUPS, rounded up to a power of two.
    """
    begin_dependent(launch_pdl)
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    index = tl.arange(0, MAX_SEQS)
    _firsts, _begins, many = rows_of(
        query_start_loc, seq_lens, index, num_seqs, num_tokens, block_table_len, max_query_len
    )
    many = tl.where(many > VERIFY_LEN, many, 0)
    ends = tl.cumsum((many * QUERIES_PER_KV + ROWS - 1) // ROWS, 0)
    if item < tl.max(ends, 0):
        sequence, before = owner_of(item, ends)
        slot = tl.sum(tl.where(index < sequence, many, 0), 0)  # rows of the sequences before it
        first, start, count = rows_of(
            query_start_loc, seq_lens, sequence, num_seqs, num_tokens, block_table_len, max_query_len
        )
        # the last tiles see the most, so they go first
        tile = ((count * QUERIES_PER_KV + ROWS - 1) // ROWS - 1 - (item - before)) * ROWS
        row = tile + tl.arange(0, ROWS)
        query = tl.minimum(row // QUERIES_PER_KV, count - 1)
        inside = row < count * QUERIES_PER_KV
        position = start + query
        head = kv_head * QUERIES_PER_KV + row % QUERIES_PER_KV
        column = tl.arange(0, 32 * ALL)
        at = ((first + query).to(tl.int64) * (KV_HEADS * QUERIES_PER_KV) + head) * HEAD_DIM
        there = inside[:, None] & (column < HEAD_DIM)[None, :]
        rows = tl.load(q + at[:, None] + column[None, :], mask=there, other=0.0)
        operand = (rows.to(tl.float32) * Q_DOWN).to(DOT)
        if ROTATED:
            operand = turn(operand, ROWS, ALL).to(DOT)
        state = (
            tl.zeros([ROWS, 32 * ALL], tl.float32),
            tl.full([ROWS], -float("inf"), tl.float32),
            tl.zeros([ROWS], tl.float32),
        )
        block_table = block_tables + sequence.to(tl.int64) * block_table_len
        # positions that this tile sees, TOKENS at a time: an edge, those that all of its rows see, and another edge
        lowest = start + tile // QUERIES_PER_KV
        highest = start + tl.minimum((tile + ROWS - 1) // QUERIES_PER_KV, count - 1)
        end = highest + 1
        begin = first_seen(lowest, window, WINDOWED) // TOKENS
        stop = (end + TOKENS - 1) // TOKENS
        if SPLIT:
            part_len = (stop - begin + tl.num_programs(2) - 1) // tl.num_programs(2)
            begin = begin + split * part_len
            stop = tl.minimum(stop, begin + part_len)
        inner = tl.maximum((first_seen(highest, window, WINDOWED) + TOKENS - 1) // TOKENS, begin)
        outer = tl.maximum(tl.minimum((lowest + 1) // TOKENS, stop), tl.minimum(inner, stop))
        bounds = (begin, tl.minimum(inner, stop), outer, stop)
        for phase in tl.static_range(0 if WINDOWED else 1, 3):
            for unit in range(bounds[phase], bounds[phase + 1]):
                state = attend_tokens(
                    state,
                    operand,
                    position,
                    unit * TOKENS,
                    end,
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
                    ALL,
                    TOKENS,
                    KEY,
                    VALUE,
                    phase != 1,
                    WINDOWED,
                    CAPPED,
                    DOT,
                    ASM,
                )
        acc, largest, total = state
        if SPLIT:
            kept = inside & (slot * QUERIES_PER_KV + row < max_rows)
            part = (split * KV_HEADS + kv_head).to(tl.int64) * max_rows + slot * QUERIES_PER_KV + row
            tl.store(stats + 2 * part, largest, mask=kept)
            tl.store(stats + 2 * part + 1, total, mask=kept)
            stored = kept[:, None] & (column < 32 * GROUPS)[None, :]
            tl.store(sums + part[:, None] * (32 * GROUPS) + column[None, :], acc, mask=stored)
        else:
            if SINKS:
                sink = tl.load(sinks + head).to(tl.float32) * LOG2E
                new = tl.maximum(largest, sink)
                decay = tl.exp2(largest - new)
                total = total * decay + tl.exp2(sink - new + SHIFT)
                acc = acc * decay[:, None]
            acc = acc / total[:, None]
            if ROTATED:
                acc = turn(acc, ROWS, ALL)
            tl.store(out + at[:, None] + column[None, :], acc.to(out.dtype.element_ty), mask=there)
