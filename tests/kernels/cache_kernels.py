"""Kernels that do nothing but what kernels/cache/kernel.py has: rotate, and round to codes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelm.kernels.cache.kernel import hadamard, quantize
from edgelm.kernels.cache.quantize import CodeKind, num_groups


@triton.jit
def rotate_kernel(x_ptr, out_ptr, rows: tl.constexpr, width: tl.constexpr):
    at = tl.arange(0, rows)[:, None] * width + tl.arange(0, width)[None, :]
    tl.store(out_ptr + at, hadamard(tl.load(x_ptr + at), rows, width))


@triton.jit
def quantize_kernel(
    x_ptr, codes_ptr, scales_ptr, kind: tl.constexpr, rows: tl.constexpr, width: tl.constexpr, groups: tl.constexpr
):
    row = tl.arange(0, rows)[:, None]
    at = row * width + tl.arange(0, width)[None, :]
    codes, scales = quantize(tl.load(x_ptr + at), kind, rows, width)
    tl.store(codes_ptr + at, codes)
    tl.store(scales_ptr + row * groups + tl.arange(0, groups)[None, :], scales)


def rotated(x: Tensor) -> Tensor:  # float32 [a power of two, another of at least 32]
    """Return the groups of 32 of the last dimension rotated."""
    out = torch.empty_like(x)
    rotate_kernel[(1,)](x, out, *x.shape, enable_fp_fusion=False)
    return out


def quantized(x: Tensor, kind: CodeKind) -> tuple[Tensor, Tensor]:  # float32 [a power of two, another of at least 32]
    """Return what edgelm.kernels.cache.quantize.encode does."""
    codes = torch.empty(x.shape, dtype=torch.int32)
    scales = torch.empty(len(x), num_groups(x.shape[1], kind), dtype=torch.float16)
    quantize_kernel[(1,)](x, codes, scales, kind, *x.shape, scales.shape[1], enable_fp_fusion=False)
    return (codes & 255).to(torch.uint8), scales
