"""The activations in Triton.

Owns the kernels, their launch, and the gates as device code: other kernels fuse `gated_values` too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelm.kernels.gates import Gate
from edgelm.kernels.pdl import begin_dependent, uses_pdl

BLOCK = 1024
OPTIONS = {"enable_fp_fusion": True}  # explicit, since Triton's default is about to change


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent, within 3e-7 relative; Triton has none that runs in its interpreter.

    Near 0 it is the Taylor series, whose first omitted term is below 1e-9 of the value; elsewhere it uses exp.
    """
    square = tl.minimum(x * x, 1.0)  # the series is not used beyond 1, and must not overflow there
    series = 21844.0 / 6081075.0 - square * (929569.0 / 638512875.0)
    series = square * series - 1382.0 / 155925.0
    series = square * series + 62.0 / 2835.0
    series = square * series - 17.0 / 315.0
    series = square * series + 2.0 / 15.0
    series = square * series - 1.0 / 3.0
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(tl.abs(x) < 0.4, x + x * (square * series), tl.where(x < 0, -size, size))


@triton.jit
def sigmoid(x):
    small = tl.exp(-tl.abs(x))  # never overflows
    return tl.where(x < 0, small, 1.0) / (1.0 + small)


@triton.jit
def gated_values(gate, up, KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return the same as `reference.gated_values`, for float32 tensors of one shape."""
    if KIND == "silu":
        return gate * sigmoid(gate) * up
    elif KIND == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return 0.5 * gate * (1.0 + tanh(inner)) * up
    else:
        tl.static_assert(KIND == "swiglu_oai")
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # unlike tl.minimum, this keeps NaN
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        return gate * sigmoid(ALPHA * gate) * (up + 1.0)


def gate_constants(gate: Gate | None) -> dict[str, object]:
    """Return the constexprs with which a matmul fuses a gate; GATE is None where it fuses none."""
    if gate is None:
        return {"GATE": None, "LIMIT": 0.0, "ALPHA": 0.0}
    return {"GATE": gate.kind, "LIMIT": gate.limit, "ALPHA": gate.alpha}


@triton.jit
def gated_kernel(
    x_ptr,  # [rows, 2 * width], rows x_stride apart
    x_stride,
    out_ptr,  # [rows, width]
    width,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BLOCK: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """Gate BLOCK columns of a row. Grid: rows, blocks of a row."""
    begin_dependent(launch_pdl)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    up_at = width + at
    gate = tl.load(x_ptr + row * x_stride + at, inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + up_at, inside, other=0.0).to(tl.float32)
    y = gated_values(gate, up, KIND, LIMIT, ALPHA)
    tl.store(out_ptr + row * width + at, y.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def softcap_kernel(x_ptr, out_ptr, width, cap, BLOCK: tl.constexpr, launch_pdl: tl.constexpr = False):
    """Cap BLOCK columns of a row. Grid: rows, blocks of a row. The result may replace x: no other program reads it."""
    begin_dependent(launch_pdl)
    start = tl.program_id(0).to(tl.int64) * width
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + start + at, at < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + start + at, (cap * tanh(x / cap)).to(out_ptr.dtype.element_ty), at < width)


def gated(x: Tensor, gate: Gate) -> Tensor:
    """Launch `gated_kernel`."""
    rows, width = len(x), x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if out.numel():
        gated_kernel[(rows, triton.cdiv(width, BLOCK))](
            x, x.stride(0), out, width, KIND=gate.kind, LIMIT=gate.limit, ALPHA=gate.alpha, BLOCK=BLOCK,
            launch_pdl=uses_pdl(), **OPTIONS,
        )  # fmt: skip
    return out


def softcap(x: Tensor, cap: float, out: Tensor | None = None) -> Tensor:
    """Launch `softcap_kernel`."""
    x = x.contiguous()
    if out is None:
        out = torch.empty_like(x)
    if x.numel():
        width = x.shape[-1]  # not the size of all: a launch with another number of rows must not compile
        grid = (x.numel() // width, triton.cdiv(width, BLOCK))
        softcap_kernel[grid](x, out, width, cap, BLOCK=BLOCK, launch_pdl=uses_pdl(), **OPTIONS)
    return out
