"""The specification of `matmul`: plain torch, in float32."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from edgelm.kernels.gate import Gate, gated_values
from edgelm.kernels.layout import TILE, PackedWeight, Weight, dequantize


class Norm(NamedTuple):
    """RMSNorm of the input: x / rms(x) * weight."""

    weight: Tensor  # float32 [K]
    eps: float


def reference(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    gate: Gate | None,
    norm: Norm | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Compute what `matmul` promises."""
    wide = x.float()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
    return finish(product(wide, weight), bias, residual, gate, out_dtype)


def product(x: Tensor, weight: Weight) -> Tensor:
    """Return x [rows, K] @ weight.T, float32 [rows, N]."""
    matrix = dequantize(weight)
    if isinstance(weight, PackedWeight) and weight.order is not None:
        x = x[:, weight.order]
    return x.float() @ matrix.T


def finish(
    y: Tensor, bias: Tensor | None, residual: Tensor | None, gate: Gate | None, out_dtype: torch.dtype
) -> Tensor:
    """Return what follows the product y, float32 [rows, N]: bias, gate, residual, in this order."""
    if bias is not None:
        y = y + bias.float()
    if gate is not None:
        pairs = y.reshape(y.shape[0], -1, 2, TILE)
        y = gated_values(pairs[:, :, 0], pairs[:, :, 1], gate).flatten(1)
    if residual is not None:
        y = y + residual.float()
    return y.to(out_dtype)
