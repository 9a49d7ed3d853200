"""Gates and the soft cap in plain torch: the specification of the kernels, of those that fuse a gate too."""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.gates import Gate


def gated_values(gate: Tensor, up: Tensor, kind: Gate) -> Tensor:
    """Return the gated values in float32, for inputs of any type; NaN stays NaN."""
    gate, up = gate.float(), up.float()
    match kind.kind:
        case "silu":
            return gate * torch.sigmoid(gate) * up
        case "gelu":
            return torch.nn.functional.gelu(gate) * up
        case "gelu_tanh":
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        case "swiglu_oai":
            gate = gate.clamp(max=kind.limit)
            return gate * torch.sigmoid(kind.alpha * gate) * (up.clamp(-kind.limit, kind.limit) + 1.0)


def gated(x: Tensor, gate: Gate) -> Tensor:
    """See the package's function of this name."""
    first, second = x.chunk(2, 1)
    return gated_values(first, second, gate).to(x.dtype)


def softcap(x: Tensor, cap: float, out: Tensor | None = None) -> Tensor:
    """See the package's function of this name."""
    result = (cap * torch.tanh(x.float() / cap)).to(x.dtype).contiguous()
    return result if out is None else out.copy_(result)
