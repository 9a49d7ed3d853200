"""Dequantizing in plain torch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels import layout
from edgelm.kernels.layout import Weight, row_parts


def dequantize(weight: Weight, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    """Write the float32 values of a weight, rounded to `dtype`, to `out`."""
    assert out.dtype == dtype
    if weight.num_matrices:
        return out.copy_(layout.dequantize(weight))
    start = 0
    for part in row_parts(weight):
        out[start : start + part.rows] = layout.dequantize(part)
        start += part.rows
    return out
