"""x @ weight.T for every kind of weight, with what may surround it: RMSNorm of x, bias, gate, residual.

Owns the signature, the choice between implementations, and the split by the number of rows. Knows nothing of models.

1 to ROWS rows are one numerics class: a row's result does not depend, bit for bit, on how many rows stand beside it,
so that verifying a draft gives the tokens that decoding gives. More rows are a prompt: another kernel, other rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.choice import Implementation, choose, declines_reference, declines_triton
from edgelm.kernels.gate import Gate
from edgelm.kernels.layout import TILE, PackedWeight, Weight
from edgelm.kernels.matmul.reference import Norm, reference
from edgelm.kernels.norm import rms_norm

__all__ = ["ROWS", "Norm", "matmul"]

ROWS = 16  # of decoding and verifying


def matmul(
    x: Tensor,
    weight: Weight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gate: Gate | None = None,
    norm: Norm | None = None,
    out_dtype: torch.dtype | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Return gate(norm(x) @ weight.T + bias) + residual, [rows, N], with a gate [rows, N / 2].

    x is [rows, K] in float16, bfloat16 or float32, bias [N] in the weight's order of rows, residual as the result. A
    gate needs a weight of `fuse_gated`. Sums are float32; `out_dtype` is the residual's type, else x's, if not given. A
    float32 x, such as a residual stream, is multiplied as `out_dtype` once it is normed: tensor cores take 16 bits.
    """
    if out_dtype is None:
        out_dtype = x.dtype if residual is None else residual.dtype
    _check(x, weight, bias, residual, gate, norm)
    if x.shape[0] == 0:
        return x.new_empty((0, weight.rows // (2 if gate else 1)), dtype=out_dtype)
    args = (x, weight, bias, residual, gate, norm, out_dtype)
    chosen = choose(
        "matmul",
        [
            Implementation("triton", _declines_triton, _run_triton),
            Implementation("reference", lambda *_: declines_reference(x, implementation), reference),
        ],
        implementation,
        *args,
    )
    result = chosen.run(*args)
    assert isinstance(result, Tensor)
    return result


def _check(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None, gate: Gate | None, norm: Norm | None
) -> None:
    rows, columns = x.shape
    assert columns == weight.columns, f"x has {columns} columns, the weight {weight.columns}"
    assert weight.num_matrices == 0, "a stack of matrices is for grouped_matmul"
    assert (gate is not None) == weight.gated, "a gate and a weight of fuse_gated belong together"
    width = weight.rows // 2 if gate else weight.rows
    assert gate is None or weight.rows % (2 * TILE) == 0
    assert bias is None or bias.shape == (weight.rows,)
    assert residual is None or residual.shape == (rows, width)
    assert norm is None or norm.weight.shape == (columns,)


def _declines_triton(x: Tensor, weight: Weight, *_: object) -> str | None:
    reason = declines_triton(x)
    if reason is not None:
        return reason
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"x is {x.dtype}"
    if isinstance(weight, PackedWeight) and weight.layout.two_level and weight.codes.shape[-2] % 4:
        return "two-level scales of a weight whose columns are not padded to 256"
    if weight.device != x.device:
        return f"the weight is on {weight.device}, x on {x.device}"
    return None


def _run_triton(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    gate: Gate | None,
    norm: Norm | None,
    out_dtype: torch.dtype,
) -> Tensor:
    from edgelm.kernels.matmul.prefill import prefill
    from edgelm.kernels.matmul.triton import launch, operand_type

    # The decode kernel divides by the root at the end. Until then float16 has no room for x times the norm's weight.
    operand = operand_type(x.dtype, norm is not None, out_dtype)
    if norm is not None and (x.shape[0] > ROWS or operand == torch.float16):
        x = rms_norm(x, norm.weight, norm.eps, out_dtype=operand, implementation="triton")
        norm = None
    if x.shape[0] <= ROWS:
        return launch(x, weight, bias, residual, gate, norm, out_dtype)
    return prefill(x, weight, bias, residual, gate, out_dtype, implementation="triton")
