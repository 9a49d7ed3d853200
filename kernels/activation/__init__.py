"""Elementwise ops of a row: the gate of a feed-forward block, where no matmul computes it, and the soft cap.

Owns the signatures and the choice of implementation; what a gate computes is in `edgelm.kernels.gate`.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from edgelm.kernels.activation import reference
from edgelm.kernels.choice import Implementation, choose, declines_reference, declines_triton
from edgelm.kernels.gate import Gate

TILE = 16  # columns of gate, then as many of up, where they alternate


def gated(
    x: Tensor,  # [rows, 2 * width], the last dimension contiguous
    gate: Gate,
    *,
    alternating: bool = False,
    implementation: str | None = None,
) -> Tensor:
    """Return the gated values [rows, width] in the type of x, computed in float32.

    The first half of a row is the gate, the second is up; `alternating`: tiles of 16 columns are gate and up in turn.
    """
    assert x.ndim == 2, x.shape
    assert x.shape[1] % (2 * TILE if alternating else 2) == 0, x.shape
    assert x.stride(1) == 1, x.stride()

    def run_triton(*arguments: Any) -> object:
        from edgelm.kernels.activation import triton

        return triton.gated(*arguments)

    implementations = (
        Implementation("triton", lambda x, *_: declines_triton(x), run_triton),
        Implementation("reference", lambda x, *_: declines_reference(x, implementation), reference.gated),
    )
    arguments = x, gate, alternating
    return cast(Tensor, choose("gated", implementations, implementation, *arguments).run(*arguments))


def softcap(x: Tensor, cap: float, *, implementation: str | None = None) -> Tensor:
    """Return cap * tanh(x / cap) in the type of x, computed in float32, as a new contiguous tensor."""
    assert cap > 0, cap

    def run_triton(*arguments: Any) -> object:
        from edgelm.kernels.activation import triton

        return triton.softcap(*arguments)

    implementations = (
        Implementation("triton", lambda x, *_: declines_triton(x), run_triton),
        Implementation("reference", lambda x, *_: declines_reference(x, implementation), reference.softcap),
    )
    return cast(Tensor, choose("softcap", implementations, implementation, x, cap).run(x, cap))
