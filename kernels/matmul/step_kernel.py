"""One step of a decode matmul: each warp multiplies a chunk of 64 columns of some tiles by some blocks of 8 rows of x.

Owns how words and x are read, and the order of the sums; scales.py has the scales. Knows nothing of grids, nor of what
follows the product.
`chunk` is [NW, 1], a chunk for each warp. MASKED: a chunk may reach or lie beyond K; what lies there is read as 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgelm.kernels.matmul.scales import entry_scales, load_entries, scale_number, times
from edgelm.kernels.unpack import (
    arrange_words,
    fragment,
    group_fragment,
    group_x_fragment,
    high_words,
    joined_x_fragment,
    row_fragment,
    unpack_bytes,
    unpack_nibbles,
    x_fragment,
)


@triton.jit
def tile_number(pid, mt: tl.constexpr, N: tl.constexpr, MT: tl.constexpr):
    """Return the index of a program's tile `mt`; beyond the last tile it is the last, whose results are not stored."""
    tile = pid.to(tl.int64) * MT + mt  # int64 from the start, so that the tiles of a program share their addresses
    return tile if N % (16 * MT) == 0 else tl.minimum(tile, (N + 15) // 16 - 1)


@triton.jit
def load_words(
    codes,
    high,
    pid,
    step,
    N: tl.constexpr,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    BITS: tl.constexpr,
    NW: tl.constexpr,
    MT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load the words of a step: a tuple of one to four tensors for each of MT tiles."""
    out: tl.tuple = ()
    WORDS: tl.constexpr = 32 * (BITS - 4)  # words of a chunk in the plane `high`
    warp = tl.arange(0, NW)[:, None]
    columns = (step * NW + warp) * 64
    for mt in tl.static_range(MT):
        tile = tile_number(pid, mt, N, MT)
        if BITS >= 16:  # rows 0 to 7 and 8 to 15 of either half of the chunks
            i = tl.arange(0, NW * 8)[:, None]
            column = i // 8 * 64 + tl.arange(0, 32)[None, :]
            for part in tl.static_range(4):
                row = tile * 16 + (part % 2) * 8 + i % 8
                at = codes + row * K + column + part // 2 * 32 + step * (NW * 64)
                if MASKED:
                    inside = column + part // 2 * 32 + step * (NW * 64) < K
                    out += (tl.load(at, mask=(row < N) & inside, other=0.0),)
                elif N % 16 != 0:
                    out += (tl.load(at, mask=row < N, other=0.0),)
                else:
                    out += (tl.load(at),)
        elif BITS == 8:
            at = codes + tile * (CHUNKS * 256) + warp * 256 + tl.arange(0, 128)[None, :] + step * (NW * 256)
            for g in tl.static_range(2):
                if MASKED:
                    out += (tl.load(at + g * 128, mask=columns + g * 32 < K, other=0),)
                else:
                    out += (tl.load(at + g * 128),)
        else:
            at = codes + tile * (CHUNKS * 128) + warp * 128 + tl.arange(0, 128)[None, :] + step * (NW * 128)
            out += (tl.load(at, mask=columns < K, other=0) if MASKED else tl.load(at),)
            if BITS > 4:
                at = high + tile * (CHUNKS * WORDS) + warp * WORDS + tl.arange(0, WORDS)[None, :] + step * (NW * WORDS)
                out += (tl.load(at, mask=columns < K, other=0) if MASKED else tl.load(at),)
    return out


@triton.jit
def load_scales(
    scales,
    offsets,
    supers,
    pid,
    step,
    N: tl.constexpr,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    NW: tl.constexpr,
    MT: tl.constexpr,
    ASM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load the scales of a step as they are stored: for each of MT tiles the entries of scales, offsets and supers.

    They are converted after the dot only, so that these loads are under way together with those of the words.
    """
    SHARED: tl.constexpr = GROUP // 64 if GROUP > 64 else 1  # chunks that share an entry
    PER: tl.constexpr = 64 // GROUP if GROUP < 64 else 1
    SIZE: tl.constexpr = 4 if SCALE == "f32" else 2 if SCALE == "f16" or SCALE == "bf16" else 1
    WORDS: tl.constexpr = 1 if PER * SIZE <= 4 else PER
    STRIDE: tl.constexpr = CHUNKS // SHARED * 16  # from tile to tile, in entries of one row
    out: tl.tuple = ()
    if BITS < 16:
        for mt in tl.static_range(MT):
            tile = tile_number(pid, mt, N, MT)
            out += load_entries(scales + tile * (STRIDE * WORDS), step, K, SHARED, WORDS, GROUP, NW, ASM, MASKED)
            if OFFSET == "min":
                out += load_entries(offsets + tile * (STRIDE * WORDS), step, K, SHARED, WORDS, GROUP, NW, ASM, MASKED)
            elif OFFSET == "zero":
                out += load_entries(offsets + tile * STRIDE, step, K, SHARED, 1, GROUP, NW, ASM, MASKED)
            if SCALE == "u8" or SCALE == "i8":
                out += load_entries(supers + tile * (CHUNKS * 4), step, K, 4, 1, GROUP, NW, ASM, MASKED)
    return out


@triton.jit
def tile_scales(
    weights,
    mt: tl.constexpr,
    chunk,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    MT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return the scales and the offsets of a tile's chunks, each a tuple of float32 [NW, 16], one for each group."""
    PER: tl.constexpr = 64 // GROUP if GROUP < 64 else 1
    SIZE: tl.constexpr = 4 if SCALE == "f32" else 2 if SCALE == "f16" or SCALE == "bf16" else 1
    WORDS: tl.constexpr = 1 if PER * SIZE <= 4 else PER
    CODES: tl.constexpr = 1 if BITS == 4 else 2  # words of a tile
    ENTRIES: tl.constexpr = len(weights) // MT - CODES
    FIRST: tl.constexpr = MT * CODES + mt * ENTRIES
    columns = chunk * 64
    scale = entry_scales(weights, FIRST, columns, K, GROUP, SCALE, MASKED)
    offset = scale
    if OFFSET == "min":
        offset = entry_scales(weights, FIRST + WORDS, columns, K, GROUP, SCALE, MASKED)
    elif OFFSET == "zero":
        offset = entry_scales(weights, FIRST + WORDS, columns, K, GROUP, "u8", MASKED)
    if SCALE == "u8" or SCALE == "i8":
        word = weights[FIRST + ENTRIES - 1]
        scale = times(scale, scale_number(word, 0, "f16"))
        if OFFSET == "min":
            offset = times(offset, scale_number(word, 1, "f16"))
    return scale, offset


@triton.jit
def load_weights(
    codes,
    high,
    scales,
    offsets,
    supers,
    pid,
    step,
    N: tl.constexpr,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    NW: tl.constexpr,
    MT: tl.constexpr,
    ASM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load the weights of a step as they are stored: the words of MT tiles, then the entries of their scales."""
    words = load_words(codes, high, pid, step, N, K, CHUNKS, BITS, NW, MT, MASKED)
    return words + load_scales(
        scales, offsets, supers, pid, step, N, K, CHUNKS, BITS, GROUP, SCALE, OFFSET, NW, MT, ASM, MASKED
    )


@triton.jit
def tile_fragments(
    words,
    mt: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    ZERO: tl.constexpr,
    BOOK: tl.constexpr,
    DTYPE: tl.constexpr,
    NW: tl.constexpr,
    KW: tl.constexpr,
    ASM: tl.constexpr,
):
    """Unpack a tile's chunks into left operands of DTYPE: both halves [NW, 16, 32], or four groups [NW, 16, 16]."""
    if BITS >= 16:
        low = row_fragment(words[4 * mt].to(DTYPE), words[4 * mt + 1].to(DTYPE), NW, KW)
        top = row_fragment(words[4 * mt + 2].to(DTYPE), words[4 * mt + 3].to(DTYPE), NW, KW)
        return low, top
    else:
        if BITS == 8:
            u = unpack_bytes(arrange_words(words[2 * mt], NW, 2), CODE, ZERO, DTYPE, ASM)
            u += unpack_bytes(arrange_words(words[2 * mt + 1], NW, 2), CODE, ZERO, DTYPE, ASM)
        elif BITS == 4:
            low = arrange_words(words[mt], NW, 2)
            u = unpack_nibbles(low, low, BITS, ZERO, BOOK, DTYPE, ASM)
        else:
            low = arrange_words(words[2 * mt], NW, 2)
            u = unpack_nibbles(low, high_words(words[2 * mt + 1], BITS, NW, 2), BITS, ZERO, BOOK, DTYPE, ASM)
        out: tl.tuple = ()
        if GROUP == 16:
            for i in tl.static_range(4):
                out += (group_fragment(u[2 * i], u[2 * i + 1], NW, KW),)
        else:
            for i in tl.static_range(2):
                out += (fragment(u[4 * i], u[4 * i + 1], u[4 * i + 2], u[4 * i + 3], NW, KW),)
        return out


@triton.jit
def load_x(
    x,
    x_stride,
    rows,
    step,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    NW: tl.constexpr,
    TT: tl.constexpr,
    KW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return x as right operands, for each block of 8 rows both halves [NW, 32, 8] or four groups [NW, 16, 8]."""
    PARTS: tl.constexpr = 4 if GROUP == 16 else 2
    WIDTH: tl.constexpr = 64 // PARTS
    # a thread's 4 or 8 columns, at most 16 bytes at a time
    PIECES: tl.constexpr = 2 if x.dtype.element_ty == tl.float32 and WIDTH == 32 else 1
    i = tl.arange(0, NW * 8)[:, None]
    column = tl.arange(0, WIDTH // PIECES)[None, :]
    start = step * (NW * 64)
    out: tl.tuple = ()
    for tt in tl.static_range(TT):
        # A mask would cost more: beyond the last row it is read again, and those results are not stored.
        row = tl.minimum(tt * 8 + i % 8, rows - 1)
        for part in tl.static_range(PARTS):
            values: tl.tuple = ()
            for piece in tl.static_range(PIECES):
                j = column if PIECES == 1 else column // 4 * 8 + piece * 4 + column % 4
                at = i // 8 * 64 + part * WIDTH + j
                if MASKED:
                    value = tl.load(x + row * x_stride + at + start, mask=at + start < K, other=0.0)
                else:
                    value = tl.load(x + row * x_stride + at + start)
                values += (value.to(DTYPE),)
            if GROUP == 16:
                out += (group_x_fragment(values[0], NW, KW),)
            elif PIECES == 1:
                out += (x_fragment(values[0], NW, KW),)
            else:
                out += (joined_x_fragment(values[0], values[1], NW, KW),)
    return out


@triton.jit
def multiply(
    acc,
    weights,
    b,
    step,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    CODE: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    BOOK: tl.constexpr,
    DTYPE: tl.constexpr,
    NW: tl.constexpr,
    MT: tl.constexpr,
    TT: tl.constexpr,
    KW: tl.constexpr,
    ASM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the products of a step to the sums, [NW, 16, 8] for each of MT tiles and TT blocks of rows."""
    PARTS: tl.constexpr = 4 if GROUP == 16 else 2
    GROUPS: tl.constexpr = 64 // GROUP if GROUP < 64 else 1
    chunk = step * NW + tl.arange(0, NW)[:, None]
    sums: tl.tuple = ()  # of x over each group, the same in every row of a tile
    if OFFSET != "none":
        # joined like a tile's operand: Triton 3.6 chooses the layout of x by how the left operand was joined
        one = tl.full([NW, 16, 8], 1.0, DTYPE)
        ones = group_fragment(one, one, NW, KW) if GROUP == 16 else fragment(one, one, one, one, NW, KW)
        for tt in tl.static_range(TT):
            for i in tl.static_range(GROUPS):
                total = tl.dot(ones, b[tt * PARTS + i], input_precision="ieee")
                if GROUPS == 1:
                    total = tl.dot(ones, b[tt * PARTS + 1], total, input_precision="ieee")
                sums += (total,)
    out: tl.tuple = ()
    for mt in tl.static_range(MT):
        a = tile_fragments(weights, mt, BITS, GROUP, CODE, ZERO, BOOK, DTYPE, NW, KW, ASM)
        if BITS < 16:
            scale, offset = tile_scales(weights, mt, chunk, K, BITS, GROUP, SCALE, OFFSET, MT, MASKED)
        for tt in tl.static_range(TT):
            y = acc[mt * TT + tt]
            if BITS >= 16:
                y = tl.dot(a[0], b[tt * 2], y, input_precision="ieee")
                y = tl.dot(a[1], b[tt * 2 + 1], y, input_precision="ieee")
            else:
                for i in tl.static_range(GROUPS):
                    t = tl.dot(a[i], b[tt * PARTS + i], input_precision="ieee")
                    if GROUPS == 1:
                        t = tl.dot(a[1], b[tt * PARTS + 1], t, input_precision="ieee")
                    s = tl.broadcast_to(scale[i][:, :, None], [NW, 16, 8])
                    if OFFSET == "zero":
                        o = tl.broadcast_to(offset[i][:, :, None], [NW, 16, 8])
                        t = tl.fma(-o, sums[tt * GROUPS + i], t)
                    y = tl.fma(t, s, y)
                    if OFFSET == "min":
                        o = tl.broadcast_to(offset[i][:, :, None], [NW, 16, 8])
                        y = tl.fma(o, sums[tt * GROUPS + i], y)
            out += (y,)
    return out
