"""Matmul: x @ weight.T for every kind of weight, with what may surround it: bias, gate, residual, and norms.

Owns the signature, and the reasons why no kernel multiplies by a weight. Knows nothing of models.

1 to ROWS rows are one numerics class: a row's result does not depend, to the last bit, on the other rows of the batch,
so verifying a draft gives the tokens that decoding gives. More rows are a prompt: another kernel, other rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.activation import Gate
from edgelm.kernels.choice import dispatch
from edgelm.kernels.dequantize import DTYPES
from edgelm.kernels.layout import TILE, PackedWeight, Weight
from edgelm.kernels.matmul import reference
from edgelm.kernels.matmul.reference import Lengths, Norm
from edgelm.kernels.norm import rms_norm

__all__ = ["ROWS", "Lengths", "Norm", "declines_weight", "matmul", "matmul_and_norm"]

ROWS = 64  # of a step that decodes or verifies, at most


def matmul(
    x: Tensor,
    weight: Weight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gate: Gate | None = None,
    lengths: Lengths | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Return gate(x @ weight.T + bias) + residual, [rows, N], with a gate [rows, N / 2].

    x is [rows, K] in float16, bfloat16 or float32; bias [N] in the weight's row order; residual has the shape of the
    result. A gate needs a weight of `fuse_gated`. Sums are float32. The result goes to `out`, a contiguous tensor, by
    default a new one. `out_dtype` defaults to the type of `out`, else the residual's, else x's. With `lengths`, x is
    what `matmul_and_norm` made: each row of the product is divided by its length before the bias.
    """
    rows, columns = x.shape
    assert columns == weight.columns, f"x has {columns} columns, the weight {weight.columns}"
    assert weight.num_matrices == 0, "a stack of matrices is for grouped_matmul"
    assert (gate is not None) == weight.gated, "a gate and a weight of fuse_gated belong together"
    width = weight.rows // 2 if gate else weight.rows
    assert gate is None or weight.rows % (2 * TILE) == 0
    assert bias is None or bias.shape == (weight.rows,)
    assert residual is None or residual.shape == (rows, width)
    assert lengths is None or (rows <= ROWS and lengths.squares.shape == (rows, -(-columns // TILE)))
    if out_dtype is None:
        out_dtype = next((tensor.dtype for tensor in (out, residual) if tensor is not None), x.dtype)
    if out is not None:
        assert (out.shape, out.dtype) == ((rows, width), out_dtype), (out.shape, out.dtype)
        assert out.is_contiguous()
    if rows == 0:
        return x.new_empty((0, width), dtype=out_dtype)
    args = (weight, bias, residual, gate, lengths, out_dtype, out)
    declined = declines_weight(x, weight)
    return dispatch("matmul", __name__, reference.matmul, implementation, x, *args, declined=declined)


def matmul_and_norm(
    x: Tensor,
    weight: Weight,
    norm: Norm,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor, Lengths | None]:
    """Return y = x @ weight.T + bias + residual, float32 [rows, N], the norm of y in `dtype`, and perhaps `Lengths`.

    With them, the second result is y times the norm's weight only: the `matmul` that takes both divides by the lengths
    at its end, so that no kernel has to read y in between. That is so for up to ROWS rows in bfloat16; float16 could
    not hold them. The other arguments are those of `matmul`.
    """
    rows = x.shape[0]
    if not 0 < rows <= ROWS or dtype != torch.bfloat16:
        y = matmul(x, weight, bias=bias, residual=residual, out_dtype=torch.float32, implementation=implementation)
        return y, rms_norm(y, norm.weight, norm.eps, out_dtype=dtype, implementation=implementation), None
    assert x.shape[1] == weight.columns
    assert weight.num_matrices == 0
    assert not weight.gated
    assert bias is None or bias.shape == (weight.rows,)
    assert residual is None or residual.shape == (rows, weight.rows)
    assert norm.weight.shape == (weight.rows,)
    args = (weight, bias, residual, norm.weight, dtype)
    declined = declines_weight(x, weight)
    y, scaled, squares = dispatch(
        "matmul_scaled", __name__, reference.matmul_scaled, implementation, x, *args, declined=declined
    )
    return y, scaled, Lengths(squares, norm.eps)


def declines_weight(x: Tensor, weight: Weight) -> str | None:
    """Return why no kernel multiplies x by this weight, or by a stack of such weights."""
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}"
    if weight.device != x.device:
        return f"the weight is on {weight.device}, x on {x.device}"
    if isinstance(weight, PackedWeight) and weight.layout.two_level and weight.codes.shape[-2] % 4:
        return "two-level scales of a weight whose columns are not padded to 256"
    return None
