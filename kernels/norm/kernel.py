"""The norms in Triton: one program per row.

Owns the kernels and their launch. A row of up to BLOCK values stays in registers; a longer row is read again for each
pass. How a row is split depends on the hidden size alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelm.kernels.pdl import begin_dependent, uses_pdl

BLOCK = 8192  # values that a program holds at once, at most
OPTIONS = {"enable_fp_fusion": True}  # explicit, since Triton's default is about to change


@triton.jit
def _scale(sum_of_squares, hidden_size, eps):
    """Return 1 / (root mean square)."""
    return 1.0 / tl.sqrt_rn(sum_of_squares / hidden_size + eps)


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [rows, hidden_size], rows x_stride apart
    x_stride,
    weight_ptr,  # float32 [hidden_size]
    rows_ptr,  # int64: the row of x for each row of `out`; None: the same
    out_ptr,  # [rows, hidden_size]
    hidden_size,
    eps,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,  # hidden_size <= BLOCK
    launch_pdl: tl.constexpr = False,
):
    """Normalize one row. Grid: rows of `out`."""
    begin_dependent(launch_pdl)
    row = tl.program_id(0).to(tl.int64)
    out_ptr += row * hidden_size
    if rows_ptr is not None:
        row = tl.load(rows_ptr + row)
    x_ptr += row * x_stride
    at = tl.arange(0, BLOCK)
    if WHOLE:
        x = tl.load(x_ptr + at, at < hidden_size, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + at, at < hidden_size, other=0.0)
        y = x * _scale(tl.sum(x * x), hidden_size, eps) * weight
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), at < hidden_size)
    else:
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, hidden_size, BLOCK):
            x = tl.load(x_ptr + start + at, start + at < hidden_size, other=0.0).to(tl.float32)
            sums += x * x
        scale = _scale(tl.sum(sums), hidden_size, eps)
        for start in range(0, hidden_size, BLOCK):
            inside = start + at < hidden_size
            x = tl.load(x_ptr + start + at, inside, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + start + at, inside, other=0.0)
            tl.store(out_ptr + start + at, (x * scale * weight).to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _total(x_ptr, residual_ptr, post_ptr, at, inside, scale, sum_scale, POST: tl.constexpr):
    """Return the scaled sum of the residual and x (or its norm) for the columns `at`: float32 [BLOCK]."""
    x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
    if POST:
        x = x * scale * tl.load(post_ptr + at, inside, other=0.0)
    return (tl.load(residual_ptr + at, inside, other=0.0) + x) * sum_scale


@triton.jit
def add_rms_norm_kernel(
    x_ptr,  # [rows, hidden_size], rows x_stride apart
    x_stride,
    residual_ptr,  # float32 [rows, hidden_size], rows residual_stride apart
    residual_stride,
    weight_ptr,  # float32 [hidden_size]
    post_ptr,  # float32 [hidden_size], read with POST
    out_ptr,  # [rows, hidden_size]
    total_ptr,  # float32 [rows, hidden_size]
    hidden_size,
    eps,
    sum_scale,
    POST: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,  # hidden_size <= BLOCK
    launch_pdl: tl.constexpr = False,
):
    """Add one row of x, normalized with POST, to the residual, scale and normalize the sum. Grid: rows."""
    begin_dependent(launch_pdl)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    residual_ptr += row * residual_stride
    out_ptr += row * hidden_size
    total_ptr += row * hidden_size
    at = tl.arange(0, BLOCK)
    scale = 1.0
    if POST:
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, hidden_size, BLOCK):
            x = tl.load(x_ptr + start + at, start + at < hidden_size, other=0.0).to(tl.float32)
            sums += x * x
        scale = _scale(tl.sum(sums), hidden_size, eps)
    if WHOLE:
        total = _total(x_ptr, residual_ptr, post_ptr, at, at < hidden_size, scale, sum_scale, POST)
        weight = tl.load(weight_ptr + at, at < hidden_size, other=0.0)
        tl.store(total_ptr + at, total, at < hidden_size)
        y = total * _scale(tl.sum(total * total), hidden_size, eps) * weight
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), at < hidden_size)
    else:
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, hidden_size, BLOCK):
            inside = start + at < hidden_size
            total = _total(x_ptr, residual_ptr, post_ptr, start + at, inside, scale, sum_scale, POST)
            sums += total * total
        total_scale = _scale(tl.sum(sums), hidden_size, eps)
        for start in range(0, hidden_size, BLOCK):  # recomputed: another thread's store may not be visible yet
            inside = start + at < hidden_size
            total = _total(x_ptr, residual_ptr, post_ptr, start + at, inside, scale, sum_scale, POST)
            weight = tl.load(weight_ptr + start + at, inside, other=0.0)
            tl.store(total_ptr + start + at, total, inside)
            tl.store(out_ptr + start + at, (total * total_scale * weight).to(out_ptr.dtype.element_ty), inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, rows: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Launch `rms_norm_kernel`."""
    hidden_size = x.shape[-1]
    shape = x.shape if rows is None else (len(rows), hidden_size)
    every, out = _rows(x), torch.empty(shape, dtype=out_dtype, device=x.device)
    block, num_warps = launch_shape(hidden_size)
    if out.numel():
        rms_norm_kernel[(out.numel() // hidden_size,)](
            every,
            every.stride(0),
            weight,
            rows,
            out,
            hidden_size,
            eps,
            BLOCK=block,
            WHOLE=hidden_size <= block,
            num_warps=num_warps,
            **OPTIONS,
            launch_pdl=uses_pdl(),
        )
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    post_weight: Tensor | None,
    scale: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Launch `add_rms_norm_kernel`."""
    rows, residual_rows = _rows(x), _rows(residual)
    out, total = _like(x, out_dtype), _like(x, torch.float32)
    hidden_size = x.shape[-1]
    block, num_warps = launch_shape(hidden_size)
    if len(rows):
        add_rms_norm_kernel[(len(rows),)](
            rows,
            rows.stride(0),
            residual_rows,
            residual_rows.stride(0),
            weight,
            weight if post_weight is None else post_weight,
            out,
            total,
            hidden_size,
            eps,
            scale,
            POST=post_weight is not None,
            BLOCK=block,
            WHOLE=hidden_size <= block,
            num_warps=num_warps,
            **OPTIONS,
            launch_pdl=uses_pdl(),
        )
    return out, total


def launch_shape(hidden_size: int) -> tuple[int, int]:
    """Return the block of a program and its number of warps."""
    block = min(max(triton.next_power_of_2(hidden_size), 128), BLOCK)
    return block, min(max(block // 512, 1), 16)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)
