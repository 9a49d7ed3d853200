"""The cases of `dequantize`, and random weights and stacks of weights for all ops that read them.

Owns these descriptions. Knows nothing of tests. Layouts and single weights come from `tests.kernels.cases.matmul`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Generator

from edgelm.kernels.layout import DenseWeight, PackedWeight, Weight, planes
from tests.kernels.cases import matmul as matmul_cases
from tests.kernels.cases.matmul import LAYOUTS
from tests.kernels.compile_case import CompileCase

TYPES = {
    torch.int32: "i32",
    torch.int16: "i16",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.uint8: "u8",
    torch.int8: "i8",
}  # as the compiler names them


class Case(NamedTuple):
    """A weight: `layout` is a name of LAYOUTS, or that of a dtype for a dense one."""

    layout: str
    rows: int
    columns: int
    matrices: int = 0
    gated: bool = False
    ordered: bool = False

    @property
    def name(self) -> str:
        stack = f"{self.matrices}x" if self.matrices else ""
        marks = f"{'-gated' if self.gated else ''}{'-ordered' if self.ordered else ''}"
        return f"{self.layout}-{stack}{self.rows}x{self.columns}{marks}"


def random_weight(case: Case, generator: Generator) -> Weight:
    """Return a weight of random codes; its padding is garbage, with NaN where the types have one."""
    if case.layout not in LAYOUTS:
        stack = (case.matrices,) if case.matrices else ()
        data = torch.randn((*stack, case.rows, case.columns), generator=generator) * 0.05
        return DenseWeight(data.to(getattr(torch, case.layout)), gated=case.gated)
    layout = LAYOUTS[case.layout]
    weights = [
        matmul_cases.random_weight(layout, case.rows, case.columns, generator, ordered=case.ordered)
        for _ in range(max(case.matrices, 1))
    ]
    if not case.matrices:
        return replace(weights[0], gated=case.gated)
    stacked: dict[str, Any] = {
        name: torch.stack([planes(weight)[name] for weight in weights]) for name in planes(weights[0])
    }
    return replace(weights[0], gated=case.gated, **stacked)


def plane_types(layout_name: str | None) -> dict[str, str]:
    """Return the types of the planes of a layout as the compiler names them; None: a dense weight of float16."""
    if layout_name is None:
        return {"codes": "*fp16"}
    generator = Generator().manual_seed(0)
    weight = matmul_cases.random_weight(LAYOUTS[layout_name], 16, 16, generator)
    assert isinstance(weight, PackedWeight)
    return {name: f"*{TYPES[plane.dtype]}" for name, plane in planes(weight).items()}


CASES = (
    *(Case(name, 20, 80) for name in LAYOUTS),
    Case("q4_0", 16, 64),
    Case("q4_k", 1, 300),
    Case("q5_k", 33, 40, matrices=3),
    Case("q6_k", 20, 70, matrices=2),
    Case("mxfp4", 80, 33, matrices=2),
    Case("bfloat16", 5, 33),
    Case("float16", 7, 64, matrices=2),
)


def compile_cases() -> list[CompileCase]:
    """Return the kernel in the formats that matter, for 4096 columns."""
    return [compile_case(name, dtype) for name in LAYOUTS for dtype in ("fp16", "bf16")]


def compile_case(name: str, dtype: str) -> CompileCase:
    """Describe the kernel in a layout, as it is launched on a GPU."""
    from edgelm.kernels.dequantize.kernel import TILES, TURNS, constants, dequantize_kernel, max_registers

    weight = matmul_cases.random_weight(LAYOUTS[name], 16, 16, Generator().manual_seed(0))
    registers = max_registers(weight)
    pointers = plane_types(name) | {"out": f"*{dtype}"}
    fixed: dict[str, object] = dict.fromkeys(("high", "scales", "offsets", "supers"))
    fixed |= constants(weight) | {"chunks": 64 // 3 * 3 if name == "int8" else 64, "columns": 4096}
    fixed |= {"W": TILES, "TURNS": TURNS, "ASM": True}
    signature = dict.fromkeys(dequantize_kernel.arg_names, "constexpr") | {"rows": "i32", "tiles": "i32"} | pointers
    return CompileCase(
        f"dequantize {name} {dtype}",
        dequantize_kernel,
        signature,
        {key: value for key, value in fixed.items() if key not in pointers},
        (*pointers, "rows", "tiles"),
        TILES,
        {"enable_fp_fusion": False} | ({"maxnreg": registers} if registers else {}),
        loop_weights=32,
        # Other formats have words of 4 or 8 bytes for the upper bits, or half as many bytes of scales as of codes.
        wide_loads=weight.layout.bits in (4, 8) and weight.layout.group > 16,
        main=(name, dtype) in (("q4_k", "fp16"), ("q6_k", "bf16")),
    )
