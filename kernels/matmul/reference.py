"""Matmul in plain torch and float32: the specification."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from edgelm.kernels.activation import Gate, gated_values
from edgelm.kernels.layout import TILE, PackedWeight, Weight, dequantize, row_parts


class Norm(NamedTuple):
    """RMSNorm of the input: x / rms(x) * weight."""

    weight: Tensor  # float32 [K]
    eps: float


def matmul(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    gate: Gate | None,
    norm: Norm | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Return gate(norm(x) @ weight.T + bias) + residual."""
    x = x.float()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
    if isinstance(weight, PackedWeight) and weight.order is not None:
        x = x[:, weight.order]
    parts = [x @ dequantize(part).T for part in row_parts(weight)]
    result = finish(torch.cat(parts, 1), bias, residual, gate, out_dtype)
    return result if out is None else out.copy_(result)


def finish(
    y: Tensor, bias: Tensor | None, residual: Tensor | None, gate: Gate | None, out_dtype: torch.dtype
) -> Tensor:
    """Apply bias, gate and residual, in this order, to a product y, float32 [rows, N]."""
    if bias is not None:
        y = y + bias.float()
    if gate is not None:
        y = gated_values(*gate_and_up(y), gate)
    if residual is not None:
        y = y + residual.float()
    return y.to(out_dtype)


def gate_and_up(y: Tensor) -> tuple[Tensor, Tensor]:
    """Split columns [rows, N] of alternating tiles into those of gate and those of up, [rows, N / 2] each."""
    tiles = y.reshape(len(y), -1, 2, TILE)
    return tiles[:, :, 0].flatten(1), tiles[:, :, 1].flatten(1)
