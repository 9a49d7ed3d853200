"""The fused matmul of a prompt in Triton: weights are dequantized in registers, in the order of the tensor cores.

Owns the kernel, for one matrix and for a stack of experts, and its launch. Knows nothing of how pairs are sorted by
expert, or of decoding.

A program multiplies T tiles of the weight by BM rows of x: out.T = weight @ x.T, since the words of a weight are
fragments of a left operand. x is first copied into the order of a fragment, so that its tiles can be loaded ahead
asynchronously. Where tiles are few, K is summed in parts: each by a program of its own, and the decode matmul's
`combine_kernel` adds them in order; or, where there are enough programs without, by one program in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelm.kernels.activation import Gate
from edgelm.kernels.activation.kernel import gate_constants, gated_values
from edgelm.kernels.choice import interpreting
from edgelm.kernels.dequant_gemm.configs import Shape, Split, max_registers, shape_for, split_of
from edgelm.kernels.dequantize.kernel import constants, half_values, matrix_planes, rounded, unpack_chunk
from edgelm.kernels.gpu_target import has_wgmma, kwidth, num_sms, stages_of_products
from edgelm.kernels.layout import CHUNK, TILE, PackedWeight, Weight, planes
from edgelm.kernels.matmul.kernel import combine_kernel
from edgelm.kernels.pdl import begin_dependent, uses_pdl
from edgelm.kernels.unpack import fragment

COMBINED = 512  # columns of a program that adds parts


class Groups(NamedTuple):
    """The matrix of each row: a `grouped.reference.Plan`, and how many pairs share a row of x."""

    order: Tensor
    blocks: Tensor
    shared: int


def dequant_gemm(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    gate: Gate | None,
    out_dtype: torch.dtype,
    split: Split | None = None,
) -> Tensor:
    """Multiply rows by one matrix."""
    width = weight.rows // 2 if gate is not None else weight.rows
    out = torch.empty((len(x), width), dtype=out_dtype, device=x.device)
    if isinstance(weight, PackedWeight) and weight.order is not None:
        x = x[:, weight.order]
    if split is None:
        split = split_of(len(x), weight, num_sms(x.device))
    launch(x, weight, out, bias, residual, gate, shape_for(len(x), x.dtype), split=split)
    return out


def launch(
    x: Tensor,  # columns in the weight's order
    weight: Weight,
    out: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gate: Gate | None,
    shape: Shape,
    groups: Groups | None = None,
    split: Split | None = None,
) -> None:
    """Multiply rows, or the pairs of `groups`, into `out` [rows, width]."""
    if isinstance(weight, PackedWeight):
        *_, tiles, chunks, _ = weight.codes.shape
        x = in_fragment_order(x, chunks, weight.layout.group, kwidth())
        parts = planes(weight)
    else:
        tiles, chunks = triton.cdiv(weight.rows, TILE), triton.cdiv(weight.columns, CHUNK)
        x = _padded(x, chunks)
        parts = {"codes": weight.data.contiguous()}
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    num_blocks = len(groups.blocks) if groups is not None else triton.cdiv(len(x), shape.rows)
    if num_blocks == 0 or len(out) == 0:
        return
    num_parts = 1 if split is None else split.parts
    partial = None
    if split is not None and split.apart:
        partial = torch.empty((len(out), num_parts, tiles * TILE), dtype=torch.float32, device=x.device)
    bias = None if bias is None else bias.contiguous()
    residual_stride = residual.stride(0) if residual is not None else 0
    together = partial is None
    dequant_gemm_kernel[(num_blocks, triton.cdiv(tiles, shape.tiles), 1 if together else num_parts)](
        x,
        parts["codes"],
        parts.get("high"),
        parts.get("scales"),
        parts.get("offsets"),
        parts.get("supers"),
        bias if together else None,
        residual if together else None,
        out,
        partial,
        groups.blocks if groups is not None else None,
        groups.order if groups is not None else None,
        len(out),
        weight.rows,
        tiles,
        max(weight.num_matrices, 1),
        residual_stride if together else 0,
        columns=weight.columns,
        **constants(weight),
        SHARED=groups.shared if groups is not None else 1,
        PARTS=num_parts,
        T=shape.tiles,
        BM=shape.rows,
        **gate_constants(gate if together else None),
        KW=kwidth(),
        ASM=not interpreting(),
        enable_fp_fusion=False,  # round the weights as `dequantize` does
        num_warps=shape.num_warps,
        num_stages=stages_of_products(shape.num_stages),
        maxnreg=max_registers(shape, wgmma=has_wgmma()),
        launch_pdl=uses_pdl(),
    )
    if partial is not None:
        combine_kernel[(triton.cdiv(out.shape[1], COMBINED), len(out))](
            partial, bias, residual, None, None, out, None, None, residual_stride, 0.0, N=weight.rows, K=weight.columns,
            **gate_constants(gate), SPLITS=num_parts, BLOCK=COMBINED, num_warps=4,
            enable_fp_fusion=False,  # as in the kernel above, which has the same result without a second one
            launch_pdl=uses_pdl(),
        )  # fmt: skip


def in_fragment_order(x: Tensor, chunks: int, group: int, kw: int) -> Tensor:
    """Return x padded to whole chunks, with the columns of each half chunk in the order of `fragment`."""
    parts = _padded(x, chunks)
    if group == 16:
        parts = parts.reshape(len(x), chunks * 2, 2, 4, 2, 2).transpose(2, 3)
    else:
        parts = parts.reshape(len(x), chunks * 2, 4, 2, 2, 2)
    # [.., lm, p, jb, h]
    parts = parts.permute(0, 1, 3, 4, 2, 5) if kw == 2 else parts.permute(0, 1, 3, 2, 4, 5)
    return parts.reshape(len(x), chunks * CHUNK).contiguous()


def _padded(x: Tensor, chunks: int) -> Tensor:
    missing = chunks * CHUNK - x.shape[1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x.contiguous()  # pad copies in any case


@triton.jit(do_not_specialize=["rows"])  # of a step: a prompt of another length compiles nothing
def dequant_gemm_kernel(
    x,  # [rows of x, chunks * 64]
    codes,  # planes of a matrix or of a stack; for a dense weight its data
    high,
    scales,
    offsets,
    supers,
    bias,  # [matrices, width]
    residual,  # [rows, width], with a gate [rows, width / 2]
    out,  # as residual
    partial,  # float32 [rows, PARTS, tiles * 16], or None
    blocks,  # int32 [blocks, 3]: matrix, first and end in `order`
    order,  # int32 [rows]
    rows,
    width,  # rows of a matrix
    tiles,  # tiles of a matrix
    matrices,
    residual_stride,
    columns: tl.constexpr,
    chunks: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    CODE: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    BOOK: tl.constexpr,
    SHARED: tl.constexpr,  # pairs that share a row of x
    PARTS: tl.constexpr,  # of K, summed apart: by programs if there is `partial`, else by one, with the same result
    T: tl.constexpr,  # tiles of a program
    BM: tl.constexpr,  # rows of a program
    GATE: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    KW: tl.constexpr,
    ASM: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """Multiply T tiles of one matrix by BM rows of x, then apply bias, gate and residual."""
    begin_dependent(launch_pdl)
    index = tl.arange(0, BM)
    if order is None:
        matrix = 0
        row = tl.program_id(0) * BM + index
        valid = row < rows
    else:
        matrix = tl.load(blocks + tl.program_id(0) * 3)
        if matrix < 0:
            return
        first = tl.load(blocks + tl.program_id(0) * 3 + 1)
        valid = index < tl.load(blocks + tl.program_id(0) * 3 + 2) - first
        row = tl.load(order + first + index, mask=valid, other=0)
    row = row.to(tl.int64)
    start = tl.cast(matrix, tl.int64)
    tile = tl.program_id(1) * T + tl.arange(0, T)
    mask = tile < tl.where(matrix < matrices, tiles, 0)

    if BITS == 16:
        codes += (start * width + tl.program_id(1) * (T * 16)) * columns  # 64 bits: a vocabulary has more than 2**31
    else:
        codes, high, scales, offsets, supers = matrix_planes(
            codes, high, scales, offsets, supers, start * tiles, chunks, BITS, GROUP, OFFSET
        )

    x_at = x + (row // SHARED * (chunks * 64))[:, None] + tl.arange(0, 64)[None, :]
    dense_rows = tl.where(matrix < matrices, width, 0)
    EACH: tl.constexpr = chunks // PARTS  # known, so that the compiler sees that the loop runs
    acc = tl.zeros([T * 16, BM], tl.float32)
    if PARTS == 1 or partial is not None:
        first = 0 if PARTS == 1 else tl.program_id(2) * EACH
        acc = _add_products(
            acc, first, EACH, x_at, codes, high, scales, offsets, supers, tile, mask, valid,
            dense_rows, columns, chunks, BITS, GROUP, SCALE, CODE, ZERO, OFFSET, BOOK, T, KW, ASM,
        )  # fmt: skip
    else:
        for first in range(0, chunks, EACH):
            part = tl.zeros([T * 16, BM], tl.float32)
            acc += _add_products(
                part, first, EACH, x_at, codes, high, scales, offsets, supers, tile, mask,
                valid, dense_rows, columns, chunks, BITS, GROUP, SCALE, CODE, ZERO, OFFSET, BOOK, T, KW, ASM,
            )  # fmt: skip

    line = tl.program_id(1) * (T * 16) + tl.arange(0, T * 16)
    if partial is not None:
        at = (row[:, None] * PARTS + tl.program_id(2)) * (tiles * 16) + line[None, :]
        tl.store(partial + at, tl.trans(acc), mask=valid[:, None] & (line < width)[None, :])
        return
    if bias is not None:
        added = tl.load(bias + start * width + line, mask=line < tl.where(matrix < matrices, width, 0), other=0.0)
        acc += added.to(tl.float32)[:, None]
    if GATE is not None:
        pairs = tl.permute(tl.reshape(acc, [T // 2, 2, 16, BM]), [0, 2, 3, 1])
        gate, up = tl.split(pairs)
        acc = tl.reshape(gated_values(gate, up, GATE, LIMIT, ALPHA), [T * 8, BM])
        line = tl.program_id(1) * (T * 8) + tl.arange(0, T * 8)
        width = width // 2
    y = tl.trans(acc)
    inside = valid[:, None] & (line < width)[None, :]
    if residual is not None:
        y += tl.load(residual + row[:, None] * residual_stride + line[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + row[:, None] * width + line[None, :],
        rounded(y, out.dtype.element_ty, ASM).to(out.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def _add_products(
    acc,  # float32 [T * 16, BM]
    first,  # chunk of K
    COUNT: tl.constexpr,  # of chunks
    x_at,
    codes,
    high,
    scales,
    offsets,
    supers,
    tile,
    mask,
    valid,
    dense_rows,  # of a dense weight
    columns: tl.constexpr,
    chunks: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    CODE: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    BOOK: tl.constexpr,
    T: tl.constexpr,
    KW: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add the products of COUNT chunks to the sums."""
    DTYPE: tl.constexpr = x_at.dtype.element_ty
    FAST: tl.constexpr = ASM and tl.float32 != DTYPE
    for step in range(COUNT):
        chunk = first + step
        right = tl.load(x_at + chunk * 64, mask=valid[:, None], other=0.0)
        if BITS == 16:
            line = tl.program_id(1) * (T * 16) + tl.arange(0, T * 16)
            column = chunk * 64 + tl.arange(0, 64)
            read = (line < dense_rows)[:, None]
            if columns % 64 != 0:
                read = read & (column < columns)[None, :]
            at = tl.arange(0, T * 16)[:, None] * columns + column[None, :]
            left = tl.load(codes + at, mask=read, other=0.0)
        else:
            raw = unpack_chunk(codes, high, tile * chunks + chunk, mask, T, KW, BITS, CODE, ZERO, BOOK, DTYPE, FAST)
            low = _half_fragment(
                raw, 0, scales, offsets, supers, tile, chunk, mask, columns, chunks, T, GROUP, SCALE, OFFSET,
                DTYPE, FAST,
            )  # fmt: skip
            top = _half_fragment(
                raw, 1, scales, offsets, supers, tile, chunk, mask, columns, chunks, T, GROUP, SCALE, OFFSET,
                DTYPE, FAST,
            )  # fmt: skip
            left = tl.permute(tl.reshape(tl.join(low, top), [T * 16, 32, 2]), [0, 2, 1])
            left = tl.reshape(left, [T * 16, 64])
        if not FAST:
            left = left.to(tl.float32)  # the interpreter has no bfloat16 dot; products are exact either way
            right = right.to(tl.float32)
        acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    return acc


@triton.jit
def _half_fragment(
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
    T: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    DTYPE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Return half g of a chunk of T tiles, rounded to DTYPE, as the left operand [T, 16, 32]."""
    p0h0, p0h1, p1h0, p1h1 = half_values(
        raw, g, scales, offsets, supers, tile, chunk, mask, columns, chunks, GROUP, SCALE, OFFSET, DTYPE, FAST
    )
    return fragment(p0h0, p0h1, p1h0, p1h1, T)
