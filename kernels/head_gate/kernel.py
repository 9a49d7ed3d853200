"""The gate of heads in Triton: one program per head of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelm.kernels.activation.kernel import sigmoid
from edgelm.kernels.pdl import begin_dependent, uses_pdl

OPTIONS = {"enable_fp_fusion": True}  # explicit, since Triton's default is about to change


@triton.jit
def gate_heads_kernel(
    x_ptr,  # [rows, heads, D], strides x_row and x_head
    gate_ptr,  # the same shape, or one number for a row
    norm_ptr,  # float32 [D]; None: no norm
    out_ptr,  # [rows, heads, D]
    x_row,
    x_head,
    gate_row,
    gate_head,
    heads,
    eps,
    D: tl.constexpr,
    P: tl.constexpr,  # a power of two, at least D
    ONE: tl.constexpr,  # the gate is one number for a row
    launch_pdl: tl.constexpr = False,
):
    """Gate one head of one row. Grid: rows, heads."""
    begin_dependent(launch_pdl)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, P)
    inside = at < D
    x = tl.load(x_ptr + row * x_row + head * x_head + at, inside, other=0.0).to(tl.float32)
    if ONE:
        gate = tl.load(gate_ptr + row * gate_row).to(tl.float32)
    else:
        gate = tl.load(gate_ptr + row * gate_row + head * gate_head + at, inside, other=0.0).to(tl.float32)
    y = x * sigmoid(gate)
    if norm_ptr is not None:
        scale = 1.0 / tl.sqrt_rn(tl.sum(x * x) / D + eps)
        y = x * scale * tl.load(norm_ptr + at, inside, other=0.0) * (gate * sigmoid(gate))
    tl.store(out_ptr + (row * heads + head) * D + at, y.to(out_ptr.dtype.element_ty), inside)


def gate_heads(x: Tensor, gate: Tensor, norm: Tensor | None, eps: float, out_dtype: torch.dtype) -> Tensor:
    """Launch `gate_heads_kernel`."""
    rows, heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if out.numel():
        gate_heads_kernel[(rows, heads)](
            x,
            gate,
            norm,
            out,
            x.stride(0),
            x.stride(1),
            gate.stride(0),
            gate.stride(1),
            heads,
            eps,
            D=head_dim,
            P=triton.next_power_of_2(head_dim),
            ONE=gate.shape != x.shape,
            num_warps=1,
            **OPTIONS,
            launch_pdl=uses_pdl(),
        )
    return out
