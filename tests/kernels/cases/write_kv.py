"""The cases of `write_kv`: shapes, inputs, and compiled kernels."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from edgelm.kernels.cache import BLOCK_LEN, FORMATS, LayerCache, allocate
from edgelm.kernels.rope import Rope
from tests.kernels.compile_case import CompileCase

RopeKind = Literal["none", "neox", "interleaved", "partial", "growing"]
SPAN = 16_384  # positions


class Case(NamedTuple):
    """A launch. The rope "partial" rotates half of the dimensions in neox order, with a scale.

    "growing" is interleaved, and q grows with its position.
    """

    format: str
    head_dim: int
    num_heads: int = 4
    num_kv_heads: int = 2
    tokens: int = 3
    rope: RopeKind = "neox"
    norm: bool = False
    value_norm: bool = False
    dtype: torch.dtype = torch.float16

    @property
    def name(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        after = f"{self.rope}{' norm' * self.norm}{' of v' * self.value_norm} tokens={self.tokens}"
        return f"{self.format} d={self.head_dim} {self.num_heads}:{self.num_kv_heads} {kind} {after}"

    @property
    def rotated_dim(self) -> int:
        return {"none": 0, "partial": self.head_dim // 2}.get(self.rope, self.head_dim)

    @property
    def interleaved(self) -> bool:
        return self.rope in ("interleaved", "growing")


CASES = [
    *(Case(name, 64, 3, 3, 5, norm=True) for name in FORMATS),
    *(Case(name, 128, 7, 1, 2, "interleaved") for name in FORMATS),
    *(Case(name, 80, 2, 2, 2, "partial", dtype=torch.bfloat16) for name in FORMATS),
    *(Case(name, 96, 6, 3, 5, "none", norm=True, dtype=torch.float32) for name in ("int8", "k6v4")),
    *(Case(name, 256, 4, 2, 2, "partial", norm=True) for name in ("fp8", "k6v4")),
    *(Case(name, 32, 2, 1, 3, "neox") for name in ("k8v4", "k6v4")),
    *(Case(name, 16, 2, 1, 3, "interleaved") for name in ("f16", "k6v4")),
    *(Case(name, 512, 2, 1, 3, "neox", norm=True, value_norm=True) for name in ("f16", "int8", "k6v4")),
    *(Case(name, 64, 3, 1, tokens, "growing") for name, tokens in (("f16", 3), ("k8v4", 70))),
]


class Inputs(NamedTuple):
    """Arguments of `write_kv`; q, k and v are views of one tensor of several heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    slot_mapping: Tensor
    cache: LayerCache
    rope: Rope | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    v_norm: Tensor | None = None


def inputs(case: Case, generator: Generator, device: str = "cpu") -> Inputs:
    """Return inputs of a case with a cleared cache; the second of three or more tokens is padding."""
    sizes = [case.num_heads, case.num_kv_heads, case.num_kv_heads]
    fused = torch.randn(case.tokens, sum(sizes), case.head_dim, generator=generator).to(device, case.dtype)
    q, k, v = torch.split(fused, sizes, 1)
    blocks = max(4, -(-2 * case.tokens // BLOCK_LEN))
    slot_mapping = torch.randperm(blocks * BLOCK_LEN, generator=generator)[: case.tokens]
    if case.tokens > 2:
        slot_mapping[1] = -1
    positions = torch.randint(0, 131_072, (case.tokens,), generator=generator, dtype=torch.int32)
    norms = (1 + torch.randn(2, case.head_dim, generator=generator) / 4).to(device) if case.norm else (None, None)
    rope = None
    if case.rope != "none":
        exponents = torch.arange(0, case.rotated_dim, 2, dtype=torch.float32) / case.rotated_dim
        scale = 1.2 if case.rope == "partial" else 1.0
        growth = (1 + 0.1 * torch.log1p(torch.arange(5))).to(device) if case.rope == "growing" else None
        rope = Rope((500_000.0**-exponents).to(device), scale, case.interleaved, growth, SPAN)
    cache = allocate(
        FORMATS[case.format],
        blocks,
        case.num_kv_heads,
        case.head_dim,
        device,
        torch.float16 if case.dtype == torch.float32 else case.dtype,
    )
    v_norm = torch.ones(case.head_dim, device=device) if case.value_norm else None
    return Inputs(q, k, v, positions.to(device), slot_mapping.to(device), cache, rope, norms[0], norms[1], v_norm)


def compile_cases() -> list[CompileCase]:
    """Return the kernel for Llama-8B in every format, and for other heads, norms and rotations."""
    main = [
        Case("k8v4", 128, 32, 8, 1),
        Case("fp8", 80, 32, 32, 512, "partial"),
        Case("k6v4", 256, 8, 4, 512, norm=True, dtype=torch.bfloat16),
    ]
    more = [
        *(Case(name, 128, 32, 8, tokens) for name in FORMATS for tokens in (1, 512)),
        Case("int8", 128, 32, 8, 1, norm=True, dtype=torch.bfloat16),
        Case("k6v4", 96, 32, 32, 512, "interleaved"),
        Case("f16", 64, 64, 8, 1, "none", dtype=torch.bfloat16),
        Case("k8v4", 128, 32, 8, 1, "growing"),
        *(Case(name, 512, 16, 2, 1, norm=True, value_norm=True, dtype=torch.bfloat16) for name in ("f16", "k6v4")),
    ]
    return [_compile_case(case, case in main) for case in dict.fromkeys(main + more)]


def _compile_case(case: Case, main: bool) -> CompileCase:
    from edgelm.kernels.write_kv import kernel as kernels

    kv_format = FORMATS[case.format]
    cache = allocate(kv_format, 1, case.num_kv_heads, case.head_dim, "meta", case.dtype)
    rows, num_warps = kernels.launch_shape(case.tokens, cache.width)
    kind = {torch.float16: "*fp16", torch.bfloat16: "*bf16"}[case.dtype]
    stored = {None: kind, "int8": "*u8", "fp8": "*u8", "int4": "*u8", "int6": "*i32"}
    pointers = {
        "q_ptr": kind,
        "k_ptr": kind,
        "v_ptr": kind,
        "positions_ptr": "*i32",
        "slot_mapping_ptr": "*i64",
        "out_ptr": kind,
        "turns_ptr": "*i64",
        "q_norm_ptr": "*fp32",
        "k_norm_ptr": "*fp32",
        "v_norm_ptr": "*fp32",
        "growth_ptr": "*fp32",
        "keys_ptr": stored[kv_format.key],
        "values_ptr": stored[kv_format.value],
        "key_scales_ptr": "*fp16",
        "value_scales_ptr": "*fp16",
        "key_high_ptr": "*i32",
    }
    strides = dict.fromkeys(("q_token", "q_head", "k_token", "k_head", "v_token", "v_head"), "i32")
    numbers = {"eps": "fp32", "rope_scale": "fp32", "span": "i32", "last_span": "i32"}
    absent = ["q_norm_ptr", "k_norm_ptr"] if not case.norm else []
    absent += ["turns_ptr"] if case.rope == "none" else []
    absent += ["v_norm_ptr"] if not case.value_norm else []
    absent += ["growth_ptr"] if case.rope != "growing" else []
    absent += [f"{name}_ptr" for name in ("key_scales", "value_scales", "key_high") if name not in cache.planes]
    fixed = kernels.constants(cache, case.num_heads, case.rotated_dim, case.interleaved, rows)
    return CompileCase(
        name=f"write_kv {case.name}",
        fn=kernels.write_kv_kernel,
        signature=pointers | strides | numbers | dict.fromkeys(fixed, "constexpr"),
        constants=dict.fromkeys(absent) | fixed,
        divisible=tuple(name for name in (*pointers, *strides) if name not in absent),
        num_warps=num_warps,
        options=kernels.OPTIONS,
        main=main,
    )
