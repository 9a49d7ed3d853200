"""Normalisation of rows: RMSNorm, RMSNorm of a residual sum, LayerNorm.

Owns the signatures and the choice of implementation. Arithmetic is in float32 whatever the types; a row's result
depends on that row alone, so it is the same among any number of rows. Knows nothing of models: an offset of a weight
(Gemma's 1 + w) is in the weight.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from edgelm.kernels.choice import Implementation, choose, declines_reference, declines_triton
from edgelm.kernels.norm import reference


def rms_norm(
    x: Tensor,  # [..., width], the last dimension contiguous
    weight: Tensor,  # float32 [width]
    eps: float,
    *,
    out_dtype: torch.dtype | None = None,  # default: that of x
    implementation: str | None = None,
) -> Tensor:
    """Return x / sqrt(mean(x**2) + eps) * weight, row by row."""
    _check(x, weight)
    arguments = x, weight, eps, out_dtype or x.dtype

    def run_triton(*arguments: Any) -> object:
        from edgelm.kernels.norm import triton

        return triton.rms_norm(*arguments)

    implementations = (
        Implementation("triton", lambda x, *_: declines_triton(x), run_triton),
        Implementation("reference", lambda x, *_: declines_reference(x, implementation), reference.rms_norm),
    )
    return cast(Tensor, choose("rms_norm", implementations, implementation, *arguments).run(*arguments))


def add_rms_norm(
    x: Tensor,  # [..., width], the last dimension contiguous
    residual: Tensor,  # float32, the shape of x
    weight: Tensor,  # float32 [width]
    eps: float,
    *,
    post_weight: Tensor | None = None,  # float32 [width]
    out_dtype: torch.dtype | None = None,  # default: that of x
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(sum, weight), sum), where sum = residual + x, in float32 and a new tensor.

    With `post_weight` what is added is rms_norm(x, post_weight), not rounded in between.
    """
    _check(x, weight, post_weight)
    assert residual.shape == x.shape, (residual.shape, x.shape)
    assert residual.dtype == torch.float32, residual.dtype
    arguments = x, residual, weight, eps, post_weight, out_dtype or x.dtype

    def run_triton(*arguments: Any) -> object:
        from edgelm.kernels.norm import triton

        return triton.add_rms_norm(*arguments)

    implementations = (
        Implementation("triton", lambda x, *_: declines_triton(x), run_triton),
        Implementation("reference", lambda x, *_: declines_reference(x, implementation), reference.add_rms_norm),
    )
    chosen = choose("add_rms_norm", implementations, implementation, *arguments)
    return cast(tuple[Tensor, Tensor], chosen.run(*arguments))


def layer_norm(
    x: Tensor,  # [..., width], the last dimension contiguous
    weight: Tensor,  # float32 [width]
    bias: Tensor | None,  # float32 [width]
    eps: float,
    *,
    out_dtype: torch.dtype | None = None,  # default: that of x
    implementation: str | None = None,
) -> Tensor:
    """Return (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, row by row."""
    _check(x, weight, bias)
    arguments = x, weight, bias, eps, out_dtype or x.dtype

    def run_triton(*arguments: Any) -> object:
        from edgelm.kernels.norm import triton

        return triton.layer_norm(*arguments)

    implementations = (
        Implementation("triton", lambda x, *_: declines_triton(x), run_triton),
        Implementation("reference", lambda x, *_: declines_reference(x, implementation), reference.layer_norm),
    )
    return cast(Tensor, choose("layer_norm", implementations, implementation, *arguments).run(*arguments))


def _check(x: Tensor, *weights: Tensor | None) -> None:
    assert x.stride(-1) == 1 or x.shape[-1] == 1, x.stride()
    for weight in weights:
        if weight is not None:
            assert weight.shape == x.shape[-1:], (weight.shape, x.shape)
            assert weight.dtype == torch.float32, weight.dtype
