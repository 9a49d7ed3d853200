"""The cases of `grouped_matmul`: stacks of weights, tokens and their experts, and the operations around them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from edgelm.kernels.activation import GateKind
from edgelm.kernels.gpu_target import triton_version
from edgelm.kernels.layout import PackedWeight
from tests.kernels.cases.dequantize import TYPES, Case, random_weight
from tests.kernels.cases.matmul import LAYOUTS
from tests.kernels.compile_case import CompileCase

Choice = Literal["random", "one", "all", "outside"]


class GroupedCase(NamedTuple):
    """A stack of weights, and the tokens that choose among its matrices."""

    weight: Case
    tokens: int
    k: int
    dtype: torch.dtype
    choice: Choice = "random"  # one: all tokens choose one expert; all: each chooses all; outside: some choose none
    out_dtype: torch.dtype = torch.float32
    gate: GateKind | None = None
    bias: bool = False
    summed: bool = False  # with route weights and a residual
    per_pair: bool = False  # x has a row for each pair

    @property
    def name(self) -> str:
        sizes = f"{self.weight.name}-{self.tokens}x{self.k}-{self.choice}"
        marks = f"{self.gate or 'plain'}{'-bias' * self.bias}{'-sum' * self.summed}{'-pairs' * self.per_pair}"
        return f"{sizes}-{str(self.dtype).removeprefix('torch.')}-{marks}"


def random_experts(case: GroupedCase, generator: Generator) -> Tensor:
    """Return the experts of each token, int32 [tokens, k]; those of a token differ."""
    num = case.weight.matrices
    if case.choice == "one":
        return torch.full((case.tokens, case.k), num // 2, dtype=torch.int32)
    experts = torch.stack([torch.randperm(num, generator=generator)[: case.k] for _ in range(case.tokens)])
    if case.choice == "outside":
        experts[::3, 0] = -1
        experts[1::3, 0] = num
    return experts.int()


_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_F16, _BF16, _F32 = _DTYPES
CASES = (
    *(
        GroupedCase(
            Case(name, 20 if i % 4 == 0 else 11, 300 if i % 5 == 1 else 72, 3),
            3,
            2,
            _DTYPES[i % 3],
            bias=i % 2 == 0,
            summed=i % 3 == 0,
            per_pair=i % 5 == 0,
        )
        for i, name in enumerate(LAYOUTS)
    ),
    GroupedCase(Case("q4_0", 16, 64, 3), 9, 1, _F16, "one"),
    GroupedCase(Case("q4_0", 16, 64, 3), 3, 3, _F32, "all", summed=True),
    GroupedCase(Case("q8_0", 16, 64, 2), 4, 2, _BF16, "outside", bias=True, summed=True, out_dtype=_BF16),
    GroupedCase(Case("mxfp4", 32, 64, 2, gated=True), 3, 1, _F16, "outside", gate="swiglu_oai", bias=True),
    GroupedCase(Case("q4_k", 64, 320, 2, gated=True), 2, 1, _BF16, gate="silu", out_dtype=_BF16),
    GroupedCase(Case("awq", 20, 72, 3, ordered=True), 3, 2, _F32),
    GroupedCase(Case("float16", 20, 70, 3), 3, 2, _F16, bias=True),
    GroupedCase(Case("bfloat16", 32, 300, 2, gated=True), 3, 1, _BF16, gate="gelu", summed=True),
    GroupedCase(Case("bfloat16", 20, 70, 2), 3, 1, _F16),
    # experts with so many pairs that the kernel of `dequant_gemm` multiplies them
    GroupedCase(Case("q4_k", 32, 40, 2, gated=True), 65, 1, _F16, gate="silu", bias=True, summed=True),
    GroupedCase(Case("q6_k", 20, 40, 2), 65, 1, _BF16, "outside", bias=True, per_pair=True),
    GroupedCase(Case("mxfp4", 20, 72, 2), 66, 1, _F32, "one"),
    GroupedCase(Case("float16", 20, 70, 2), 65, 2, _F16, "all", bias=True),
)


# Instructions that spill registers, of few pairs in fp16, by layout and compute capability, with Triton 3.9. Those of
# q5_k are in the main loop.
SPILLS_38 = {"q4_k": {90: 4}}  # in the main loop of a gated one with Triton 3.8, which stays within its budget
SPILLS = {"awq": {86: 2, 89: 2}, "gptq": {86: 2, 89: 2}, "q5_k": {90: 2, 120: 2}}
SPILLS_37 = {"int5_g64": {80: 4}, "int6_g16": {80: 4}, "iq4_xs": {90: 2}}  # more with Triton 3.7


def compile_cases() -> list[CompileCase]:
    """Return the kernels for the experts of common models, and those that surround them."""
    from edgelm.kernels.grouped.kernel import plan_kernel, weighted_sum_kernel

    cases = [few_case(name, "fp16") for name in LAYOUTS]
    cases += [few_case("mxfp4", "bf16", "swiglu_oai"), few_case("q4_k", "bf16", "silu"), few_case(None, "bf16", "silu")]
    signature = dict.fromkeys(plan_kernel.arg_names, "constexpr")
    signature |= {"experts": "*i32", "order": "*i32", "blocks": "*i32"}
    signature |= dict.fromkeys(("pairs", "num_experts", "num_blocks"), "i32")
    sizes: dict[str, object] = {"BLOCK": 8, "IDS": 256, "PART": 32, "SEEN": 32}
    pointers = ("experts", "order", "blocks")
    cases.append(CompileCase("grouped plan", plan_kernel, signature, sizes, pointers, wide_loads=False))
    signature = dict.fromkeys(weighted_sum_kernel.arg_names, "constexpr")
    signature |= {"y": "*fp32", "route": "*fp32", "out": "*fp16", "residual_stride": "i32"}
    fixed: dict[str, object] = {"residual": None, "width": 2048, "K": 8, "COLUMNS": 1024, "ASM": True}
    cases.append(CompileCase("grouped sum", weighted_sum_kernel, signature, fixed, ("y", "route", "out")))
    return cases


def few_case(name: str | None, dtype: str, gate: GateKind | None = None) -> CompileCase:
    """Describe the kernel for few pairs in a layout (None: dense), as it is launched on a GPU."""
    import triton.language as tl

    from edgelm.kernels.gpu_target import kwidth
    from edgelm.kernels.grouped.kernel import NUM_WARPS, few_pairs_kernel
    from edgelm.kernels.matmul.operands import planes_and_constants

    columns = {"int8": 2304, None: 16384}.get(name, 2048)  # with 8192 the loop is unrolled on sm_80 to sm_89
    kind, torch_type = (tl.float16, torch.float16) if dtype == "fp16" else (tl.bfloat16, torch.bfloat16)
    layout = name or str(torch_type).removeprefix("torch.")
    weight = random_weight(Case(layout, 16, columns, 1), Generator().manual_seed(0))
    planes, constants = planes_and_constants(weight, torch_type)
    named = zip(("codes", "high", "scales", "offsets", "supers"), planes, strict=True)
    pointers = {key: f"*{TYPES[plane.dtype]}" for key, plane in named if plane is not None}
    pointers |= {"x": f"*{dtype}", "out": "*fp32", "blocks": "*i32", "order": "*i32"}
    strides = tuple(f"{key}_stride" for key in ("codes", "high", "scales", "offsets", "supers"))
    fixed: dict[str, object] = dict.fromkeys(("high", "scales", "offsets", "supers", "bias"))
    fixed |= constants | {"N": 1536, "K": columns, "DTYPE": kind, "SHARED": 8, "NW": NUM_WARPS, "MT": 2 if gate else 1}
    fixed |= {"GATE": gate, "LIMIT": 7.0, "ALPHA": 1.702, "KW": kwidth(), "ASM": True}
    signature = dict.fromkeys(few_pairs_kernel.arg_names, "constexpr") | dict.fromkeys((*strides, "matrices"), "i32")
    budgets = {"q4_0": 3.9, "q4_k": 4.0, "q6_k": 5.65, "q8_0": 7.3}
    gated_spills = SPILLS_38 if triton_version().startswith("3.8.") else {}
    other_spills = SPILLS_37 if triton_version().startswith("3.7.") else {}
    return CompileCase(
        f"grouped {layout} {dtype}{' ' + gate if gate else ''}",
        few_pairs_kernel,
        signature | pointers,
        {key: value for key, value in fixed.items() if key not in pointers},
        (*pointers, *strides),
        NUM_WARPS,
        {"num_stages": 1},
        loop_weights=64 if gate else 32,
        spills_on=gated_spills.get(layout, {}) if gate else SPILLS.get(layout, {}) | other_spills.get(layout, {}),
        budget=budgets.get(layout) if isinstance(weight, PackedWeight) and gate else None,
        # of groups of 16, four lanes read a sector of x together, 8 bytes each
        wide_loads=not (isinstance(weight, PackedWeight) and weight.layout.group == 16),
        differs_on=(90,) if gate and layout == "q4_k" else (),  # spills with Triton 3.8
        main=gate is not None or name == "q6_k",
    )
