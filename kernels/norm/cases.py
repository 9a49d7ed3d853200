"""The shapes and types that the norms are tested, compiled and timed with.

Owns the cases and their tolerance. Knows nothing of how they are run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from edgelm.kernels.compile_case import CompileCase


class Case(NamedTuple):
    """Rows of one shape and type; `spread` between the rows, so that each has a scale of its own."""

    rows: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    spread: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.width} {str(self.dtype).removeprefix('torch.')}"


class Inputs(NamedTuple):
    """What the norms take."""

    x: Tensor  # [rows, width], a slice of wider rows
    residual: Tensor  # float32 [rows, width]
    weight: Tensor  # float32 [width]
    bias: Tensor  # float32 [width], also a weight after the norm


CASES = (
    Case(1, 1, torch.float32),
    Case(3, 7, torch.float16),
    Case(2, 128),
    Case(5, 576, torch.float16, spread=30.0),
    Case(2, 4096),
    Case(1, 8192, torch.float32),
    Case(2, 8193),
    Case(1, 18432, torch.float16),
    Case(0, 64),
)

# Each value is a few float32 operations on a sum of squares whose rounding errors cancel: 1e-6 is 8 units in the last
# place. LayerNorm subtracts the mean first, so that its error is relative to the greatest value, not to each.
TOLERANCE = 1e-6


def make_inputs(case: Case, generator: Generator) -> Inputs:
    """Return random inputs; what lies between the rows of x is NaN."""
    storage = torch.full((case.rows, case.width + 5), float("nan"), dtype=case.dtype)
    scales = 1 + case.spread * torch.rand((case.rows, 1), generator=generator)
    storage[:, : case.width] = (torch.randn((case.rows, case.width), generator=generator) * scales).to(case.dtype)
    return Inputs(
        storage[:, : case.width],
        torch.randn((case.rows, case.width), generator=generator),
        torch.randn(case.width, generator=generator),
        torch.randn(case.width, generator=generator),
    )


def compile_cases() -> list[CompileCase]:
    """List each kernel for rows that stay in registers, and for wider ones."""
    from edgelm.kernels.norm import triton as kernels

    cases = []
    for width in (4096, 18432):
        block, warps = kernels.launch_shape(width)
        shape: dict[str, object] = {"BLOCK": block, "WHOLE": width <= block}
        kernels_and_options: tuple[tuple[Any, dict[str, object]], ...] = (
            (kernels.rms_norm_kernel, shape),
            (kernels.add_rms_norm_kernel, {**shape, "POST": False}),
            (kernels.add_rms_norm_kernel, {**shape, "POST": True}),
            (kernels.layer_norm_kernel, {"BLOCK": block, "BIAS": True}),
        )
        for kernel, options in kernels_and_options:
            name = kernel.__name__.removesuffix("_kernel") + (" post" if options.get("POST") else "")
            kinds = {"eps": "fp32", "x_ptr": "*bf16", "out_ptr": "*bf16"}
            signature = {
                each: "constexpr" if each in options else kinds.get(each, "*fp32" if each.endswith("_ptr") else "i32")
                for each in kernel.arg_names
            }
            divisible = tuple(each for each, kind in signature.items() if kind not in ("constexpr", "fp32"))
            whole = width <= block
            cases.append(CompileCase(f"norm {name} {width}", kernel, signature, options, divisible, warps, main=whole))
    return cases
