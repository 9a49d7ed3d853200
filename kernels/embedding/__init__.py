"""Embedding: rows of a weight, by token ids that are read on the device.

Owns the signature and the choice of implementation. Knows nothing of vocabularies. An id outside of the weight's rows
reads nothing: its row of the result is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.choice import Implementation, choose, declines_reference, declines_triton
from edgelm.kernels.embedding import reference
from edgelm.kernels.layout import Weight


def embedding(
    ids: Tensor,
    weight: Weight,
    *,
    scale: float = 1.0,
    out_dtype: torch.dtype = torch.float32,
    implementation: str | None = None,
) -> Tensor:
    """Return the rows `ids` (int32 or int64 [tokens]) of a weight, times `scale`, as `out_dtype` [tokens, columns].

    Values are those of `layout.dequantize` in float32, times `scale` in float32, rounded once. Raises NoKernelError.
    """
    assert ids.dim() == 1
    assert ids.dtype in (torch.int32, torch.int64)
    assert weight.num_matrices == 0
    kernel = choose("embedding", _IMPLEMENTATIONS, implementation, ids, weight, implementation)
    found = kernel.run(ids, weight, scale=scale, out_dtype=out_dtype)
    assert isinstance(found, Tensor)
    return found


def _declines_triton(ids: Tensor, *_: object) -> str | None:
    return declines_triton(ids)


def _run_triton(ids: Tensor, weight: Weight, *, scale: float, out_dtype: torch.dtype) -> Tensor:
    from edgelm.kernels.embedding import triton

    return triton.embedding(ids, weight, scale=scale, out_dtype=out_dtype)


def _declines_reference(ids: Tensor, _: Weight, wanted: str | None) -> str | None:
    return declines_reference(ids, wanted)


_IMPLEMENTATIONS = (
    Implementation("triton", _declines_triton, _run_triton),
    Implementation("reference", _declines_reference, reference.embedding),
)
