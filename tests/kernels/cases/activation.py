"""The shapes and types that the activations are tested and compiled with, and their tolerance."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from edgelm.kernels.activation import Gate
from tests.kernels.compile_case import CompileCase


class Case(NamedTuple):
    """Rows of gate and up values, `width` of each."""

    rows: int
    width: int
    gate: Gate
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        return f"{self.gate.kind} {self.rows}x{self.width} {str(self.dtype).removeprefix('torch.')}"


GATES = (Gate("silu"), Gate("gelu"), Gate("gelu_tanh"), Gate("swiglu_oai"), Gate("swiglu_oai", limit=1.5, alpha=0.7))

CASES = (
    *(Case(3, 48, gate) for gate in GATES),
    *(Case(2, 1100, gate) for gate in GATES),
    Case(2, 33, Gate("silu"), torch.float16),
    Case(1, 1040, Gate("gelu_tanh"), torch.bfloat16),
    Case(0, 16, Gate("silu")),
)

# Relative to the greatest of |gate * up| and 1, since 1 + erf, or 1 + tanh, cancels where the gate is negative: a few
# units in the last place of float32.
TOLERANCE = 1e-6


def make_input(case: Case, generator: Generator) -> Tensor:
    """Return random values that reach into both tails, a slice of wider rows with NaN between them."""
    storage = torch.full((case.rows, 2 * case.width + 3), float("nan"), dtype=case.dtype)
    storage[:, :-3] = (4 * torch.randn((case.rows, 2 * case.width), generator=generator)).to(case.dtype)
    return storage[:, :-3]


def compile_cases() -> list[CompileCase]:
    """Return each gate, and the soft cap."""
    from edgelm.kernels.activation import kernel as kernels

    cases = []
    for gate in GATES[:4]:
        constants: dict[str, object] = {
            "KIND": gate.kind,
            "LIMIT": gate.limit,
            "ALPHA": gate.alpha,
            "BLOCK": kernels.BLOCK,
        }
        signature = {"x_ptr": "*fp16", "x_stride": "i32", "out_ptr": "*fp16", "width": "i32"}
        signature |= dict.fromkeys(constants, "constexpr")
        cases.append(
            CompileCase(f"activation {gate.kind}", kernels.gated_kernel, signature, constants, tuple(signature)[:4])
        )
    signature = {"x_ptr": "*fp32", "out_ptr": "*fp32", "width": "i32", "cap": "fp32", "BLOCK": "constexpr"}
    divisible = "x_ptr", "out_ptr", "width"
    constants = {"BLOCK": kernels.BLOCK}
    cases.append(CompileCase("activation softcap", kernels.softcap_kernel, signature, constants, divisible))
    return cases
