"""Matmul of more rows than decode has: fused, or by a scratch and the vendor's matmul, whichever the size suits.

Owns the choice, the slices of the scratch and what follows its products. Knows nothing of norms. Both ways multiply by
the weight rounded to the type of x and sum in float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from edgelm.kernels import prefill as fused
from edgelm.kernels.dequantize import dequantize
from edgelm.kernels.gate import Gate
from edgelm.kernels.layout import TILE, DenseWeight, PackedWeight, Weight, planes
from edgelm.kernels.matmul.reference import finish

# From here on, writing and reading the weight once more in 16 bits costs less than unpacking it for every block of
# rows: estimated from bandwidth and tensor throughput of the H200 and the 4090, not measured.
SCRATCH_ROWS = 512
SCRATCH_BYTES = 256 << 20  # of the scratch, and again of the products of one slice


def prefill(
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
    if isinstance(weight, DenseWeight) or len(x) >= SCRATCH_ROWS:
        return by_scratch(x, weight, bias, residual, gate, out_dtype, implementation=implementation)
    return fused.prefill(
        x, weight, bias=bias, residual=residual, gate=gate, out_dtype=out_dtype, implementation=implementation
    )


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
    """Dequantize slices of rows into one scratch after the other's use, and multiply each by torch.mm."""
    if isinstance(weight, PackedWeight) and weight.order is not None:
        x = x[:, weight.order]
    step = _slice_rows(x, weight, limit_bytes)
    parts = 2 if gate is not None else 1
    out = torch.empty((len(x), weight.rows // parts), dtype=out_dtype, device=x.device)
    dense = isinstance(weight, DenseWeight) and weight.data.dtype == x.dtype
    scratch = None if dense else torch.empty((min(step, weight.rows), weight.columns), dtype=x.dtype, device=x.device)
    for start in range(0, weight.rows, step):
        part = rows_of(weight, start, min(start + step, weight.rows))
        if scratch is None:
            assert isinstance(part, DenseWeight)
            matrix = part.data
        else:
            matrix = dequantize(part, x.dtype, out=scratch[: part.rows], implementation=implementation)
        columns = slice(start // parts, (start + part.rows) // parts)
        out[:, columns] = finish(
            _product(x, matrix),
            None if bias is None else bias[start : start + part.rows],
            None if residual is None else residual[:, columns],
            gate,
            out_dtype,
        )
    return out


def rows_of(weight: Weight, start: int, end: int) -> Weight:
    """Return rows of a matrix, from a whole tile on, as a weight that shares its memory; without its order."""
    assert start % TILE == 0
    if isinstance(weight, DenseWeight):
        return replace(weight, data=weight.data[start:end])
    tiles = slice(start // TILE, -(-end // TILE))
    each: dict[str, Any] = {name: plane[tiles] for name, plane in planes(weight).items() if name != "order"}
    return replace(weight, rows=end - start, order=None, **each)


def _slice_rows(x: Tensor, weight: Weight, limit_bytes: int) -> int:
    """Return how many rows of the weight fit the limits, in whole pairs of tiles."""
    each = max(weight.columns * x.element_size(), len(x) * 4, 1)
    return max(limit_bytes // each // (2 * TILE), 1) * 2 * TILE


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """Return x @ matrix.T in float32: summed in it, whatever the types; rounded to that of x by torch before 2.8."""
    if not x.is_cuda or x.dtype == torch.float32:
        return x.float() @ matrix.float().T
    if _writes_float32(torch.__version__):
        return torch.mm(x, matrix.T, out_dtype=torch.float32)
    return torch.mm(x, matrix.T).float()


def _writes_float32(version: str) -> bool:
    """Whether the matmul of this version of torch has an `out_dtype`."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= (2, 8)
