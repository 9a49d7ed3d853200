"""Programs in PTX that tests write by hand, and their run without Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.kernels.ptx.machine import Machine, Order
from tests.kernels.ptx.parse import parse

DECLARED = ".reg .pred %p<16>; .reg .b16 %rs<32>; .reg .b32 %r<200>; .reg .b64 %rd<32>;"


def run(
    body: str,
    tensors: Sequence[torch.Tensor],
    *,
    warps: int = 1,
    ctas: int = 1,
    together: int = 2,
    shared_bytes: int = 16384,
    order: Order = "least",
    seed: int = 0,
    races: bool = False,
) -> None:
    """Run a program; %rd0, %rd1, ... are the addresses of the tensors, %r0 the number of the thread."""
    names = [f"test_param_{number}" for number in range(len(tensors))]
    loads = " ".join(f"ld.param.b64 %rd{number}, [{name}];" for number, name in enumerate(names))
    text = f"""
        .extern .shared .align 16 .b8 smem[];
        .visible .entry test({", ".join(f".param .u64 {name}" for name in names)})
        {{ {DECLARED} {loads} mov.u32 %r0, %tid.x; {body} ret; }}"""
    machine = Machine(parse(text), warps, min(together, ctas), shared_bytes, order, races)
    machine.run(tensors, [tensor.data_ptr() for tensor in tensors], (ctas,), seed)
