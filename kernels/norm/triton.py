"""The norms in Triton: one program a row.

Owns the kernels and their launch. A row of up to BLOCK values stays in registers; a wider one is read again for each
pass. How a row is cut depends on its width alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192  # values that a program holds at once, at most
OPTIONS = {"enable_fp_fusion": True}  # said, since Triton's default is about to change


@triton.jit
def _scale(squares, width, eps):
    """Return the reciprocal of the root mean square, given the sum of the squares."""
    return 1.0 / tl.sqrt_rn(squares / width + eps)


@triton.jit
def rms_norm_kernel(x_ptr, x_stride, weight_ptr, out_ptr, width, eps, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    out_ptr += row * width
    at = tl.arange(0, BLOCK)
    if WHOLE:
        x = tl.load(x_ptr + at, at < width, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + at, at < width, other=0.0)
        y = x * _scale(tl.sum(x * x), width, eps) * weight
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), at < width)
    else:
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            x = tl.load(x_ptr + start + at, start + at < width, other=0.0).to(tl.float32)
            sums += x * x
        scale = _scale(tl.sum(sums), width, eps)
        for start in range(0, width, BLOCK):
            inside = start + at < width
            x = tl.load(x_ptr + start + at, inside, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + start + at, inside, other=0.0)
            tl.store(out_ptr + start + at, (x * scale * weight).to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _total(x_ptr, residual_ptr, post_ptr, at, inside, scale, POST: tl.constexpr):
    """Return the residual plus what is added to it, of the values at `at`."""
    x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
    if POST:
        x = x * scale * tl.load(post_ptr + at, inside, other=0.0)
    return tl.load(residual_ptr + at, inside, other=0.0) + x


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    x_stride,
    residual_ptr,
    residual_stride,
    weight_ptr,
    post_ptr,
    out_ptr,
    total_ptr,
    width,
    eps,
    POST: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    residual_ptr += row * residual_stride
    out_ptr += row * width
    total_ptr += row * width
    at = tl.arange(0, BLOCK)
    scale = 1.0
    if POST:
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            x = tl.load(x_ptr + start + at, start + at < width, other=0.0).to(tl.float32)
            sums += x * x
        scale = _scale(tl.sum(sums), width, eps)
    if WHOLE:
        total = _total(x_ptr, residual_ptr, post_ptr, at, at < width, scale, POST)
        weight = tl.load(weight_ptr + at, at < width, other=0.0)
        tl.store(total_ptr + at, total, at < width)
        y = total * _scale(tl.sum(total * total), width, eps) * weight
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), at < width)
    else:
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            inside = start + at < width
            total = _total(x_ptr, residual_ptr, post_ptr, start + at, inside, scale, POST)
            sums += total * total
        total_scale = _scale(tl.sum(sums), width, eps)
        for start in range(0, width, BLOCK):  # the sum is made again: another thread's store may not be seen yet
            inside = start + at < width
            total = _total(x_ptr, residual_ptr, post_ptr, start + at, inside, scale, POST)
            weight = tl.load(weight_ptr + start + at, inside, other=0.0)
            tl.store(total_ptr + start + at, total, inside)
            tl.store(out_ptr + start + at, (total * total_scale * weight).to(out_ptr.dtype.element_ty), inside)


@triton.jit
def layer_norm_kernel(
    x_ptr, x_stride, weight_ptr, bias_ptr, out_ptr, width, eps, BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    out_ptr += row * width
    at = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        sums += tl.load(x_ptr + start + at, start + at < width, other=0.0).to(tl.float32)
    mean = tl.sum(sums) / width
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + at < width
        x = tl.load(x_ptr + start + at, inside, other=0.0).to(tl.float32) - mean
        sums += tl.where(inside, x * x, 0.0)
    scale = _scale(tl.sum(sums), width, eps)
    for start in range(0, width, BLOCK):
        inside = start + at < width
        x = tl.load(x_ptr + start + at, inside, other=0.0).to(tl.float32) - mean
        y = x * scale * tl.load(weight_ptr + start + at, inside, other=0.0)
        if BIAS:
            y += tl.load(bias_ptr + start + at, inside, other=0.0)
        tl.store(out_ptr + start + at, y.to(out_ptr.dtype.element_ty), inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    """Launch `rms_norm_kernel`."""
    rows, out = _rows(x), _like(x, out_dtype)
    width = x.shape[-1]
    block, warps = launch_shape(width)
    if len(rows):
        rms_norm_kernel[(len(rows),)](
            rows,
            rows.stride(0),
            weight,
            out,
            width,
            eps,
            BLOCK=block,
            WHOLE=width <= block,
            num_warps=warps,
            **OPTIONS,
        )
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, post_weight: Tensor | None, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Launch `add_rms_norm_kernel`."""
    rows, residual_rows = _rows(x), _rows(residual)
    out, total = _like(x, out_dtype), _like(x, torch.float32)
    width = x.shape[-1]
    block, warps = launch_shape(width)
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
            width,
            eps,
            POST=post_weight is not None,
            BLOCK=block,
            WHOLE=width <= block,
            num_warps=warps,
            **OPTIONS,
        )
    return out, total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out_dtype: torch.dtype) -> Tensor:
    """Launch `layer_norm_kernel`."""
    rows, out = _rows(x), _like(x, out_dtype)
    width = x.shape[-1]
    block, warps = launch_shape(width)
    if len(rows):
        layer_norm_kernel[(len(rows),)](
            rows,
            rows.stride(0),
            weight,
            weight if bias is None else bias,
            out,
            width,
            eps,
            BIAS=bias is not None,
            BLOCK=block,
            num_warps=warps,
            **OPTIONS,
        )
    return out


def launch_shape(width: int) -> tuple[int, int]:
    """Return the block and the warps of a program."""
    block = min(max(triton.next_power_of_2(width), 128), BLOCK)
    return block, min(max(block // 512, 1), 16)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)
