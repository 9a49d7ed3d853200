"""The norms in plain torch: the specification of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, rows: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """See the package's function of this name."""
    if rows is not None:
        x = x[rows]
    return _normed(x.float(), weight, eps).to(out_dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    post_weight: Tensor | None,
    scale: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See the package's function of this name."""
    addend = x.float() if post_weight is None else _normed(x.float(), post_weight, eps)
    total = (residual + addend) * scale
    return _normed(total, weight, eps).to(out_dtype), total


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
