"""Normalization of rows: RMSNorm, and RMSNorm of a residual sum.

Owns the signatures and the choice of implementation. The arithmetic is float32 for all types; a row's result depends
on that row alone, so it is the same in any batch. Knows nothing of models: an offset of the weight (Gemma's 1 + w) is
part of the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.choice import dispatch
from edgelm.kernels.norm import reference


def rms_norm(
    x: Tensor,  # [..., hidden_size], the last dimension contiguous
    weight: Tensor,  # float32 [hidden_size]
    eps: float,
    *,
    rows: Tensor | None = None,  # int64 [rows]: which rows of x, [tokens, hidden_size], to normalize
    out_dtype: torch.dtype | None = None,  # default: the type of x
    implementation: str | None = None,
) -> Tensor:
    """Return x / sqrt(mean(x**2) + eps) * weight for each row, or for each of `rows`."""
    _check(x, weight)
    assert rows is None or (x.dim() == 2 and rows.dim() == 1 and rows.dtype == torch.int64 and rows.is_contiguous())
    args = weight, eps, rows, out_dtype or x.dtype
    return dispatch("rms_norm", __name__, reference.rms_norm, implementation, x, *args)


def add_rms_norm(
    x: Tensor,  # [..., hidden_size], the last dimension contiguous
    residual: Tensor,  # float32, the shape of x
    weight: Tensor,  # float32 [hidden_size]
    eps: float,
    *,
    post_weight: Tensor | None = None,  # float32 [hidden_size]
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,  # default: the type of x
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(total, weight), total), where total = (residual + x) * scale is a new float32 tensor.

    With `post_weight`, rms_norm(x, post_weight) is added instead of x; it is not rounded in between.
    """
    _check(x, weight, post_weight)
    assert residual.shape == x.shape, (residual.shape, x.shape)
    assert residual.dtype == torch.float32, residual.dtype
    args = residual, weight, eps, post_weight, scale, out_dtype or x.dtype
    return dispatch("add_rms_norm", __name__, reference.add_rms_norm, implementation, x, *args)


def _check(x: Tensor, *weights: Tensor | None) -> None:
    assert x.stride(-1) == 1 or x.shape[-1] == 1, x.stride()
    for weight in weights:
        if weight is not None:
            assert weight.shape == x.shape[-1:], (weight.shape, x.shape)
            assert weight.dtype == torch.float32, weight.dtype
