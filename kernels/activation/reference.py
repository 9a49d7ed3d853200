"""The activations in plain torch: the specification of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.gate import Gate, gated_values

_TILE = 16


def gated(x: Tensor, gate: Gate, alternating: bool) -> Tensor:
    """See the package's function of this name."""
    rows = len(x)
    pairs = x.reshape(rows, -1, 2, _TILE) if alternating else x.reshape(rows, 1, 2, x.shape[1] // 2)
    values = gated_values(pairs[:, :, 0], pairs[:, :, 1], gate)  # [rows, tiles, tile]
    return values.reshape(rows, x.shape[1] // 2).to(x.dtype)


def softcap(x: Tensor, cap: float) -> Tensor:
    """See the package's function of this name."""
    return (cap * torch.tanh(x.float() / cap)).to(x.dtype).contiguous()
