"""Elementwise ops on rows: the gate of a feed-forward block where no matmul fuses it, and the soft cap.

Owns the signatures and the choice of implementation; `reference` defines what each gate computes.
"""

from __future__ import annotations

from torch import Tensor

from edgelm.kernels.activation import reference
from edgelm.kernels.activation.reference import gated_values
from edgelm.kernels.choice import dispatch
from edgelm.kernels.gates import Gate, GateKind

__all__ = ["Gate", "GateKind", "gated", "gated_values", "softcap"]


def gated(x: Tensor, gate: Gate, *, implementation: str | None = None) -> Tensor:
    """Return the gated values [rows, width] in the type of x, computed in float32.

    x: [rows, 2 * width], the last dimension contiguous; the first half of a row is the gate, the second is up.
    """
    assert x.ndim == 2, x.shape
    assert x.shape[1] % 2 == 0, x.shape
    assert x.stride(1) == 1, x.stride()
    return dispatch("gated", __name__, reference.gated, implementation, x, gate)


def softcap(x: Tensor, cap: float, *, out: Tensor | None = None, implementation: str | None = None) -> Tensor:
    """Return cap * tanh(x / cap) in the type of x, computed in float32, as a contiguous tensor.

    The result goes to `out`, which may be x itself; by default, to a new tensor.
    """
    assert cap > 0, cap
    if out is not None:
        assert (out.shape, out.dtype) == (x.shape, x.dtype), (out.shape, out.dtype)
        assert out.is_contiguous()
    return dispatch("softcap", __name__, reference.softcap, implementation, x, cap, out)
