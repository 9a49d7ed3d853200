"""Embedding: rows of a weight, by token ids that are read on the device.

Owns the signature and the choice of implementation. Knows nothing of vocabularies. For an id outside of the weight's
rows nothing is read: its row of the result is zero. A token that only the device knows is named by its place in another
tensor there: the step that was launched ahead of its input then needs no kernel that puts its ids together.
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
    last: Tensor | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Return the rows `ids` (int32 or int64 [tokens]) of a weight, times `scale`, as `out_dtype` [tokens, columns].

    The values of `layout.dequantize` are multiplied by `scale` in float32 and rounded once. With `last`, int64 [any
    number], the id -1 - i stands for the token last[i], or for token 0 if that is below 0. Raises NoKernelError.
    """
    assert ids.dim() == 1
    assert ids.dtype in (torch.int32, torch.int64)
    assert weight.num_matrices == 0
    assert last is None or (last.dim(), last.dtype) == (1, torch.int64)
    return dispatch("embedding", __name__, reference.embedding, implementation, ids, weight, scale, out_dtype, last)
