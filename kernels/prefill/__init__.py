"""Prefill: the matmul of more rows than decode has, with weights dequantized into the tiles of the tensor cores.

Owns the signature of the fused kernel and the choice of implementation. Knows nothing of the other way, by a scratch
and the vendor's matmul: `edgelm.kernels.matmul.prefill` chooses between the two. Both round weights to the type of x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.choice import Implementation, choose, declines_reference, declines_triton
from edgelm.kernels.gate import Gate
from edgelm.kernels.layout import TILE, DenseWeight, PackedWeight, Weight
from edgelm.kernels.prefill import reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def prefill(
    x: Tensor,
    weight: Weight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gate: Gate | None = None,
    out_dtype: torch.dtype | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Return gate(x @ weight.T + bias) + residual for x [rows, K], of any number of rows: `matmul` without its norm.

    Weights are rounded to the type of x; sums and all that follows are float32; the result is rounded once, to
    `out_dtype`, else the residual's type, else that of x. Raises NoKernelError.
    """
    assert weight.num_matrices == 0
    assert x.shape[1] == weight.columns
    assert weight.gated == (gate is not None)
    assert gate is None or weight.rows % (2 * TILE) == 0
    if out_dtype is None:
        out_dtype = x.dtype if residual is None else residual.dtype
    kernel = choose("prefill", _IMPLEMENTATIONS, implementation, x, weight, implementation)
    y = kernel.run(x, weight, bias=bias, residual=residual, gate=gate, out_dtype=out_dtype)
    assert isinstance(y, Tensor)
    return y


def declines_product(x: Tensor, weight: Weight) -> str | None:
    """Return why no kernel multiplies x by this weight, or by a stack of such."""
    reason = declines_triton(x)
    if reason is not None:
        return reason
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}"
    if weight.device != x.device:
        return f"the weight is on {weight.device}, x on {x.device}"
    if isinstance(weight, PackedWeight) and weight.layout.two_level and weight.codes.shape[-2] % 4:
        return "two-level scales of a weight whose columns are not padded to 256"
    return None


def _declines_triton(x: Tensor, weight: Weight, *_: object) -> str | None:
    if isinstance(weight, DenseWeight) and weight.data.dtype != x.dtype:
        return f"the weight is {weight.data.dtype}, x is {x.dtype}"
    return declines_product(x, weight)


def _run_triton(
    x: Tensor,
    weight: Weight,
    *,
    bias: Tensor | None,
    residual: Tensor | None,
    gate: Gate | None,
    out_dtype: torch.dtype,
) -> Tensor:
    from edgelm.kernels.prefill import triton

    return triton.prefill(x, weight, bias=bias, residual=residual, gate=gate, out_dtype=out_dtype)


def _declines_reference(x: Tensor, _: Weight, wanted: str | None) -> str | None:
    return declines_reference(x, wanted)


_IMPLEMENTATIONS = (
    Implementation("triton", _declines_triton, _run_triton),
    Implementation("reference", _declines_reference, reference.prefill),
)
