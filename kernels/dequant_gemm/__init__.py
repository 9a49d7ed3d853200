"""The matmul of a prompt, of more rows than a decode step has: fused, or by a scratch and torch.mm.

Owns the choice between the two ways, the signature of the fused kernel, and the slices of the scratch. Knows nothing of
norms. Both ways multiply by the weight rounded to the type of x, and sum in float32. In the fused one, a row's result
does not depend, to the last bit, on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.activation import Gate
from edgelm.kernels.choice import dispatch
from edgelm.kernels.dequant_gemm import reference
from edgelm.kernels.dequant_gemm.configs import row_blocks
from edgelm.kernels.dequantize import dequantize
from edgelm.kernels.layout import TILE, DenseWeight, PackedWeight, Weight, slice_rows
from edgelm.kernels.matmul import declines_weight
from edgelm.kernels.matmul.reference import finish

# From this many rows on, writing and reading the weight once in 16 bits costs less than unpacking it for every block
# of rows: estimated from bandwidth and tensor throughput of the H200 and the 4090, not measured.
SCRATCH_ROWS = 512
SCRATCH_BYTES = 256 << 20  # of the scratch, and again of the products of one slice


def dequant_gemm(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gate: Gate | None = None,
    out_dtype: torch.dtype = torch.float32,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Return gate(x @ weight.T + bias) + residual, [rows, N] or with a gate [rows, N / 2]."""
    if isinstance(weight, DenseWeight) or by_slices(len(x)):
        return by_scratch(x, weight, bias, residual, gate, out_dtype, implementation=implementation)
    return fused(x, weight, bias, residual, gate, out_dtype, implementation=implementation)


def by_slices(rows: int) -> bool:
    """Return whether so many rows are multiplied by slices of a dequantized weight."""
    return rows >= SCRATCH_ROWS


def launch_kind(rows: int) -> object:
    """Return the kind of the launches with so many rows: two numbers with one kind use the same compiled kernels."""
    return "slices" if by_slices(rows) else row_blocks(rows)


def fused(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gate: Gate | None = None,
    out_dtype: torch.dtype = torch.float32,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Do so in one kernel, for any number of rows. Sums are rounded once, to `out_dtype`. Raises NoKernelError."""
    assert weight.num_matrices == 0
    assert x.shape[1] == weight.columns
    assert weight.gated == (gate is not None)
    assert gate is None or weight.rows % (2 * TILE) == 0
    declined = declines_weight(x, weight)
    if isinstance(weight, DenseWeight) and weight.data.dtype != x.dtype:
        declined = f"the weight is {weight.data.dtype}, x is {x.dtype}"
    args = (weight, bias, residual, gate, out_dtype)
    return dispatch("dequant_gemm", __name__, reference.dequant_gemm, implementation, x, *args, declined=declined)


def by_scratch(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    gate: Gate | None,
    out_dtype: torch.dtype,
    *,
    implementation: str | None = None,
    limit_bytes: int = SCRATCH_BYTES,
) -> Tensor:
    """Dequantize the weight slice by slice into the same scratch, and multiply each slice by torch.mm."""
    if isinstance(weight, PackedWeight) and weight.order is not None:
        x = x[:, weight.order]
    step = _rows_per_slice(x, weight, limit_bytes)
    tiles_per_output = 2 if gate is not None else 1
    out = torch.empty((len(x), weight.rows // tiles_per_output), dtype=out_dtype, device=x.device)
    dense = isinstance(weight, DenseWeight) and weight.data.dtype == x.dtype
    scratch = None if dense else torch.empty((min(step, weight.rows), weight.columns), dtype=x.dtype, device=x.device)
    for start in range(0, weight.rows, step):
        part = slice_rows(weight, start, min(start + step, weight.rows))
        if scratch is None:
            assert isinstance(part, DenseWeight)
            matrix = part.data
        else:
            matrix = dequantize(part, x.dtype, out=scratch[: part.rows], implementation=implementation)
        columns = slice(start // tiles_per_output, (start + part.rows) // tiles_per_output)
        out[:, columns] = finish(
            _product(x, matrix),
            None if bias is None else bias[start : start + part.rows],
            None if residual is None else residual[:, columns],
            gate,
            out_dtype,
        )
    return out


def _rows_per_slice(x: Tensor, weight: Weight, limit_bytes: int) -> int:
    """Return how many rows of the weight fit the limit, in whole pairs of tiles."""
    row_bytes = max(weight.columns * x.element_size(), len(x) * 4, 1)
    return max(limit_bytes // row_bytes // (2 * TILE), 1) * 2 * TILE


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """Return x @ matrix.T, summed in float32; torch before 2.8 rounds the sums of 16-bit types to that type."""
    if not x.is_cuda or x.dtype == torch.float32:
        return x.float() @ matrix.float().T
    if _writes_float32(torch.__version__):
        return torch.mm(x, matrix.T, out_dtype=torch.float32)
    return torch.mm(x, matrix.T).float()


def _writes_float32(version: str) -> bool:
    """Return whether the matmul of this version of torch has an `out_dtype`."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= (2, 8)
