"""Dequantizing in Triton, and the device functions with which products read weights chunk by chunk.

Owns the way from planes to numbers and scales, the kernel and its launch. Knows nothing of products. How a word becomes
numbers is `edgelm.kernels.codes`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from edgelm.kernels.choice import interpreting
from edgelm.kernels.codes.triton import arrange_words, byte_numbers, high_words, nibble_numbers
from edgelm.kernels.layout import CHUNK, TILE, PackedWeight, Weight, layout_constants

TILES = 4  # of a program: one for each of its warps
TURNS = 4  # chunks of each that a program takes one after the other


def constants(weight: Weight) -> dict[str, object]:
    """Return what a kernel is compiled for, as the constexprs that the device functions below take."""
    if isinstance(weight, PackedWeight):
        return layout_constants(weight.layout) | {"chunks": weight.codes.shape[-2]}
    return layout_constants(None) | {"chunks": triton.cdiv(weight.columns, CHUNK)}


def dequantize(weight: PackedWeight, out: Tensor) -> Tensor:
    """Write the values of a weight into `out`, contiguous [.., rows, columns]."""
    *_, tiles, chunks, _ = weight.codes.shape
    turns = min(TURNS, chunks)
    grid = (triton.cdiv(tiles, TILES), triton.cdiv(chunks, turns), max(weight.num_matrices, 1))
    dequantize_kernel[grid](
        weight.codes,
        weight.high,
        weight.scales,
        weight.offsets,
        weight.supers,
        out,
        weight.rows,
        tiles,
        columns=weight.columns,
        **constants(weight),
        W=TILES,
        TURNS=turns,
        ASM=not interpreting(),
        enable_fp_fusion=False,  # the multiplication and the addition round apart, as ggml's do
        num_warps=TILES,
    )
    return out


@triton.jit
def dequantize_kernel(
    codes,
    high,
    scales,
    offsets,
    supers,
    out,  # [matrices, rows, columns]
    rows,
    tiles,
    columns: tl.constexpr,
    chunks: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    CODE: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    BOOK: tl.constexpr,
    W: tl.constexpr,  # tiles
    TURNS: tl.constexpr,  # chunks of a tile
    ASM: tl.constexpr,
):
    first = tl.program_id(0) * W
    matrix = tl.program_id(2).to(tl.int64)
    codes, high, scales, offsets, supers = planes_of(
        codes, high, scales, offsets, supers, matrix * tiles, chunks, BITS, GROUP, OFFSET
    )
    tile = first + tl.arange(0, W)
    row = first * 16 + tl.arange(0, W * 16)
    for turn in range(TURNS):
        chunk = tl.program_id(1) * TURNS + turn
        mask = tile < tl.where(chunk < chunks, tiles, 0)
        numbers = chunk_numbers(codes, high, tile * chunks + chunk, mask, W, 4, BITS, CODE, ZERO, BOOK, tl.float16, ASM)
        low = _half(
            numbers, 0, scales, offsets, supers, tile, chunk, mask, columns, chunks, GROUP, SCALE, OFFSET, W,
            out.dtype.element_ty, ASM,
        )  # fmt: skip
        top = _half(
            numbers, 1, scales, offsets, supers, tile, chunk, mask, columns, chunks, GROUP, SCALE, OFFSET, W,
            out.dtype.element_ty, ASM,
        )  # fmt: skip
        whole = tl.permute(tl.join(low, top), [0, 2, 1])  # [W * 16, g, 32]
        column = chunk * 64 + tl.arange(0, 64)
        at = (matrix * rows + row)[:, None] * columns + column[None, :]
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        tl.store(out + at, tl.reshape(whole, [W * 16, 64]), mask=inside)


@triton.jit
def _half(
    numbers,
    g: tl.constexpr,
    scales,
    offsets,
    supers,
    tile,
    chunk,
    mask,
    columns: tl.constexpr,
    chunks: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    W: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the values of the columns g of W chunks in their own order, [W * 16, 32]."""
    scale, offset = chunk_scales(
        scales, offsets, supers, tile, chunk, g, mask, columns, chunks, 4, GROUP, SCALE, OFFSET
    )
    values = natural(
        value_of(numbers[4 * g], scale, offset, OFFSET),
        value_of(numbers[4 * g + 1], scale, offset, OFFSET),
        value_of(numbers[4 * g + 2], scale, offset, OFFSET),
        value_of(numbers[4 * g + 3], scale, offset, OFFSET),
        W,
    )
    return rounded(values, DTYPE, ASM).to(DTYPE)


# -- device functions: W chunks at once --------------------------------------------------------------------------------


@triton.jit
def chunk_numbers(
    codes,
    high,
    unit,  # [W]: tile * chunks + chunk
    mask,  # [W]: where false, nothing is read
    W: tl.constexpr,
    KW: tl.constexpr,
    BITS: tl.constexpr,
    CODE: tl.constexpr,
    ZERO: tl.constexpr,
    BOOK: tl.constexpr,
    DTYPE: tl.constexpr,  # of 16 bits; without ASM they are float32
    ASM: tl.constexpr,
):
    """Return the codes of chunks as 8 tensors [W, 16 rows, 8], exactly: number 4 * g + 2 * p + h.

    The last dimension is (jb, lm) with KW = 2 and (lm, jb) with KW = 4.
    """
    VIA: tl.constexpr = DTYPE if ASM else tl.float32
    out = ()
    if BITS == 8:
        for g in tl.static_range(2):
            at = unit[:, None] * 256 + (g * 128 + tl.arange(0, 128))[None, :]
            words = arrange_words(tl.load(codes + at, mask=mask[:, None], other=0), W, KW)
            out = out + byte_numbers(words, CODE, ZERO, VIA, ASM)
    else:
        at = unit[:, None] * 128 + tl.arange(0, 128)[None, :]
        words = arrange_words(tl.load(codes + at, mask=mask[:, None], other=0), W, KW)
        top = words
        if BITS > 4:
            PER: tl.constexpr = 32 if BITS == 5 else 64
            at = unit[:, None] * PER + tl.arange(0, PER)[None, :]
            top = high_words(tl.load(high + at, mask=mask[:, None], other=0), BITS, W, KW)
        out = nibble_numbers(words, top, BITS, ZERO, BOOK, VIA, ASM)
    return out


@triton.jit
def chunk_scales(
    scales,
    offsets,
    supers,
    tile,  # [W], or one for all
    chunk,  # [W], or one for all
    g: tl.constexpr,
    mask,  # [W]
    columns: tl.constexpr,
    chunks: tl.constexpr,
    KW: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Return the scales and offsets of the 32 columns g of chunks, float32, as they multiply [W, 16 rows, 8] numbers.

    They are [W, 16, 1]; of groups of 16 columns [W, 16, 8]. The offset is a zero (subtracted from a number before it is
    multiplied) or a minimum (added to the product); the scale again if there is none.
    """
    if GROUP == 16:
        scale, offset = _index_scales(
            scales, offsets, supers, tile, chunk, 2 * g, mask, columns, chunks, GROUP, SCALE, OFFSET
        )
        scale_top, offset_top = _index_scales(
            scales, offsets, supers, tile, chunk, 2 * g + 1, mask, columns, chunks, GROUP, SCALE, OFFSET
        )
        number = tl.arange(0, 8)
        top = ((number % 4 if KW == 2 else number // 2) >= 2)[None, None, :]  # lm
        return tl.where(top, scale_top, scale), tl.where(top, offset_top, offset)
    else:
        return _index_scales(scales, offsets, supers, tile, chunk, g, mask, columns, chunks, GROUP, SCALE, OFFSET)


@triton.jit
def _index_scales(
    scales,
    offsets,
    supers,
    tile,
    chunk,
    index: tl.constexpr,  # of the group in its chunk
    mask,
    columns: tl.constexpr,
    chunks: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
):
    if columns % 64 != 0:
        start = tile * 0 + chunk * 64 + (index * GROUP if GROUP < 64 else 0)
        mask = mask & (start < columns)  # what pads may be anything
    scale = group_scale(scales, supers, 0, tile, chunk, index, mask, chunks, GROUP, SCALE, OFFSET)[:, :, None]
    if OFFSET == "none":
        return scale, scale
    elif OFFSET == "zero":
        return scale, group_zero(offsets, tile, chunk, index, mask, chunks, GROUP)[:, :, None]
    else:
        least = group_scale(offsets, supers, 1, tile, chunk, index, mask, chunks, GROUP, SCALE, OFFSET)
        return scale, least[:, :, None]


@triton.jit
def group_scale(
    plane,
    supers,
    which: tl.constexpr,  # 0: scales, 1: minimums
    tile,
    chunk,
    index: tl.constexpr,  # of the group in its chunk
    mask,
    chunks: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Return the scales (or minimums) of one group of each of W chunks, float32 [W, 16]."""
    raw = tl.load(plane + _scale_at(tile, chunk, index, chunks, GROUP), mask=mask[:, None], other=0)
    if SCALE == "e8m0":
        byte = raw.to(tl.int32)
        return tl.where(byte < 2, 0x200000 << (byte & 1), (byte - 1) << 23).to(tl.float32, bitcast=True)
    elif SCALE == "u8" or SCALE == "i8":
        PARTS: tl.constexpr = 2 if OFFSET == "min" else 1
        entry = tile * (chunks // 4) + chunk // 4
        above = (entry[:, None] * 16 + tl.arange(0, 16)[None, :]) * PARTS + which
        return tl.load(supers + above, mask=mask[:, None], other=0.0).to(tl.float32) * raw.to(tl.float32)
    else:
        return raw.to(tl.float32)


@triton.jit
def group_zero(plane, tile, chunk, index: tl.constexpr, mask, chunks: tl.constexpr, GROUP: tl.constexpr):
    """Return the zeros of one group of each of W chunks, float32 [W, 16]."""
    at = _scale_at(tile, chunk, index, chunks, GROUP)
    return tl.load(plane + at, mask=mask[:, None], other=0).to(tl.float32)


@triton.jit
def planes_of(
    codes,
    high,
    scales,
    offsets,
    supers,
    tiles,  # int64
    chunks: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Return the planes of a matrix before which a stack has so many tiles: within one, 32 bits count every word."""
    codes += tiles * (chunks * (256 if BITS == 8 else 128))
    groups = tiles * (chunks * (64 * 16) // GROUP)
    scales += groups
    # A plane that a layout lacks is never read; Triton 3.6 returns no None.
    high = codes if high is None else high + tiles * (chunks * (32 if BITS == 5 else 64))
    offsets = scales if offsets is None else offsets + groups
    supers = scales if supers is None else supers + tiles * (chunks * (8 if OFFSET == "min" else 4))
    return codes, high, scales, offsets, supers


@triton.jit
def value_of(number, scale, offset, OFFSET: tl.constexpr):
    """Return values, float32, in the order of operations of `layout.dequantize`."""
    number = number.to(tl.float32)
    if OFFSET == "zero":
        return scale * (number - offset)
    elif OFFSET == "min":
        return scale * number + offset
    else:
        return scale * number


@triton.jit
def natural(p0h0, p0h1, p1h0, p1h1, W: tl.constexpr):
    """Return [W * 16 rows, 32 columns] in their own order, from the numbers [W, 16, (lm, jb)] of a group of 32."""
    parts = tl.join(tl.join(p0h0, p1h0), tl.join(p0h1, p1h1))  # [W, 16, 8, p, h]
    parts = tl.reshape(parts, [W * 16, 4, 2, 2, 2])
    return tl.reshape(tl.permute(parts, [0, 1, 3, 2, 4]), [W * 16, 32])


@triton.jit
def rounded(values, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Round float32 values to DTYPE: with ASM as DTYPE; else still float32, since the interpreter cuts bfloat16 off."""
    if ASM:
        return values.to(DTYPE)
    elif tl.bfloat16 == DTYPE:
        bits = values.to(tl.int32, bitcast=True)
        even = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        return tl.where(values == values, even, values)  # the bits of a GPU's NaN would become those of -0.0
    else:
        return values.to(DTYPE).to(tl.float32)


@triton.jit
def _scale_at(tile, chunk, index: tl.constexpr, chunks: tl.constexpr, GROUP: tl.constexpr):
    """Return where the scale of a group of each chunk lies, [W, 16]."""
    if GROUP <= 64:
        PER: tl.constexpr = 64 // GROUP
        entry = tile * chunks + chunk
        return (entry[:, None] * 16 + tl.arange(0, 16)[None, :]) * PER + (index if GROUP < 64 else 0)
    else:
        entry = tile * (chunks * 64 // GROUP) + chunk // (GROUP // 64)
        return entry[:, None] * 16 + tl.arange(0, 16)[None, :]


assert (CHUNK, TILE) == (64, 16)  # as the kernels have them
