"""Embedding: rows of a weight, by token ids that are read on the device.

Owns the signature and the choice of implementation. Knows nothing of vocabularies. For an id outside of the weight's
rows nothing is read: its row of the result is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.choice import dispatch
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

    The values of `layout.dequantize` are multiplied by `scale` in float32 and rounded once. Raises NoKernelError.
    """
    assert ids.dim() == 1
    assert ids.dtype in (torch.int32, torch.int64)
    assert weight.num_matrices == 0
    return dispatch("embedding", __name__, reference.embedding, implementation, ids, weight, scale, out_dtype)
