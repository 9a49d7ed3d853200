"""A benchmark case, its inputs, and the check of a kernel against its reference: no wrong result is timed.

Knows nothing of what the ops compute (cases.py), of clocks (timing.py) or of results (tests/kernels/bench.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor


class Work(NamedTuple):
    """Something to be timed. `make` runs with its generator's device as torch's default device."""

    make: Callable[[Generator], Any]  # inputs: tensors, or tuples and dataclasses with tensors in them
    run: Callable[[Any, str], Any]  # (inputs, implementation) -> result


def result_only(_inputs: Any, result: Any) -> Any:
    """Compare what an op returns, and none of its inputs."""
    return result


class BenchCase(NamedTuple):
    """An op on one shape in one format, and what it is compared with."""

    op: str  # its folder in kernels/
    shape: str  # "14336x4096"
    rows: int
    format: str  # "q4_k", or a dtype
    work: Work
    moved_bytes: Callable[[Any], int]  # of the inputs: the bytes that a call must read and write at least
    tolerance: float = 0.0  # largest difference from the reference, in units of its largest value; of integers 0
    compared: Callable[[Any, Any], Any] = result_only  # (inputs, result) -> tensors that the reference must give too
    rival: Work | None = None  # torch's bfloat16 matmul of the same shape; its implementation is not read

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape} {self.format} rows={self.rows}"


def bench_cases(ops: list[str] | None, tiny: bool) -> list[BenchCase]:
    """Return the cases of some ops, or of all, sorted by op. `tiny`: small shapes of each kind, for the interpreter."""
    from tests.kernels.benchmark.cases import all_cases  # imports the kernels: TRITON_INTERPRET must be set before

    return sorted((case for case in all_cases(tiny) if ops is None or case.op in ops), key=lambda case: case.op)


def make_inputs(work: Work, device: torch.device, seed: int) -> Any:
    """Return new inputs on a device."""
    with torch.device(device):
        return work.make(Generator(device).manual_seed(seed))


def tensors_of(inputs: Any) -> list[Tensor]:
    """Return all tensors in some inputs."""
    if isinstance(inputs, Tensor):
        return [inputs]
    if is_dataclass(inputs):
        inputs = tuple(getattr(inputs, field.name) for field in fields(inputs))
    return [tensor for part in inputs for tensor in tensors_of(part)] if isinstance(inputs, (tuple, list)) else []


def cloned(inputs: Any) -> Any:
    """Return inputs with copies of all tensors, of the same strides; everything else is shared."""
    if isinstance(inputs, Tensor):
        return torch.empty_strided(inputs.shape, inputs.stride(), dtype=inputs.dtype, device=inputs.device).copy_(
            inputs
        )
    if is_dataclass(inputs) and not isinstance(inputs, type):
        names = [field.name for field in fields(inputs) if field.init]
        return replace(inputs, **{name: cloned(getattr(inputs, name)) for name in names})
    if isinstance(inputs, tuple):
        parts = [cloned(part) for part in inputs]
        return type(inputs)(*parts) if hasattr(inputs, "_fields") else tuple(parts)
    return [cloned(part) for part in inputs] if isinstance(inputs, list) else inputs


def nbytes_of(inputs: Any) -> int:
    """Return the bytes of all tensors in some inputs."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(inputs))


class Verdict(NamedTuple):
    """The distance of a kernel from its reference."""

    deviation: float  # the largest difference of a result, in units of the reference's largest value
    fault: str  # "": it agrees

    @property
    def green(self) -> bool:
        return not self.fault


def check(case: BenchCase, device: torch.device, seed: int) -> Verdict:
    """Run the Triton kernels and the reference on equal inputs, each on its own copy: either may write to them."""
    inputs, same = make_inputs(case.work, device, seed), make_inputs(case.work, device, seed)
    try:
        result = case.compared(inputs, case.work.run(inputs, "triton"))
        expected = case.compared(same, case.work.run(same, "reference"))
    except Exception as error:  # noqa: BLE001 - whatever a compiler or a GPU raises: this op is red, the others are run
        return Verdict(float("inf"), f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return compare(result, expected, case.tolerance)


def compare(result: Any, expected: Any, tolerance: float) -> Verdict:
    """Compare results: tensors, or tuples of them."""
    pairs = list(zip(tensors_of(result), tensors_of(expected), strict=True))
    assert pairs, "a case returns what is to be compared"
    verdicts = [_compare_tensors(*pair) for pair in pairs]
    worst = max(verdict.deviation for verdict in verdicts)
    faults = [verdict.fault for verdict in verdicts if verdict.fault]
    if not faults and not worst <= tolerance:
        faults = [f"off by {worst:.2e} of the largest value, more than {tolerance:.2e}"]
    return Verdict(worst, "; ".join(faults))


def _compare_tensors(result: Tensor, expected: Tensor) -> Verdict:
    if result.shape != expected.shape or result.dtype != expected.dtype:
        fault = f"{result.dtype} {list(result.shape)}, not {expected.dtype} {list(expected.shape)}"
        return Verdict(float("inf"), fault)
    if not expected.is_floating_point():
        differing = int((result != expected).sum())
        return Verdict(0.0, f"{differing} of {expected.numel()} integers differ" if differing else "")
    result, expected = result.double(), expected.double()
    wrong = int((result.isfinite() != expected.isfinite()).sum())
    if wrong:
        return Verdict(float("inf"), f"{wrong} of {expected.numel()} values are finite in one of the two only")
    finite = expected.isfinite()
    largest = expected[finite].abs().max().item() if finite.any() else 0.0
    difference = (result - expected)[finite].abs().max().item() if finite.any() else 0.0
    return Verdict(difference / largest if largest else difference, "")
