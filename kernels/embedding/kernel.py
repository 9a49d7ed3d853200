"""Embedding rows in Triton: each column of a row finds its own word in the planes.

Owns the kernels and their launch. A word is read once for each of its codes, which costs nothing for so few rows;
kernels that read whole weights use the device functions of kernels/dequantize/kernel.py instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelm.kernels.choice import interpreting
from edgelm.kernels.dequantize.kernel import e8m0_value, rounded
from edgelm.kernels.layout import CHUNK, SUPER, TILE, DenseWeight, PackedWeight, Weight, layout_constants
from edgelm.kernels.pdl import begin_dependent, uses_pdl
from edgelm.kernels.unpack import e4m3_value

COLUMNS = 512  # of a program: with 1024, the assembler gives sm_90 too few registers to load all at one time


def embedding(ids: Tensor, weight: Weight, scale: float, out_dtype: torch.dtype, last: Tensor | None = None) -> Tensor:
    """Return rows of a weight; an id outside of it gives zeros."""
    num_last, last_stride = (0, 0) if last is None else (len(last), last.stride(0))
    out = torch.empty((len(ids), weight.columns), dtype=out_dtype, device=ids.device)
    if isinstance(weight, DenseWeight):
        data = weight.data.contiguous()
        block = min(COLUMNS, triton.next_power_of_2(weight.columns))
        grid = (len(ids), triton.cdiv(weight.columns, block))
        if len(ids):
            dense_kernel[grid](
                ids, last, data, out, num_last, last_stride, weight.rows, scale, columns=weight.columns,
                COLUMNS=block, ASM=not interpreting(), launch_pdl=uses_pdl(),
            )  # fmt: skip
        return out
    launch = packed_constants(weight)
    grid = (len(ids), triton.cdiv(weight.columns, launch["COLUMNS"]))
    if len(ids):
        packed_kernel[grid](
            ids,
            last,
            weight.codes,
            weight.high,
            weight.scales,
            weight.offsets,
            weight.supers,
            weight.order,
            out,
            num_last,
            last_stride,
            weight.rows,
            scale,
            **launch,
            enable_fp_fusion=False,  # round after the multiplication and after the addition, as ggml does
            launch_pdl=uses_pdl(),
        )
    return out


def packed_constants(weight: PackedWeight) -> dict[str, object]:
    """Return the constexprs of `packed_kernel` for a weight."""
    constants = layout_constants(weight.layout)
    book = constants["BOOK"]
    assert isinstance(book, int)
    return constants | {
        "columns": weight.columns,
        "chunks": weight.codes.shape[-2],
        "BOOK": tuple(book >> 32 * i & 0xFFFFFFFF for i in range(4)),
        "ORDER": weight.order is not None,
        "COLUMNS": min(COLUMNS, triton.next_power_of_2(weight.columns)),
        "ASM": not interpreting(),
    }


@triton.jit
def id_of(ids, last, num_last, last_stride, token):
    """Return the id of a token, int64. Below 0 it is a place in `last`, and a token below 0 there means token 0."""
    row = tl.load(ids + token).to(tl.int64)
    if last is not None:
        place = -1 - row
        named = (row < 0) & (place < num_last)
        row = tl.where(named, tl.maximum(tl.load(last + place * last_stride, mask=named, other=0), 0), row)
    return row


@triton.jit
def dense_kernel(
    ids, last, data, out, num_last, last_stride, rows, scale,
    columns: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr, launch_pdl: tl.constexpr = False,
):  # fmt: skip
    """Write COLUMNS columns of one token's row of `data` [rows, columns]."""
    begin_dependent(launch_pdl)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = id_of(ids, last, num_last, last_stride, token)
    width = tl.where((row >= 0) & (row < rows), columns, 0)
    value = tl.load(data + row * columns + column, mask=column < width, other=0.0).to(tl.float32)
    value = rounded(value * scale, out.dtype.element_ty, ASM)
    tl.store(out + token * columns + column, value.to(out.dtype.element_ty), mask=column < columns)


@triton.jit
def packed_kernel(
    ids,  # int32 or int64 [tokens]
    last,  # int64 [num_last], last_stride apart, or None
    codes,
    high,
    scales,
    offsets,
    supers,
    order,  # int64 [columns]
    out,  # [tokens, columns]
    num_last,
    last_stride,
    rows,
    scale,
    columns: tl.constexpr,
    chunks: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    CODE: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    BOOK: tl.constexpr,
    ORDER: tl.constexpr,
    COLUMNS: tl.constexpr,
    ASM: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """Write COLUMNS columns of one token's row of a packed weight."""
    begin_dependent(launch_pdl)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = id_of(ids, last, num_last, last_stride, token)
    mask = column < tl.where((row >= 0) & (row < rows), columns, 0)

    code = _code(codes, high, row, column, mask, chunks, BITS, GROUP)
    if CODE == "signed":
        value = ((code << 24) >> 24).to(tl.float32)
    elif CODE == "fp8":
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), e4m3_value(code))
    elif CODE == "codebook":
        value = _codebook_value(code, BOOK)
    else:
        value = (code - ZERO).to(tl.float32)

    PER_ENTRY: tl.constexpr = 64 // GROUP if GROUP < 64 else 1
    groups: tl.constexpr = chunks * 64 // GROUP
    group = column // GROUP
    at = ((row // 16 * (groups // PER_ENTRY) + group // PER_ENTRY) * 16 + row % 16) * PER_ENTRY + group % PER_ENTRY
    factor = tl.load(scales + at, mask=mask, other=0)
    if SCALE == "e8m0":
        factor = e8m0_value(factor)
    factor = factor.to(tl.float32)
    PARTS: tl.constexpr = 2 if OFFSET == "min" else 1
    if SCALE == "u8" or SCALE == "i8":
        above = supers + ((row // 16 * (chunks // 4) + column // 256) * 16 + row % 16) * PARTS
        factor = tl.load(above, mask=mask, other=0.0).to(tl.float32) * factor
    if OFFSET == "zero":
        value -= tl.load(offsets + at, mask=mask, other=0).to(tl.float32)
    value = factor * value
    if OFFSET == "min":
        least = tl.load(offsets + at, mask=mask, other=0).to(tl.float32)
        if SCALE == "u8" or SCALE == "i8":
            least = tl.load(above + 1, mask=mask, other=0.0).to(tl.float32) * least
        value = value + least

    value = rounded(tl.where(mask, value * scale, 0.0), out.dtype.element_ty, ASM)
    if ORDER:
        column = tl.load(order + column, mask=column < columns, other=columns)
    tl.store(out + token * columns + column, value.to(out.dtype.element_ty), mask=column < columns)


@triton.jit
def _code(codes, high, row, column, mask, chunks: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Return the codes of one row in the given columns as int32: the inverse of `layout.pack_codes`."""
    lane = row % 8 * 4 + (column // 4 % 4 if GROUP == 16 else column // 8 % 4)
    rb = row // 8 % 2
    g = column // 32 % 2
    p = column // 16 % 2 if GROUP == 16 else column // 4 % 2
    jb = column // 2 % 2
    h = column % 2
    chunk = row // 16 * chunks + column // 64
    if BITS == 8:
        word = tl.load(codes + chunk * 256 + ((g * 32 + lane) * 2 + jb) * 2 + rb, mask=mask, other=0)
        return (word >> (16 * p + 8 * h)) & 255
    s = 2 * g + p
    word = tl.load(codes + chunk * 128 + (lane * 2 + jb) * 2 + rb, mask=mask, other=0)
    code = (word >> (4 * s + 16 * h)) & 15
    if BITS == 5:
        word = tl.load(high + chunk * 32 + lane, mask=mask, other=0)
        shift = 4 * (2 * jb + rb) + s + 16 * h
        code += ((word >> shift.to(tl.int32)) & 1) << 4
    if BITS == 6:
        word = tl.load(high + chunk * 64 + lane * 2 + jb, mask=mask, other=0)
        shift = 2 * (s + 4 * rb) + 16 * h
        code += ((word >> shift.to(tl.int32)) & 3) << 4
    return code


@triton.jit
def _codebook_value(code, BOOK: tl.constexpr):
    """Look up a code among 16 signed bytes, which lie in four words; float32."""
    low = tl.where(code < 4, BOOK[0], BOOK[1])
    top = tl.where(code < 12, BOOK[2], BOOK[3])
    word = tl.where(code < 8, low, top).to(tl.int64)
    byte = (word >> (code % 4 * 8).to(tl.int64)).to(tl.int32)
    return ((byte << 24) >> 24).to(tl.float32)


assert (CHUNK, SUPER, TILE) == (64, 256, 16)  # the kernels have these numbers in their code
