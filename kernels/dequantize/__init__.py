"""Dequantize: a weight as a matrix of floats, for matmuls that read it many times and for checks of packing.

Owns the signature and the choice of implementation. Knows nothing of matmuls. The values are exactly those of
`layout.dequantize`, computed in float32 and rounded once to the result's type.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.choice import Implementation, choose, declines_reference, declines_triton, preferred
from edgelm.kernels.dequantize import reference
from edgelm.kernels.layout import DenseWeight, PackedWeight, Weight

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def dequantize(
    weight: Weight, dtype: torch.dtype, *, out: Tensor | None = None, implementation: str | None = None
) -> Tensor:
    """Return a weight as `dtype` [.., rows, columns], in the weight's own column order (`order` is not applied).

    The values are written to `out` if it is given: contiguous, of that type and shape. Raises NoKernelError.
    """
    stack = (weight.num_matrices,) if weight.num_matrices else ()
    shape = (*stack, weight.rows, weight.columns)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=weight.device)
    assert out.shape == shape
    assert out.dtype == dtype
    assert out.is_contiguous()
    implementation = preferred("dequantize", implementation)
    choose("dequantize", _IMPLEMENTATIONS, implementation, weight, dtype, implementation).run(weight, dtype, out=out)
    return out


def _declines_triton(weight: Weight, dtype: torch.dtype, *_: object) -> str | None:
    if dtype not in DTYPES:
        return f"it writes 16-bit and 32-bit floats, not {dtype}"
    return declines_triton(weight.codes if isinstance(weight, PackedWeight) else weight.data)


def _run_triton(weight: Weight, *_: object, out: Tensor) -> Tensor:
    if isinstance(weight, DenseWeight):
        return out.copy_(weight.data)
    from edgelm.kernels.dequantize import kernel

    return kernel.dequantize(weight, out)


def _declines_reference(weight: Weight, _: torch.dtype, implementation: str | None) -> str | None:
    return declines_reference(weight.codes if isinstance(weight, PackedWeight) else weight.data, implementation)


_IMPLEMENTATIONS = (
    Implementation("triton", _declines_triton, _run_triton),
    Implementation("reference", _declines_reference, reference.dequantize),
)
