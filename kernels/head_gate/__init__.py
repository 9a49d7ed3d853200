"""The gate of a result of attention, of a gated delta net after its norm, or of an expert that all tokens use.

Owns the signature and the choice of implementation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.choice import dispatch
from edgelm.kernels.head_gate import reference


def gate_heads(
    x: Tensor,
    gate: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    *,
    out_dtype: torch.dtype,
    implementation: str | None = None,
) -> Tensor:
    """Return x * sigmoid(gate), with a norm RMSNorm(x) * norm * silu(gate): [rows, heads, head_dim], in `out_dtype`.

    x, gate: [rows, heads, head_dim], the last dimension contiguous. norm: float32 [head_dim]. Computed in float32.
    Without a norm, the gate may be one number for a row: [rows, 1, 1].
    """
    whole = gate.shape == (x.shape[0], 1, 1) and norm is None
    assert whole or x.shape == gate.shape, (x.shape, gate.shape)
    assert x.dim() == 3
    assert x.stride(2) == 1
    assert whole or gate.stride(2) == 1
    return dispatch("gate_heads", __name__, reference.gate_heads, implementation, x, gate, norm, eps, out_dtype)
