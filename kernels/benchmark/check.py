"""Whether a kernel does what its reference does: nothing wrong is timed.

Owns the comparison. Knows nothing of what an op computes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from edgelm.kernels.benchmark import BenchCase, made, tensors_of


class Verdict(NamedTuple):
    """How far a kernel is from its reference."""

    deviation: float  # the largest difference of a result, in units of the reference's largest value
    fault: str  # "": it agrees

    @property
    def green(self) -> bool:
        return not self.fault


def check(case: BenchCase, device: torch.device, seed: int) -> Verdict:
    """Run the Triton kernels and the reference on equal inputs, each on its own: either may write to them."""
    inputs, same = made(case.work, device, seed), made(case.work, device, seed)
    try:
        found = case.compared(inputs, case.work.run(inputs, "triton"))
        wanted = case.compared(same, case.work.run(same, "reference"))
    except Exception as error:  # noqa: BLE001 - whatever a compiler or a GPU says: this op is red, the others are run
        return Verdict(float("inf"), f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return compare(found, wanted, case.tolerance)


def compare(found: Any, wanted: Any, tolerance: float) -> Verdict:
    """Compare results: tensors, or tuples of them."""
    pairs = list(zip(tensors_of(found), tensors_of(wanted), strict=True))
    assert pairs, "a case returns what is to be compared"
    verdicts = [_compared(*pair) for pair in pairs]
    worst = max(verdict.deviation for verdict in verdicts)
    faults = [verdict.fault for verdict in verdicts if verdict.fault]
    if not faults and not worst <= tolerance:
        faults = [f"off by {worst:.2e} of the largest value, more than {tolerance:.2e}"]
    return Verdict(worst, "; ".join(faults))


def _compared(found: Tensor, wanted: Tensor) -> Verdict:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return Verdict(float("inf"), f"{found.dtype} {list(found.shape)}, not {wanted.dtype} {list(wanted.shape)}")
    if not wanted.is_floating_point():
        differing = int((found != wanted).sum())
        return Verdict(0.0, f"{differing} of {wanted.numel()} integers differ" if differing else "")
    found, wanted = found.double(), wanted.double()
    wrong = int((found.isfinite() != wanted.isfinite()).sum())
    if wrong:
        return Verdict(float("inf"), f"{wrong} of {wanted.numel()} values are finite in one of the two only")
    finite = wanted.isfinite()
    largest = wanted[finite].abs().max().item() if finite.any() else 0.0
    difference = (found - wanted)[finite].abs().max().item() if finite.any() else 0.0
    return Verdict(difference / largest if largest else difference, "")
