"""The cases of `dequant_gemm`: weights, rows of x, and the operations around the product."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from edgelm.kernels.activation import GateKind
from edgelm.kernels.layout import layout_constants
from tests.kernels.cases.dequantize import Case, plane_types
from tests.kernels.cases.matmul import LAYOUTS
from tests.kernels.compile_case import CompileCase

if TYPE_CHECKING:
    from edgelm.kernels.dequant_gemm.configs import Shape


class GemmCase(NamedTuple):
    """A weight, and the number and type of the rows that it multiplies."""

    weight: Case
    rows: int
    dtype: torch.dtype
    out_dtype: torch.dtype = torch.float32
    gate: GateKind | None = None
    bias: bool = False
    residual: bool = False

    @property
    def name(self) -> str:
        return f"{self.weight.name}-rows{self.rows}-{str(self.dtype).removeprefix('torch.')}-{self.gate or 'plain'}"


_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CASES = (
    *(
        GemmCase(Case(name, 20, 72 if i % 4 == 0 else 40), 17, _DTYPES[i % 3], bias=i % 2 == 0, residual=i % 3 == 0)
        for i, name in enumerate(LAYOUTS)
    ),
    GemmCase(Case("q4_0", 32, 64, gated=True), 33, torch.float16, torch.float16, "silu", bias=True, residual=True),
    GemmCase(Case("mxfp4", 96, 64, gated=True), 16, torch.bfloat16, torch.bfloat16, "swiglu_oai", bias=True),
    GemmCase(Case("q8_0", 32, 40, gated=True), 18, torch.float16, torch.float32, "gelu"),
    GemmCase(Case("q4_k", 32, 40, gated=True), 1, torch.float16, torch.float32, "gelu_tanh", residual=True),
    GemmCase(Case("awq", 20, 130, ordered=True), 17, torch.float16),
    GemmCase(Case("bfloat16", 20, 70), 17, torch.bfloat16, bias=True),
    GemmCase(Case("float16", 32, 128, gated=True), 17, torch.float16, gate="silu"),
)


def compile_cases() -> list[CompileCase]:
    """Return the kernel in the important formats, for 4096 columns, small and large tiles, one matrix and a stack."""
    from edgelm.kernels.dequant_gemm.configs import shape_for

    cases = [compile_case(name, "fp16", shape_for(64)) for name in LAYOUTS]
    cases += [compile_case(name, "bf16", shape_for(500)) for name in ("q4_0", "q4_k", "q6_k", "q8_0", "mxfp4", "fp8")]
    cases += [compile_case(name, "bf16", shape_for(32), gate="silu", grouped=True) for name in ("q4_k", "mxfp4")]
    cases += [
        compile_case(name, "bf16", shape_for(500), parts=4, apart=apart)
        for name in ("q4_k", "q6_k")
        for apart in (True, False)
    ]
    cases.append(compile_case("q4_k", "bf16", shape_for(500), gate="silu"))
    return [*cases, compile_case(None, "fp16", shape_for(500), grouped=True)]


def compile_case(
    name: str | None,
    dtype: str,
    shape: Shape,
    *,
    gate: GateKind | None = None,
    grouped: bool = False,
    parts: int = 1,
    apart: bool = False,
) -> CompileCase:
    """Describe the kernel in a layout (None: dense), as it is launched on a GPU."""
    from edgelm.kernels.dequant_gemm.configs import max_registers
    from edgelm.kernels.dequant_gemm.kernel import dequant_gemm_kernel
    from edgelm.kernels.gpu_target import kwidth

    pointers = plane_types(name) | {"x": f"*{dtype}", "out": f"*{dtype}"}
    if grouped:
        pointers |= {"blocks": "*i32", "order": "*i32"}
    if apart:
        pointers |= {"partial": "*fp32"}
    integers = dict.fromkeys(("rows", "width", "tiles", "matrices", "residual_stride"), "i32")
    fixed: dict[str, object] = dict.fromkeys(
        ("high", "scales", "offsets", "supers", "bias", "residual", "partial", "blocks", "order")
    )
    fixed |= layout_constants(LAYOUTS[name] if name else None)
    fixed |= {"chunks": 63 if name == "int8" else 64, "columns": 4096, "SHARED": 8 if grouped else 1, "PARTS": parts}
    fixed |= {"T": shape.tiles, "BM": shape.rows, "GATE": gate, "LIMIT": 0.0, "ALPHA": 0.0, "KW": kwidth(), "ASM": True}
    signature = dict.fromkeys(dequant_gemm_kernel.arg_names, "constexpr") | integers | pointers
    limit = max_registers(shape, wgmma=True)
    marks = f"{' ' + gate if gate else ''}{' grouped' if grouped else ''}"
    marks += f" {parts} parts {'apart' if apart else 'together'}" if parts > 1 else ""
    return CompileCase(
        f"dequant_gemm {name or 'dense'} {dtype} {tuple(shape)}{marks}",
        dequant_gemm_kernel,
        signature,
        {key: value for key, value in fixed.items() if key not in pointers},
        (*pointers, "width", "residual_stride"),
        shape.num_warps,
        {"num_stages": shape.num_stages, "enable_fp_fusion": False},
        {90: limit} if limit else {},
        loop_weights=shape.tiles * 1024 // (shape.num_warps * 32) if dtype != "fp32" else 0,
        # within the limit, a sum is on the stack while the next part of K is summed, which two programs more than repay
        spills=320 if parts > 1 and not apart else 24 if limit and gate else 0,
        loop_spills=8,
        main=name in ("q4_k", "q6_k") and shape.rows > 32 and parts == 1,
    )
