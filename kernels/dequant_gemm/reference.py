"""The matmul of a prompt in plain torch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels import layout
from edgelm.kernels.activation import Gate
from edgelm.kernels.layout import PackedWeight, Weight, row_parts
from edgelm.kernels.matmul.reference import finish


def dequant_gemm(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None, gate: Gate | None, out_dtype: torch.dtype
) -> Tensor:
    """Multiply in float32 by the weight rounded to the type of x."""
    if isinstance(weight, PackedWeight) and weight.order is not None:
        x = x[:, weight.order]
    parts = [x.float() @ layout.dequantize(part).to(x.dtype).float().T for part in row_parts(weight)]
    return finish(torch.cat(parts, 1), bias, residual, gate, out_dtype)
