"""The maximum error of a correct product, element by element: derived, never tuned.

A float32 sum of K products in any order is off by at most about K * 2**-24 times the sum of their sizes. Rounding a
number to p bits moves it by 2**-p of itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.activation import Gate

ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
SUBNORMAL = 2.0**-25  # half of the smallest float16


def product_bound(x: Tensor, weight: Tensor, *, offsets: bool = False, rounded_to: torch.dtype | None = None) -> Tensor:
    """Return the bound of x @ weight.T, float64 [rows, N].

    `offsets`: codes and minimums are summed separately; each term is at most three times as large as the largest
    weight. `rounded_to`: weights are first rounded to this type.
    """
    x, weight = x.double().abs(), weight.double().abs()
    terms = torch.full_like(weight, 3 * weight.max().item()) if offsets else weight
    bound = (x.shape[1] + 8) * 2.0**-24 * (x @ terms.T)
    if rounded_to is not None:
        bound += x @ (weight * ROUNDING[rounded_to] + SUBNORMAL).T
    return bound


def gated_bound(gate: Tensor, up: Tensor, gate_bound: Tensor, up_bound: Tensor, kind: Gate) -> Tensor:
    """Return the bound of gated values from the bounds of their inputs: no gate is steeper than 1.2."""
    factor = up.abs() + (1 if kind.kind == "swiglu_oai" else 0)
    own = 2.0**-20 * (gate.abs() + 1) * (factor + 1)  # error of the exponentials and of the operations after them
    return 1.2 * gate_bound * (factor + up_bound) + 1.2 * gate.abs() * up_bound + own


def rounded_bound(exact: Tensor, bound: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bound of a result that is rounded to `dtype`."""
    return bound + (exact.double().abs() + bound) * ROUNDING[dtype] + 2.0**-24


def assert_within(got: Tensor, exact: Tensor, bound: Tensor) -> None:
    """Check each element against its bound, and the rounding to the type of `got`."""
    bound = rounded_bound(exact, bound, got.dtype)
    off = (got.double() - exact.double()).abs()
    assert bool((off <= bound).all()), f"off by up to {float((off / bound).nan_to_num(float('inf')).max()):.3g} bounds"
