"""The gates of feed-forward blocks: a nonlinearity of the gate rows times the up rows.

Owns what each kind computes, for the kernels that fuse it and for those that do not. Knows nothing of how a weight
interleaves its rows.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

GateKind = Literal["silu", "gelu", "gelu_tanh", "swiglu_oai"]


class Gate(NamedTuple):
    """One gate. Only swiglu_oai reads the limit and alpha."""

    kind: GateKind
    limit: float = 7.0
    alpha: float = 1.702


def gated_values(gate: Tensor, up: Tensor, kind: Gate) -> Tensor:
    """Return the gated values in float32, whatever the types of the inputs; NaN stays NaN."""
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
