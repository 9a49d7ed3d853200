"""Rows of x times the weight of their norm, and their sums of squares, made once for all programs of a decode matmul.

Owns this kernel and its launch. Where rows are few, each program of the matmul does this with the x that it reads; its
results are the same to the last bit, since the products are rounded alike and squares are added in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelm.kernels.matmul.configs import Config
from edgelm.kernels.matmul.step_kernel import columns_of, sum_of_squares
from edgelm.kernels.pdl import begin_dependent, uses_pdl


@triton.jit
def scale_rows_kernel(
    x,  # [rows, K]
    norm,  # float32 [K]
    out,  # [rows, K]
    squares,  # float32 [rows, SPLITS]: over each part of K
    x_stride,
    K: tl.constexpr,
    NW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,  # columns that are scaled together
    launch_pdl: tl.constexpr = False,
):
    """Scale one part of K of one row, and add its squares. Grid: rows, parts."""
    begin_dependent(launch_pdl)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    x += row * x_stride
    out += row * K
    EVEN: tl.constexpr = K // 64 // NW // 2 * 2
    EACH: tl.constexpr = (EVEN // 2 + SPLITS - 1) // SPLITS * 2
    STEPS: tl.constexpr = (K + 64 * NW - 1) // (64 * NW)
    PIECES: tl.constexpr = 2 if x.dtype.element_ty == tl.float32 else 1
    COLUMNS: tl.constexpr = 32 // PIECES
    first = split * EACH
    end = tl.where(split == SPLITS - 1, STEPS, tl.minimum(first + EACH, EVEN))
    limit = tl.minimum(end * (NW * 64), K)
    for start in range(first * (NW * 64), limit, BLOCK):
        at = start + tl.arange(0, BLOCK)
        factor = tl.load(norm + at, mask=at < limit, other=0.0)
        value = tl.load(x + at, mask=at < limit, other=0.0).to(tl.float32) * factor
        tl.store(out + at, value.to(x.dtype.element_ty).to(out.dtype.element_ty), mask=at < limit)
    # The squares are added as `load_x` adds those of 8 rows. The row is in the L1 cache by now.
    i = tl.arange(0, NW * 8)[:, None]
    total = tl.zeros([NW * 8, COLUMNS], tl.float32)
    for step in range(first, end):
        for part in tl.static_range(2 * PIECES):
            at = step * (NW * 64) + i // 8 * 64 + part // PIECES * 32 + columns_of(part % PIECES, PIECES)
            wide = tl.load(x + at, mask=at < limit, other=0.0).to(tl.float32)
            total = tl.fma(wide, wide, total)
    lane = tl.arange(0, 8)
    tl.store(squares + row * SPLITS + split + lane * 0, sum_of_squares(total, NW, COLUMNS), mask=lane == 0)


@triton.jit
def inverse_roots(squares, first_row, rows, eps, K: tl.constexpr, TT: tl.constexpr, SCALED: tl.constexpr):
    """Return the factors of rows that were scaled by their norm's weight, [1, 8] for each of TT blocks."""
    out: tl.tuple = ()
    if SCALED:
        for tt in tl.static_range(TT):
            row = first_row + tt * 8 + tl.arange(0, 8)[None, :]
            out += (tl.rsqrt(tl.load(squares + row, mask=row < rows, other=1.0) / K + eps),)
    return out


def scale_rows(x: Tensor, norm: Tensor, config: Config, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x times the norm's weight in this type, and the sums of squares of its parts, float32 [rows, splits]."""
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=dtype, device=x.device)
    squares = torch.empty((rows, config.splits), dtype=torch.float32, device=x.device)
    scale_rows_kernel[(rows, config.splits)](
        x, norm, out, squares, x.stride(0), K=columns, NW=config.warps, SPLITS=config.splits,
        BLOCK=min(triton.next_power_of_2(columns), 512 * config.warps), num_warps=config.warps, enable_fp_fusion=True,
        launch_pdl=uses_pdl(),
    )  # fmt: skip
    return out, squares
