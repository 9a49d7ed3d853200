"""Device code that the attention kernels share: which rows to work on, and operands of dots from q and the cache.

Owns the reader's side of the layout of kernels/cache: each of four warps holds one block of 32 positions; the warps are
the batch dimension of a 3-D dot. Operands pass through registers only. Knows nothing of softmax, masks, or how a
context is split into work.

Work items (chunks of a context, tiles of rows, rows) of all sequences are numbered in one line. So every program finds
work where there is some, and a launch for absent sequences or rows (a CUDA graph has room for the maximum) has no more
idle programs than a smaller one.

A dot may contract over its dimensions (or, for values, its tokens) in any order, if both operands have the same order:
KW is the order that the compiler wants (kernels/gpu_target.py). Dimensions have the names of the layout: l4, lm, kk,
jb, h. A "slab" is the part of a block that belongs to one KV head: block * KV_HEADS + kv_head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgelm.kernels.unpack import unpack_bytes, unpack_nibbles

# integers of a launch that differ from step to step: a kernel must not be recompiled for some of their values
SIZES = ("window", "num_tokens", "num_seqs", "block_table_len", "max_query_len", "max_rows")
# tensors of which a launch may take a part, for some sequences only: an element of them is read at a time
TABLES = ("block_tables", "query_start_loc", "seq_lens")
MAX_SEQS = tl.constexpr(32)  # sequences of a launch: one per lane of a warp, so that sums over them are shuffles
WARPS = tl.constexpr(4)  # of a program; each has one block in flight
ROOT = tl.constexpr(0.17677669529663687)  # 32 ** -0.5
LOG2E = tl.constexpr(1.4426950408889634)
Q_DOWN = tl.constexpr(2.0**-6)  # float16 then holds any q up to 4 million, and loses what is below 2**-19
Q_UP = tl.constexpr(2.0**6)  # undoes Q_DOWN; both are powers of two, and exact
SHIFT = tl.constexpr(4.0)  # weights are scaled by 2 ** SHIFT, so that more small ones are normal numbers in float16


# -- rows of a program -------------------------------------------------------------------------------------------------


@triton.jit
def rows_of(query_start_loc, seq_lens, sequence, num_seqs, num_tokens, block_table_len, max_query_len):
    """Return the first row of a sequence (or of several), its position, and the number of rows to work on.

    A row counts only if the launch has room for it, for any values in query_start_loc and seq_lens: at most
    `max_query_len` rows, within q and the block table. A sequence with fewer positions than rows has none.
    """
    there = sequence < num_seqs
    first = tl.load(query_start_loc + sequence, mask=there, other=0)
    count = tl.load(query_start_loc + sequence + 1, mask=there, other=0) - first
    start = tl.load(seq_lens + sequence, mask=there, other=0) - count
    rows = tl.minimum(tl.minimum(count, max_query_len), tl.minimum(num_tokens - first, block_table_len * 32 - start))
    return first, start, tl.where((start < 0) | (first < 0), 0, tl.maximum(rows, 0))


@triton.jit
def owner_of(item, ends):
    """Return the sequence of a work item, and the number of items of the sequences before it.

    ends: [MAX_SEQS], the number of items of each sequence and of all before it, below 2 ** 26. The item has an owner.
    """
    before = tl.arange(0, MAX_SEQS) + 1  # sequences that do not own it, if the last of these ends before it
    found = tl.max(tl.where(ends <= item, ends * MAX_SEQS + before, 0), 0)  # both at once: it takes five shuffles
    return found % MAX_SEQS, found // MAX_SEQS


# -- operands ----------------------------------------------------------------------------------------------------------


@triton.jit
def dimension(KW: tl.constexpr):
    """Return the dimension (0..31) at each index of a contraction: [32]; for values, tokens instead, in halves."""
    k = tl.arange(0, 32)
    if KW == 2:  # k is [kk, jb, lm, h]
        return (k // 2 % 4) * 8 + (k // 16) * 4 + (k // 8 % 2) * 2 + k % 2
    else:  # k is [kk, lm, jb, h]
        return (k // 4 % 4) * 8 + (k // 16) * 4 + k % 4


@triton.jit
def tile_lines(per_warp, REPEAT: tl.constexpr):
    """Return the row of each line of a tile [REPEAT, warps, 8 lines], and the entry of `per_warp` for its warp.

    A load gives each warp 8 lines at a time, so in this order all lines of a block are in one warp.
    """
    i = tl.arange(0, REPEAT * WARPS * 8)
    wide = tl.broadcast_to(per_warp[None, :, None], [REPEAT, WARPS, 8])
    return i // (WARPS * 8) * 8 + i % 8, tl.reshape(wide, [REPEAT * WARPS * 8])


@triton.jit
def unzip(x, N: tl.constexpr):
    """Return the N = 1, 2 or 4 tensors along the last dimension; for N = 4, x is [2, warps, 8, 4, 4]."""
    if N == 1:
        return (tl.reshape(x, x.shape[:-1]),)
    elif N == 2:
        return tl.split(x)
    else:
        even, odd = tl.split(tl.reshape(x, [2, WARPS, 8, 4, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth


@triton.jit
def key_operand(parts, KW: tl.constexpr):
    """Return [tokens / 8, warps, 8, lm, kk, jb, h] as the operand [warps, 32 dimensions, 16 tokens]."""
    parts = tl.permute(parts, [1, 4, 5, 3, 6, 0, 2] if KW == 2 else [1, 4, 3, 5, 6, 0, 2])
    return tl.reshape(parts, [WARPS, 32, 16])


@triton.jit
def join_bytes(n0, n1, n2, n3):
    """Return four tensors joined along two new last dimensions, [jb, h]."""
    return tl.join(tl.join(n0, n2), tl.join(n1, n3))


@triton.jit
def key_operands(
    keys,
    key_high,
    slab,
    FIRST: tl.constexpr,
    SPAN: tl.constexpr,
    HALF: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY: tl.constexpr,
    DOT: tl.constexpr,
    KW: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return operands [warps, 32, 16] of SPAN groups from FIRST on, for one half (16 tokens) of each warp's block."""
    token, slabs = tile_lines(slab, 2)
    token += 16 * HALF
    if KEY == "f16":
        column = 32 * FIRST + tl.max_contiguous(tl.arange(0, 32), 8)
        x = tl.load(keys + (slabs * (32 * 32 * GROUPS) + token * (32 * GROUPS))[:, None] + column[None, :])
        return (key_operand(tl.reshape(x.to(DOT), [2, WARPS, 8, 4, 2, 2, 2]), KW),)
    elif KEY == "int6":
        column = 4 * FIRST + tl.max_contiguous(tl.arange(0, 4 * SPAN), SPAN)
        words = tl.load(keys + (slabs * (32 * 4 * GROUPS) + token * (4 * GROUPS))[:, None] + column[None, :])
        words = unzip(tl.reshape(words, [2, WARPS, 8, 4, SPAN]), SPAN)
        PAIRS: tl.constexpr = (GROUPS + 1) // 2
        TOPS: tl.constexpr = (SPAN + 1) // 2  # pairs that hold these groups
        ALL: tl.constexpr = 4 if PAIRS % 4 == 0 else 2 if PAIRS % 2 == 0 else 1  # adjacent pairs in memory
        pair = (FIRST // 2) // ALL * (4 * ALL) + (FIRST // 2) % ALL
        top = tl.arange(0, 4 * TOPS)
        column = tl.max_contiguous(pair + top // TOPS * ALL + top % TOPS, TOPS)
        high = tl.load(key_high + (slabs * (32 * 4 * PAIRS) + token * (4 * PAIRS))[:, None] + column[None, :])
        high = unzip(tl.reshape(high, [2, WARPS, 8, 4, TOPS]), TOPS)
        out: tl.tuple = ()
        for i in tl.static_range(SPAN):
            bits = high[i // 2] >> (8 * ((FIRST + i) % 2))
            u = unpack_nibbles(words[i], bits, 6, 32, 0, DOT, ASM)  # [2 * (2 * kk + jb) + h]
            parts = tl.join(
                tl.join(tl.join(u[0], u[4]), tl.join(u[2], u[6])), tl.join(tl.join(u[1], u[5]), tl.join(u[3], u[7]))
            )
            out += (key_operand(parts, KW),)
        return out
    else:
        column = 8 * FIRST + tl.max_contiguous(tl.arange(0, 8 * SPAN), 2 * SPAN)
        words = tl.load(keys + (slabs * (32 * 8 * GROUPS) + token * (8 * GROUPS))[:, None] + column[None, :])
        n0, n1, n2, n3 = unpack_bytes(words, "fp8" if KEY == "fp8" else "signed", 0, DOT, ASM)
        parts = tl.reshape(join_bytes(n0, n1, n2, n3), [2, WARPS, 8, 4, SPAN, 2, 2, 2])
        parts = unzip(tl.permute(parts, [0, 1, 2, 3, 5, 6, 7, 4]), SPAN)
        operands: tl.tuple = ()
        for i in tl.static_range(SPAN):
            operands += (key_operand(parts[i], KW),)
        return operands


@triton.jit
def value_operands(
    values,
    slab,
    group,
    GROUPS: tl.constexpr,
    VALUE: tl.constexpr,
    DOT: tl.constexpr,
    KW: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return two operands [warps, 16 tokens, 32 dimensions of a group], one for each half of a block."""
    if VALUE == "int4":
        line, slabs = tile_lines(slab, 2)
        column = tl.max_contiguous(tl.arange(0, 8), 2)
        words = tl.load(values + (slabs * (32 * 4 * GROUPS) + (line + 16 * group) * 8)[:, None] + column[None, :])
        u = unpack_nibbles(words, words, 4, 8, 0, DOT, ASM)  # [2 * (2 * jb + rb) + h]
        parts = tl.join(
            tl.join(tl.join(u[0], u[4]), tl.join(u[2], u[6])), tl.join(tl.join(u[1], u[5]), tl.join(u[3], u[7]))
        )
        parts = tl.reshape(parts, [2, WARPS, 8, 4, 2, 2, 2, 2])  # i, warp, l4, lm, kk, jb, rb, h
        parts = tl.permute(parts, [1, 5, 3, 7, 0, 6, 2, 4] if KW == 2 else [1, 3, 5, 7, 0, 6, 2, 4])
    else:
        line, slabs = tile_lines(slab, 4)
        line += 32 * group
        if VALUE == "f16":
            column = tl.max_contiguous(tl.arange(0, 32), 8)
            parts = tl.load(values + (slabs * (32 * 32 * GROUPS) + line * 32)[:, None] + column[None, :]).to(DOT)
        else:
            column = tl.max_contiguous(tl.arange(0, 8), 2)
            words = tl.load(values + (slabs * (32 * 8 * GROUPS) + line * 8)[:, None] + column[None, :])
            n0, n1, n2, n3 = unpack_bytes(words, "fp8" if VALUE == "fp8" else "signed", 0, DOT, ASM)
            parts = join_bytes(n0, n1, n2, n3)
        parts = tl.reshape(parts, [4, WARPS, 8, 4, 2, 2, 2])  # line, warp, l4, lm, kk, jb, h
        parts = tl.permute(parts, [1, 5, 3, 6, 0, 2, 4] if KW == 2 else [1, 3, 5, 6, 0, 2, 4])
    low, high = unzip(parts, 2)
    return tl.reshape(low, [WARPS, 16, 32]), tl.reshape(high, [WARPS, 16, 32])


@triton.jit
def token_scales(scales, slab, group, HALF: tl.constexpr, NUM: tl.constexpr):
    """Return the scales of a group for 16 tokens of each warp's block: float32 [warps, 1, 16].

    A load of fewer elements than threads takes the layout of its use; therefore it is 16 tokens at a time.
    """
    at = slab[:, None] * (32 * NUM) + (32 * group + 16 * HALF) + tl.arange(0, 16)[None, :]
    return tl.expand_dims(tl.load(scales + at).to(tl.float32), 1)


@triton.jit
def weights_operand(weights, DOT: tl.constexpr, KW: tl.constexpr):
    """Return softmax weights [warps, 16 rows, 16 tokens] with the tokens in the order of `value_operands`."""
    if KW == 4:
        weights = tl.permute(tl.reshape(weights, [WARPS, 16, 2, 4, 2]), [0, 1, 3, 2, 4])
    return tl.reshape(weights.to(DOT), [WARPS, 16, 16])


@triton.jit
def warps_added(sums, weight, FIRST: tl.constexpr, NUM: tl.constexpr):
    """Return NUM = 1, 2 or 4 groups of weighted sums, from FIRST on, added over the warps: [16, 32 * NUM].

    sums: a tuple of [warps, 16, 32]; weight: [warps, 16]. `tl.split` wants the sums of all warps in one thread, so they
    pass through shared memory once for all groups; a reduction passes twice for each.
    """
    weight = weight[:, :, None]
    if NUM == 4:
        even = tl.join(sums[FIRST] * weight, sums[FIRST + 2] * weight)
        odd = tl.join(sums[FIRST + 1] * weight, sums[FIRST + 3] * weight)
        weighted = tl.permute(tl.join(even, odd), [1, 3, 4, 2, 0])  # row, two bits of the group, column, warp
    elif NUM == 2:
        weighted = tl.permute(tl.join(sums[FIRST] * weight, sums[FIRST + 1] * weight), [1, 3, 2, 0])
    else:
        weighted = tl.permute(sums[FIRST] * weight, [1, 2, 0])
    even, odd = tl.split(tl.reshape(weighted, [16, 32 * NUM, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return (first + second) + (third + fourth)


@triton.jit
def signs(columns):
    """Return the signs of some columns of the Hadamard matrix, +1.0 and -1.0: [32, columns]."""
    both = tl.arange(0, 32)[:, None] & columns[None, :]
    odd = both ^ (both >> 4)
    odd = odd ^ (odd >> 2)
    return 1.0 - 2.0 * ((odd ^ (odd >> 1)) & 1).to(tl.float32)


@triton.jit
def part_rows(ROTATED: tl.constexpr):
    """Return which of 16 rows is in each line of what `row_part` loads.

    Rows that are not rotated are loaded by each warp, in the layout of its operand, so warps exchange nothing.
    """
    return tl.arange(0, 16) if ROTATED else tile_lines(tl.arange(0, WARPS), 2)[0]


@triton.jit
def row_part(q, at, there, G: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return group G of some rows of q: [lines, 32 dimensions]; at, there: [lines], offsets, and which rows exist."""
    column = 32 * G + tl.arange(0, 32)
    return tl.load(q + at[:, None] + column[None, :], mask=there[:, None] & (column < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def row_operand(part, ROTATED: tl.constexpr, DOT: tl.constexpr, KW: tl.constexpr):
    """Return a group of 16 rows of q times Q_DOWN as the operand [warps, 16, 32 dimensions]."""
    part = (part.to(tl.float32) * Q_DOWN).to(DOT)
    if ROTATED:
        part = tl.dot(part, signs(dimension(KW)).to(DOT), input_precision="ieee") * ROOT
        return tl.broadcast_to(part.to(DOT)[None, :, :], [WARPS, 16, 32])
    else:
        part = tl.reshape(part, [2, WARPS, 8, 4, 2, 2, 2])  # half of the rows, warp, row, lm, kk, jb, h
        part = tl.permute(part, [1, 0, 2, 4, 5, 3, 6] if KW == 2 else [1, 0, 2, 4, 3, 5, 6])
        return tl.reshape(part, [WARPS, 16, 32])


@triton.jit
def products(
    rows,
    keys,
    key_high,
    key_scales,
    slab,
    HALF: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY: tl.constexpr,
    DOT: tl.constexpr,
    KW: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the products of 16 rows and the keys of 16 tokens of each warp's block: [warps, 16, 16]."""
    WIDE: tl.constexpr = 4 if GROUPS % 4 == 0 else 2 if GROUPS % 2 == 0 else 1
    SPAN: tl.constexpr = 1 if KEY == "f16" else WIDE if KEY == "int6" else 2 - GROUPS % 2
    total = tl.zeros([WARPS, 16, 16], tl.float32)
    for g in tl.static_range(0, GROUPS, SPAN):
        operands = key_operands(keys, key_high, slab, g, SPAN, HALF, GROUPS, KEY, DOT, KW, ASM)
        for i in tl.static_range(SPAN):
            if KEY == "f16" or KEY == "fp8":
                total = tl.dot(rows[g + i], operands[i], total, input_precision="ieee")
            else:
                by_code = tl.dot(rows[g + i], operands[i], input_precision="ieee")
                factor = token_scales(key_scales, slab, g + i, HALF, GROUPS)
                total = tl.fma(by_code, tl.broadcast_to(factor, [WARPS, 16, 16]), total)
    if KEY == "fp8":
        total = total * token_scales(key_scales, slab, 0, HALF, 1)
    return total


@triton.jit
def finite(values):
    """Return the values with inf and NaN replaced by 0."""
    return tl.where(tl.abs(values) < float("inf"), values, 0.0)


@triton.jit
def not_finite(values):
    """Return 1.0 for inf and NaN, 0.0 for other values."""
    return tl.where(tl.abs(values) < float("inf"), 0.0, 1.0).to(values.dtype)


@triton.jit
def logits_of(products, scale, softcap, CAPPED: tl.constexpr):
    """Return logits times log2(e), for products of q * Q_DOWN and keys; the soft cap is cap * tanh(logit / cap).

    There are multiplications only, so nothing can be fused, and the bits are the same wherever it is compiled.
    """
    if CAPPED:
        logits = products * (scale * Q_UP)
        e = tl.exp2(tl.abs(logits) * (-2.0 * LOG2E / softcap))  # at most 1, so nothing overflows
        size = softcap * LOG2E * ((1.0 - e) / (1.0 + e))
        return tl.where(logits < 0.0, -size, size)
    else:
        return products * (scale * (Q_UP * LOG2E))
