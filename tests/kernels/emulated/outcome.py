"""The distance of a result from its reference, and the bound that it must keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Outcome(NamedTuple):
    """The judgement of a result. Both numbers are relative to the largest value of the reference."""

    difference: float  # the largest; infinite for NaN and for values that were not written
    bound: float  # the largest that is allowed, at any element; 0: equal in every bit
    fault: str = ""  # "": each element is within its own bound
    share: float = 0.0  # the largest difference in bounds of its own element


def within(got: Tensor, exact: Tensor, bound: Tensor | float) -> Outcome:
    """Compare a result with exact values, element by element."""
    assert got.shape == exact.shape, (got.shape, exact.shape)
    if not got.numel():
        return Outcome(0.0, 0.0)
    exact, allowed = exact.double(), torch.as_tensor(bound, dtype=torch.float64).expand(exact.shape)
    off = (got.double() - exact).abs().nan_to_num(float("inf"))
    largest = float(exact.abs().max()) or 1.0
    wrong = int((off > allowed).sum())
    fault = f"{wrong} of {got.numel()} values are beyond their bounds" if wrong else ""
    share = float((off / allowed).nan_to_num(0.0, posinf=float("inf")).max())  # 0 / 0: equal, as it has to be
    return Outcome(float(off.max()) / largest, float(allowed.max()) / largest, fault, share)


def equal(got: Tensor, expected: Tensor) -> Outcome:
    """Compare two tensors bit by bit."""
    same = got.dtype == expected.dtype and got.shape == expected.shape
    if same and torch.equal(*(part.contiguous().view(-1).view(torch.uint8) for part in (got, expected))):
        return Outcome(0.0, 0.0)
    if not same:
        return Outcome(float("inf"), 0.0, f"{got.dtype} {list(got.shape)}, not {expected.dtype} {list(expected.shape)}")
    wrong = int((got != expected).sum())
    return Outcome(within(got, expected, 0.0).difference, 0.0, f"{wrong} of {got.numel()} values differ")


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """Join the outcomes of the results of one case: the largest of each number."""
    return Outcome(
        max(outcome.difference for outcome in outcomes),
        max(outcome.bound for outcome in outcomes),
        "; ".join(outcome.fault for outcome in outcomes if outcome.fault),
        max(outcome.share for outcome in outcomes),
    )
