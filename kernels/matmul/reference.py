"""Matmul in plain torch and float32: the specification."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from edgelm.kernels.activation import Gate, gated_values
from edgelm.kernels.layout import TILE, PackedWeight, Weight, dequantize, row_parts


class Norm(NamedTuple):
    """RMSNorm: x / sqrt(mean(x**2) + eps) * weight."""

    weight: Tensor  # float32 [columns of x]
    eps: float


class Lengths(NamedTuple):
    """What a norm still has to divide rows by, which are multiplied by its weight already."""

    squares: Tensor  # float32 [rows, ceil(K / TILE)]: of the rows before, the sums of TILE columns each
    eps: float


def matmul(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    gate: Gate | None,
    lengths: Lengths | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Return gate(x / lengths @ weight.T + bias) + residual."""
    x = x.float()
    if lengths is not None:
        x = x * inverse_lengths(lengths, x.shape[1])
    if isinstance(weight, PackedWeight) and weight.order is not None:
        x = x[:, weight.order]
    parts = [x @ dequantize(part).T for part in row_parts(weight)]
    result = finish(torch.cat(parts, 1), bias, residual, gate, out_dtype)
    return result if out is None else out.copy_(result)


def matmul_scaled(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None, factors: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y = x @ weight.T + bias + residual in float32, y * factors in `dtype`, and sums of TILE squares of y."""
    y = matmul(x, weight, bias, residual, None, None, torch.float32)
    squares = torch.nn.functional.pad(y.square(), (0, -y.shape[1] % TILE))
    return y, (y * factors).to(dtype), squares.view(len(y), -1, TILE).sum(-1)


def inverse_lengths(lengths: Lengths, columns: int) -> Tensor:
    """Return 1 / sqrt(mean of squares + eps), float32 [rows, 1], for rows of so many columns."""
    return torch.rsqrt(lengths.squares.sum(1, keepdim=True) / columns + lengths.eps)


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
