"""The shapes and types that the norms are tested and compiled with, and their tolerance."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from tests.kernels.compile_case import CompileCase


class Case(NamedTuple):
    """Rows of one shape and type; each row has its own scale, from 1 to 1 + spread."""

    rows: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    spread: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.width} {str(self.dtype).removeprefix('torch.')}"


class Inputs(NamedTuple):
    """Arguments of the norms."""

    x: Tensor  # [rows, width], a slice of wider rows
    residual: Tensor  # float32 [rows, width]
    weight: Tensor  # float32 [width]
    post_weight: Tensor  # float32 [width]


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
# place.
TOLERANCE = 1e-6


def make_inputs(case: Case, generator: Generator) -> Inputs:
    """Return random inputs; between the rows of x there is NaN."""
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
    """Return each kernel for rows that stay in registers, and for longer ones."""
    from edgelm.kernels.norm import kernel as kernels

    cases = []
    for width in (4096, 18432):
        block, warps = kernels.launch_shape(width)
        shape: dict[str, object] = {"BLOCK": block, "WHOLE": width <= block}
        kernels_and_options: tuple[tuple[Any, dict[str, object]], ...] = (
            (kernels.rms_norm_kernel, {**shape, "rows_ptr": None}),
            (kernels.rms_norm_kernel, shape),
            (kernels.add_rms_norm_kernel, {**shape, "POST": False}),
            (kernels.add_rms_norm_kernel, {**shape, "POST": True}),
        )
        for kernel, options in kernels_and_options:
            title = kernel.__name__.removesuffix("_kernel") + (" post" if options.get("POST") else "")
            if kernel is kernels.rms_norm_kernel and "rows_ptr" not in options:
                title += " of some rows"
            kinds = {"eps": "fp32", "sum_scale": "fp32", "x_ptr": "*bf16", "out_ptr": "*bf16", "rows_ptr": "*i64"}
            signature = {
                name: "constexpr" if name in options else kinds.get(name, "*fp32" if name.endswith("_ptr") else "i32")
                for name in kernel.arg_names
                if name != "launch_pdl"
            }
            divisible = tuple(name for name, kind in signature.items() if kind not in ("constexpr", "fp32"))
            whole = width <= block
            cases.append(CompileCase(f"norm {title} {width}", kernel, signature, options, divisible, warps, main=whole))
    return cases
