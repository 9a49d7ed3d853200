"""The gate of heads in plain torch: the specification of the kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def gate_heads(x: Tensor, gate: Tensor, norm: Tensor | None, eps: float, out_dtype: torch.dtype) -> Tensor:
    """See the package's function of this name."""
    x, gate = x.float(), gate.float()
    if norm is None:
        return (x * torch.sigmoid(gate)).to(out_dtype)
    scale = 1.0 / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale * norm * (gate * torch.sigmoid(gate))).to(out_dtype)
