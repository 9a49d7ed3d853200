"""Dequantizing in Triton, and the device functions with which matmuls read weights chunk by chunk.

Owns the way from planes to values and scales, the kernel and its launch. Knows nothing of matmuls. The conversion of a
word is in kernels/unpack.py.

Device functions work on W chunks at once, a chunk for each of W tiles. The value of a code before its scale and offset
are applied is called `raw`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from edgelm.kernels.choice import interpreting
from edgelm.kernels.layout import CHUNK, TILE, PackedWeight, Weight, layout_constants
from edgelm.kernels.pdl import begin_dependent, uses_pdl
from edgelm.kernels.unpack import arrange_words, high_words, unpack_bytes, unpack_nibbles

TILES = 4  # tiles of a program: one for each of its warps
TURNS = 4  # chunks of a tile that a program takes one after the other


def constants(weight: Weight) -> dict[str, object]:
    """Return the constexprs that describe a weight to the device functions below."""
    if isinstance(weight, PackedWeight):
        return layout_constants(weight.layout) | {"chunks": weight.codes.shape[-2]}
    return layout_constants(None) | {"chunks": triton.cdiv(weight.columns, CHUNK)}


def dequantize(weight: PackedWeight, out: Tensor) -> Tensor:
    """Write the values of a weight to `out`, contiguous [.., rows, columns]."""
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
        enable_fp_fusion=False,  # round after the multiplication and after the addition, as ggml does
        num_warps=TILES,
        launch_pdl=uses_pdl(),
        maxnreg=max_registers(weight),
    )
    return out


def max_registers(weight: PackedWeight) -> int | None:
    """Return the limit of a thread's registers; None: the compiler's.

    Without one, ptxas spills on sm_120 to stay within 64 registers, with groups of 16.
    """
    return 255 if weight.layout.group == 16 else None


@triton.jit(do_not_specialize=["rows", "tiles"])  # of a slice, which depend on the length of a prompt
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
    W: tl.constexpr,  # tiles of a program
    TURNS: tl.constexpr,  # chunks of a tile
    ASM: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """Write W * 16 rows by TURNS * 64 columns of one matrix."""
    begin_dependent(launch_pdl)
    first = tl.program_id(0) * W
    matrix = tl.program_id(2).to(tl.int64)
    codes, high, scales, offsets, supers = matrix_planes(
        codes, high, scales, offsets, supers, matrix * tiles, chunks, BITS, GROUP, OFFSET
    )
    tile = first + tl.arange(0, W)
    row = first * 16 + tl.arange(0, W * 16)
    for turn in range(TURNS):
        chunk = tl.program_id(1) * TURNS + turn
        mask = tile < tl.where(chunk < chunks, tiles, 0)
        raw = unpack_chunk(codes, high, tile * chunks + chunk, mask, W, 4, BITS, CODE, ZERO, BOOK, tl.float16, ASM)
        low = _half_in_column_order(
            raw, 0, scales, offsets, supers, tile, chunk, mask, columns, chunks, GROUP, SCALE, OFFSET, W,
            out.dtype.element_ty, ASM,
        )  # fmt: skip
        top = _half_in_column_order(
            raw, 1, scales, offsets, supers, tile, chunk, mask, columns, chunks, GROUP, SCALE, OFFSET, W,
            out.dtype.element_ty, ASM,
        )  # fmt: skip
        whole = tl.permute(tl.join(low, top), [0, 2, 1])  # [W * 16, g, 32]
        column = chunk * 64 + tl.arange(0, 64)
        at = (matrix * rows + row)[:, None] * columns + column[None, :]
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        tl.store(out + at, tl.reshape(whole, [W * 16, 64]), mask=inside)


@triton.jit
def _half_in_column_order(
    raw,
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
    """Return half g of W chunks (32 columns) as DTYPE in column order, [W * 16, 32]."""
    p0h0, p0h1, p1h0, p1h1 = half_values(
        raw, g, scales, offsets, supers, tile, chunk, mask, columns, chunks, GROUP, SCALE, OFFSET, tl.float32, ASM
    )
    parts = tl.join(tl.join(p0h0, p1h0), tl.join(p0h1, p1h1))  # [W, 16, (lm, jb), p, h]
    parts = tl.reshape(parts, [W * 16, 4, 2, 2, 2])
    parts = tl.permute(parts, [0, 3, 1, 2, 4] if GROUP == 16 else [0, 1, 3, 2, 4])
    values = tl.reshape(parts, [W * 16, 32])
    return rounded(values, DTYPE, ASM).to(DTYPE)


@triton.jit
def matrix_planes(
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
    """Return the planes of the matrix after the first `tiles` tiles of a stack; 32 bits address each of its words."""
    codes += tiles * (chunks * (256 if BITS == 8 else 128))
    groups = tiles * (chunks * (64 * 16) // GROUP)
    scales += groups
    # A plane that a layout lacks is never read; Triton 3.6 cannot return None.
    high = codes if high is None else high + tiles * (chunks * (32 if BITS == 5 else 64))
    offsets = scales if offsets is None else offsets + groups
    supers = scales if supers is None else supers + tiles * (chunks * (8 if OFFSET == "min" else 4))
    return codes, high, scales, offsets, supers


@triton.jit
def unpack_chunk(
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
    DTYPE: tl.constexpr,  # of 16 bits; without ASM the result is float32
    ASM: tl.constexpr,
):
    """Return the codes of W chunks as 8 exact tensors [W, 16 rows, 8]: number 4 * g + 2 * p + h.

    The last dimension is (jb, lm) with KW = 2 and (lm, jb) with KW = 4.
    """
    VIA: tl.constexpr = DTYPE if ASM else tl.float32
    out = ()
    if BITS == 8:
        for g in tl.static_range(2):
            at = unit[:, None] * 256 + (g * 128 + tl.arange(0, 128))[None, :]
            words = arrange_words(tl.load(codes + at, mask=mask[:, None], other=0), W, KW)
            out = out + unpack_bytes(words, CODE, ZERO, VIA, ASM)
    else:
        at = unit[:, None] * 128 + tl.arange(0, 128)[None, :]
        words = arrange_words(tl.load(codes + at, mask=mask[:, None], other=0), W, KW)
        top = words
        if BITS > 4:
            PER: tl.constexpr = 32 if BITS == 5 else 64
            at = unit[:, None] * PER + tl.arange(0, PER)[None, :]
            top = high_words(tl.load(high + at, mask=mask[:, None], other=0), BITS, W, KW)
        out = unpack_nibbles(words, top, BITS, ZERO, BOOK, VIA, ASM)
    return out


@triton.jit
def half_values(
    raw,  # the result of unpack_chunk
    g: tl.constexpr,
    scales,
    offsets,
    supers,
    tile,  # [W], or one for all
    chunk,  # [W], or one for all
    mask,  # [W]
    columns: tl.constexpr,
    chunks: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the values of half g of W chunks (32 columns), `rounded` to DTYPE: 4 tensors [W, 16 rows, 8]."""
    scale, offset = _group_scales(
        scales, offsets, supers, tile, chunk, 2 * g if GROUP == 16 else g, mask, columns, chunks, GROUP, SCALE, OFFSET
    )
    scale_top, offset_top = scale, offset
    if GROUP == 16:  # p = 1 is the second group of the half
        scale_top, offset_top = _group_scales(
            scales, offsets, supers, tile, chunk, 2 * g + 1, mask, columns, chunks, GROUP, SCALE, OFFSET
        )
    return (
        rounded(_dequantized(raw[4 * g], scale, offset, OFFSET), DTYPE, ASM),
        rounded(_dequantized(raw[4 * g + 1], scale, offset, OFFSET), DTYPE, ASM),
        rounded(_dequantized(raw[4 * g + 2], scale_top, offset_top, OFFSET), DTYPE, ASM),
        rounded(_dequantized(raw[4 * g + 3], scale_top, offset_top, OFFSET), DTYPE, ASM),
    )


@triton.jit
def _dequantized(raw, scale, offset, OFFSET: tl.constexpr):
    """Apply scale and offset in float32, in the order of operations of `layout.dequantize`."""
    raw = raw.to(tl.float32)
    if OFFSET == "zero":
        return scale * (raw - offset)
    elif OFFSET == "min":
        return scale * raw + offset
    else:
        return scale * raw


@triton.jit
def _group_scales(
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
    """Return the scale and the offset of one group of each of W chunks, float32 [W, 16, 1].

    The offset is a zero (subtracted before the multiplication) or a minimum (added after it); without one it is the
    scale again.
    """
    if columns % 64 != 0:
        start = tile * 0 + chunk * 64 + (index * GROUP if GROUP < 64 else 0)
        mask = mask & (start < columns)  # the padding may hold anything
    scale = _scale_values(scales, supers, 0, tile, chunk, index, mask, chunks, GROUP, SCALE, OFFSET)[:, :, None]
    if OFFSET == "none":
        return scale, scale
    elif OFFSET == "zero":
        at = _scale_at(tile, chunk, index, chunks, GROUP)
        return scale, tl.load(offsets + at, mask=mask[:, None], other=0).to(tl.float32)[:, :, None]
    else:
        least = _scale_values(offsets, supers, 1, tile, chunk, index, mask, chunks, GROUP, SCALE, OFFSET)
        return scale, least[:, :, None]


@triton.jit
def _scale_values(
    plane,
    supers,
    part: tl.constexpr,  # of the supers: 0 for scales, 1 for minimums
    tile,
    chunk,
    index: tl.constexpr,
    mask,
    chunks: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Return the scales (or minimums) of one group of each of W chunks, float32 [W, 16]."""
    stored = tl.load(plane + _scale_at(tile, chunk, index, chunks, GROUP), mask=mask[:, None], other=0)
    if SCALE == "e8m0":
        return e8m0_value(stored)
    elif SCALE == "u8" or SCALE == "i8":
        PARTS: tl.constexpr = 2 if OFFSET == "min" else 1
        entry = tile * (chunks // 4) + chunk // 4
        at = (entry[:, None] * 16 + tl.arange(0, 16)[None, :]) * PARTS + part
        return tl.load(supers + at, mask=mask[:, None], other=0.0).to(tl.float32) * stored.to(tl.float32)
    else:
        return stored.to(tl.float32)


@triton.jit
def _scale_at(tile, chunk, index: tl.constexpr, chunks: tl.constexpr, GROUP: tl.constexpr):
    """Return the position of the scale of one group of each of W chunks in its plane, [W, 16]."""
    if GROUP <= 64:
        PER: tl.constexpr = 64 // GROUP
        entry = tile * chunks + chunk
        return (entry[:, None] * 16 + tl.arange(0, 16)[None, :]) * PER + (index if GROUP < 64 else 0)
    else:
        entry = tile * (chunks * 64 // GROUP) + chunk // (GROUP // 64)
        return entry[:, None] * 16 + tl.arange(0, 16)[None, :]


@triton.jit
def e8m0_value(stored):
    """Return 2 ** (byte - 128) as float32: the byte becomes the exponent, except for the two subnormal powers."""
    byte = stored.to(tl.int32)
    return tl.where(byte < 2, 0x200000 << (byte & 1), (byte - 1) << 23).to(tl.float32, bitcast=True)


@triton.jit
def rounded(values, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Round float32 to DTYPE; without ASM the result stays float32, since the interpreter truncates to bfloat16."""
    if ASM:
        return values.to(DTYPE)
    elif tl.bfloat16 == DTYPE:
        bits = values.to(tl.int32, bitcast=True)
        even = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        return tl.where(values == values, even, values)  # the bits of a GPU's NaN would become those of -0.0
    else:
        return values.to(DTYPE).to(tl.float32)


assert (CHUNK, TILE) == (64, 16)  # the kernels have these numbers in their code
