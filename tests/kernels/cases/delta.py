"""The shapes that the gated delta net is tested and compiled with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from edgelm.kernels.delta import RING, StateCache, allocate
from edgelm.kernels.delta_sizes import DeltaSizes
from tests.kernels.compile_case import CompileCase

# Of prompts, where the tensor cores take a chunk's matrices from registers: docs/experiments.md has what was tried.
SPILLS = {80: 140, 86: 95, 89: 95, 120: 185}
SMALL = DeltaSizes(2, 4, 16, 32, 4, alternating=False)
TILED = DeltaSizes(2, 4, 32, 64, 4, alternating=True)
SINGLE = DeltaSizes(1, 1, 16, 16, 2, alternating=False)
WIDE = DeltaSizes(1, 2, 128, 32, 3, alternating=False)  # several warps have parts of a key
QWEN = DeltaSizes(16, 32, 128, 128, 4, alternating=True)  # Qwen3.5-9B
SMALLEST = DeltaSizes(16, 16, 128, 128, 4, alternating=False)  # Qwen3.5-0.8B


class Run(NamedTuple):
    """The rows of one sequence in a step."""

    slot: int
    state: int  # position of its state
    goal: int
    start: int
    rows: int


class Case(NamedTuple):
    """Sequences of one step."""

    name: str
    sizes: DeltaSizes
    runs: tuple[Run, ...]
    dtype: torch.dtype = torch.float32


CASES = (
    Case("one token", SMALL, (Run(1, 0, 1, 0, 1),)),
    Case("decode, verify, none", SMALL, (Run(3, 7, 8, 7, 1), Run(1, 9, 10, 9, 3), Run(0, 5, 5, 5, 0))),
    Case("again", TILED, (Run(2, 40, 46, 45, 4), Run(0, 64, 66, 70, 2)), torch.float16),
    Case("prompts", SMALL, (Run(2, 0, 17, 0, 17), Run(1, 7, 8, 7, 1))),
    Case("a later part", TILED, (Run(0, 5, 42, 5, 37),), torch.bfloat16),
    Case("short window", SINGLE, (Run(1, 62, 65, 62, 3), Run(0, 3, 20, 3, 17))),
    Case("wide heads", WIDE, (Run(1, 62, 64, 63, 3), Run(0, 5, 24, 5, 19)), torch.bfloat16),
)


class Inputs(NamedTuple):
    """Arguments of `gated_delta`, in its order."""

    qkv: Tensor
    beta: Tensor
    alpha: Tensor
    conv: Tensor
    decay: Tensor
    bias: Tensor
    cache: StateCache
    spans: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor


def inputs(case: Case, generator: Generator) -> Inputs:
    """Return inputs with a row of padding; projections are slices of wider rows."""
    sizes, heads = case.sizes, case.sizes.num_value_heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    starts = [0]
    for run in case.runs:
        starts.append(starts[-1] + run.rows)
    rows = normal(starts[-1] + 1, sizes.channels + 2 * heads + 3).to(case.dtype)
    qkv, beta, alpha, _ = torch.split(rows, [sizes.channels, heads, heads, 3], 1)
    cache = allocate(sizes, 1 + max(run.slot for run in case.runs), "cpu", case.dtype)
    cache.states.copy_(0.3 * normal(*cache.states.shape))
    cache.inputs.copy_(normal(*cache.inputs.shape))
    return Inputs(
        qkv,
        beta,
        alpha,
        0.5 * normal(sizes.channels, sizes.window),
        -0.3 * normal(heads).exp(),
        normal(heads),
        cache,
        torch.tensor([run[:3] for run in case.runs], dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([run.start + run.rows for run in case.runs], dtype=torch.int32),
    )


def compile_cases() -> list[CompileCase]:
    """Return the kernels for the heads of real models."""
    return [
        case
        for sizes, dtype in ((QWEN, torch.bfloat16), (SMALLEST, torch.float16))
        for case in _compile_cases(sizes, dtype)
    ]


def _compile_cases(sizes: DeltaSizes, dtype: torch.dtype) -> list[CompileCase]:
    from edgelm.kernels.delta import kernel as kernels

    kind = {torch.float16: "*fp16", torch.bfloat16: "*bf16"}[dtype]
    inputs = {"qkv_ptr": kind, "beta_ptr": kind, "alpha_ptr": kind}
    weights = {"conv_ptr": "*fp32", "decay_ptr": "*fp32", "bias_ptr": "*fp32", "states_ptr": "*fp32"}
    where = {"spans_ptr": "*i32", "query_start_ptr": "*i32", "seq_lens_ptr": "*i32"}
    strides = {"qkv_row": "i32", "beta_row": "i32", "alpha_row": "i32"}
    moving = inputs | weights | {"inputs_ptr": kind} | where | {"out_ptr": "*fp32"} | strides
    keeping = inputs | {"inputs_ptr": kind} | where | strides
    fixed: dict[str, object] = dict(kernels.constants(sizes, RING))
    kept: dict[str, object] = {
        "CHANNELS": sizes.channels,
        "HEADS": sizes.num_value_heads,
        "WINDOW": sizes.window,
        "RING": RING,
        "MOST": fixed["MOST"],
        "BLOCK": kernels.KEPT_BLOCK,
    }
    name = f"{sizes.num_key_heads}:{sizes.num_value_heads} heads of {sizes.key_dim} {kind[1:]}"
    many = {"CHUNK": kernels.CHUNK}
    return [
        CompileCase(
            name=f"delta {what} {name}",
            fn=fn,
            signature=types | dict.fromkeys(constants, "constexpr"),
            constants=constants,
            divisible=tuple(types),
            num_warps=warps,
            options=kernels.OPTIONS,
            spills_on=SPILLS if what == "prompt" else {},
            wide_loads=False,
            main=sizes is QWEN and what != "keep",
        )
        for what, fn, types, constants, warps in (
            ("step", kernels.step_kernel, moving, fixed, kernels.step_warps(sizes)),
            ("prompt", kernels.prompt_kernel, moving, fixed | many, kernels.PROMPT_WARPS),
            ("keep", kernels.keep_kernel, keeping, kept, 4),
        )
    ]
