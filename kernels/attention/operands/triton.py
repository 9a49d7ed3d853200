"""From q and the planes of the cache to operands of 3-D dots, through registers only.

Owns the reader's side of the layout of kernels/cache: how four warps ("streams") each hold one block of 32 positions as
the batch of a dot. Knows nothing of softmax, masks and of how a context is cut.

A dot contracts over its dimensions (of values, its tokens) in any order, as long as both operands have the same: KW is
the order that the compiler wants (kernels/target). Names of dimensions are those of the layout: l4, lm, kk, jb, h.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgelm.kernels.codes.triton import byte_numbers, nibble_numbers

STREAMS = tl.constexpr(4)  # warps; blocks in flight
ROOT = tl.constexpr(0.17677669529663687)  # 32 ** -0.5
LOG2E = tl.constexpr(1.4426950408889634)
Q_DOWN = tl.constexpr(2.0**-6)  # q may be bfloat16 or rotated: so 4 million fit float16; what falls out is below 2**-19
Q_UP = tl.constexpr(2.0**6)  # exact both: powers of two
SHIFT = tl.constexpr(4.0)  # weights are at most 2 ** SHIFT: more of the small ones are normal numbers in float16


@triton.jit
def dimension(KW: tl.constexpr):
    """Return which of 32 dimensions (or, in halves, tokens) each index of a contraction is: [32]."""
    k = tl.arange(0, 32)
    if KW == 2:  # k is [kk, jb, lm, h]
        return (k // 2 % 4) * 8 + (k // 16) * 4 + (k // 8 % 2) * 2 + k % 2
    else:  # k is [kk, lm, jb, h]
        return (k // 4 % 4) * 8 + (k // 16) * 4 + k % 4


@triton.jit
def rows_of(per_stream, REPEAT: tl.constexpr):
    """Return the row of each line of a tile [REPEAT, streams, 8 lines], and what its stream has in `per_stream`.

    A load gives each warp 8 lines at a time: with streams between, all lines of a stream are in one warp.
    """
    i = tl.arange(0, REPEAT * STREAMS * 8)
    wide = tl.broadcast_to(per_stream[None, :, None], [REPEAT, STREAMS, 8])
    return i // (STREAMS * 8) * 8 + i % 8, tl.reshape(wide, [REPEAT * STREAMS * 8])


@triton.jit
def unzip(x, N: tl.constexpr):
    """Return the N = 1, 2 or 4 tensors along the last dimension; 4: of [2, streams, 8, 4, 4]."""
    if N == 1:
        return (tl.reshape(x, x.shape[:-1]),)
    elif N == 2:
        return tl.split(x)
    else:
        even, odd = tl.split(tl.reshape(x, [2, STREAMS, 8, 4, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth


@triton.jit
def key_operand(parts, KW: tl.constexpr):
    """Return [tokens / 8, streams, 8, lm, kk, jb, h] as the operand [streams, 32 dimensions, 16 tokens]."""
    parts = tl.permute(parts, [1, 4, 5, 3, 6, 0, 2] if KW == 2 else [1, 4, 3, 5, 6, 0, 2])
    return tl.reshape(parts, [STREAMS, 32, 16])


@triton.jit
def join_bytes(n0, n1, n2, n3):
    """Append the dimensions [jb, h] of four bytes."""
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
    """Return the operands of SPAN groups from FIRST on, for 16 tokens of each stream's block."""
    token, slabs = rows_of(slab, 2)
    token += 16 * HALF
    if KEY == "f16":
        column = 32 * FIRST + tl.max_contiguous(tl.arange(0, 32), 8)
        x = tl.load(keys + (slabs * (32 * 32 * GROUPS) + token * (32 * GROUPS))[:, None] + column[None, :])
        return (key_operand(tl.reshape(x.to(DOT), [2, STREAMS, 8, 4, 2, 2, 2]), KW),)
    elif KEY == "int6":
        column = 4 * FIRST + tl.max_contiguous(tl.arange(0, 4 * SPAN), SPAN)
        words = tl.load(keys + (slabs * (32 * 4 * GROUPS) + token * (4 * GROUPS))[:, None] + column[None, :])
        words = unzip(tl.reshape(words, [2, STREAMS, 8, 4, SPAN]), SPAN)
        PAIRS: tl.constexpr = (GROUPS + 1) // 2
        TOPS: tl.constexpr = (SPAN + 1) // 2  # pairs that these groups have
        ALL: tl.constexpr = 4 if PAIRS % 4 == 0 else 2 if PAIRS % 2 == 0 else 1  # pairs side by side in memory
        pair = (FIRST // 2) // ALL * (4 * ALL) + (FIRST // 2) % ALL
        top = tl.arange(0, 4 * TOPS)
        column = tl.max_contiguous(pair + top // TOPS * ALL + top % TOPS, TOPS)
        high = tl.load(key_high + (slabs * (32 * 4 * PAIRS) + token * (4 * PAIRS))[:, None] + column[None, :])
        high = unzip(tl.reshape(high, [2, STREAMS, 8, 4, TOPS]), TOPS)
        out: tl.tuple = ()
        for each in tl.static_range(SPAN):
            bits = high[each // 2] >> (8 * ((FIRST + each) % 2))
            u = nibble_numbers(words[each], bits, 6, 32, 0, DOT, ASM)  # [2 * (2 * kk + jb) + h]
            parts = tl.join(
                tl.join(tl.join(u[0], u[4]), tl.join(u[2], u[6])), tl.join(tl.join(u[1], u[5]), tl.join(u[3], u[7]))
            )
            out += (key_operand(parts, KW),)
        return out
    else:
        column = 8 * FIRST + tl.max_contiguous(tl.arange(0, 8 * SPAN), 2 * SPAN)
        words = tl.load(keys + (slabs * (32 * 8 * GROUPS) + token * (8 * GROUPS))[:, None] + column[None, :])
        n0, n1, n2, n3 = byte_numbers(words, "fp8" if KEY == "fp8" else "signed", 0, DOT, ASM)
        parts = tl.reshape(join_bytes(n0, n1, n2, n3), [2, STREAMS, 8, 4, SPAN, 2, 2, 2])
        parts = unzip(tl.permute(parts, [0, 1, 2, 3, 5, 6, 7, 4]), SPAN)
        operands: tl.tuple = ()
        for each in tl.static_range(SPAN):
            operands += (key_operand(parts[each], KW),)
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
    """Return two operands [streams, 16 tokens, 32 dimensions of a group], one for each half of a block."""
    if VALUE == "int4":
        line, slabs = rows_of(slab, 2)
        column = tl.max_contiguous(tl.arange(0, 8), 2)
        words = tl.load(values + (slabs * (32 * 4 * GROUPS) + (line + 16 * group) * 8)[:, None] + column[None, :])
        u = nibble_numbers(words, words, 4, 8, 0, DOT, ASM)  # [2 * (2 * jb + rb) + h]
        parts = tl.join(
            tl.join(tl.join(u[0], u[4]), tl.join(u[2], u[6])), tl.join(tl.join(u[1], u[5]), tl.join(u[3], u[7]))
        )
        parts = tl.reshape(parts, [2, STREAMS, 8, 4, 2, 2, 2, 2])  # i, stream, l4, lm, kk, jb, rb, h
        parts = tl.permute(parts, [1, 5, 3, 7, 0, 6, 2, 4] if KW == 2 else [1, 3, 5, 7, 0, 6, 2, 4])
    else:
        line, slabs = rows_of(slab, 4)
        line += 32 * group
        if VALUE == "f16":
            column = tl.max_contiguous(tl.arange(0, 32), 8)
            parts = tl.load(values + (slabs * (32 * 32 * GROUPS) + line * 32)[:, None] + column[None, :]).to(DOT)
        else:
            column = tl.max_contiguous(tl.arange(0, 8), 2)
            words = tl.load(values + (slabs * (32 * 8 * GROUPS) + line * 8)[:, None] + column[None, :])
            n0, n1, n2, n3 = byte_numbers(words, "fp8" if VALUE == "fp8" else "signed", 0, DOT, ASM)
            parts = join_bytes(n0, n1, n2, n3)
        parts = tl.reshape(parts, [4, STREAMS, 8, 4, 2, 2, 2])  # line, stream, l4, lm, kk, jb, h
        parts = tl.permute(parts, [1, 5, 3, 6, 0, 2, 4] if KW == 2 else [1, 3, 5, 6, 0, 2, 4])
    low, high = unzip(parts, 2)
    return tl.reshape(low, [STREAMS, 16, 32]), tl.reshape(high, [STREAMS, 16, 32])


@triton.jit
def token_scales(scales, slab, group, HALF: tl.constexpr, NUM: tl.constexpr):
    """Return the scales of a group for 16 tokens of each stream's block: float32 [streams, 1, 16].

    Loads of fewer elements than threads take the layout of what they are used for: hence 16 tokens at a time.
    """
    at = slab[:, None] * (32 * NUM) + (32 * group + 16 * HALF) + tl.arange(0, 16)[None, :]
    return tl.expand_dims(tl.load(scales + at).to(tl.float32), 1)


@triton.jit
def weights_operand(weights, DOT: tl.constexpr, KW: tl.constexpr):
    """Return the weights of 16 rows and 16 tokens in the order in which values are contracted."""
    if KW == 4:
        weights = tl.permute(tl.reshape(weights, [STREAMS, 16, 2, 4, 2]), [0, 1, 3, 2, 4])
    return tl.reshape(weights.to(DOT), [STREAMS, 16, 16])


@triton.jit
def signs(columns):
    """Return the signs of the rotation of 32, +1.0 and -1.0: [32, columns]."""
    both = tl.arange(0, 32)[:, None] & columns[None, :]
    odd = both ^ (both >> 4)
    odd = odd ^ (odd >> 2)
    return 1.0 - 2.0 * ((odd ^ (odd >> 1)) & 1).to(tl.float32)


@triton.jit
def row_operand(
    q,
    at,
    G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    DOT: tl.constexpr,
    KW: tl.constexpr,
):
    """Return a group of 16 rows of q times Q_DOWN, [streams, 16, 32 dimensions].

    `at` is where a row begins, or negative: zeros.
    """
    column = 32 * G + (tl.arange(0, 32) if ROTATED else dimension(KW))
    there = (at >= 0)[:, None] & (column < HEAD_DIM)[None, :]
    part = (tl.load(q + at[:, None] + column[None, :], mask=there, other=0.0).to(tl.float32) * Q_DOWN).to(DOT)
    if ROTATED:
        part = tl.dot(part, signs(dimension(KW)).to(DOT), input_precision="ieee") * ROOT
    return tl.broadcast_to(part.to(DOT)[None, :, :], [STREAMS, 16, 32])


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
    """Return the products of 16 rows and the keys of 16 tokens of each stream's block: [streams, 16, 16]."""
    WIDE: tl.constexpr = 4 if GROUPS % 4 == 0 else 2 if GROUPS % 2 == 0 else 1
    SPAN: tl.constexpr = 1 if KEY == "f16" else WIDE if KEY == "int6" else 2 - GROUPS % 2
    total = tl.zeros([STREAMS, 16, 16], tl.float32)
    for g in tl.static_range(0, GROUPS, SPAN):
        operands = key_operands(keys, key_high, slab, g, SPAN, HALF, GROUPS, KEY, DOT, KW, ASM)
        for each in tl.static_range(SPAN):
            if KEY == "f16" or KEY == "fp8":
                total = tl.dot(rows[g + each], operands[each], total, input_precision="ieee")
            else:
                by_code = tl.dot(rows[g + each], operands[each], input_precision="ieee")
                factor = token_scales(key_scales, slab, g + each, HALF, GROUPS)
                total = tl.fma(by_code, tl.broadcast_to(factor, [STREAMS, 16, 16]), total)
    if KEY == "fp8":
        total = total * token_scales(key_scales, slab, 0, HALF, 1)
    return total


@triton.jit
def finite(values):
    """Return values with zeros for inf and NaN."""
    return tl.where(tl.abs(values) < float("inf"), values, 0.0)


@triton.jit
def unknown(values):
    """Return 1.0 where values are inf or NaN, and 0.0."""
    return tl.where(tl.abs(values) < float("inf"), 0.0, 1.0).to(values.dtype)


@triton.jit
def logits_of(products, scale, softcap, CAPPED: tl.constexpr):
    """Return the logits of products of q * Q_DOWN and keys, times log2(e), with the soft cap: cap * tanh(logit / cap).

    Multiplications only, and nothing to fuse them with: the same bits wherever it is compiled.
    """
    if CAPPED:
        logits = products * (scale * Q_UP)
        e = tl.exp2(tl.abs(logits) * (-2.0 * LOG2E / softcap))  # at most 1: nothing overflows
        size = softcap * LOG2E * ((1.0 - e) / (1.0 + e))
        return tl.where(logits < 0.0, -size, size)
    else:
        return products * (scale * (Q_UP * LOG2E))
