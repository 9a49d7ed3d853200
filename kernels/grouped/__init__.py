"""Grouped matmul: each row times the matrices of its own experts, for mixtures of experts.

Owns the signature. Knows nothing of routing. Only the device knows which experts are active: nothing here waits for it,
and no shape depends on it, so one CUDA graph serves every routing.

A pair is (token, one of its k experts), numbered token * k + j. An expert id outside of the stack (-1 in a row that
pads a batch) has no weights to read: the result of its pair is zero.

Up to `matmul.ROWS` tokens are one numerics class: a token's result does not depend, to the last bit, on the rest of the
batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.activation import Gate
from edgelm.kernels.choice import dispatch
from edgelm.kernels.grouped import reference
from edgelm.kernels.layout import TILE, Weight
from edgelm.kernels.matmul import declines_weight


def grouped_matmul(
    x: Tensor,
    weight: Weight,
    experts: Tensor,
    *,
    bias: Tensor | None = None,
    gate: Gate | None = None,
    route: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Multiply rows by the matrices of their experts, int32 [tokens, k]; with `route`, sum over each token's experts.

    `x` is [tokens, K], a row for all experts of its token, or [tokens * k, K], a row for each pair; `weight` is a stack
    of E matrices [N, K]; `bias` is [E, N] in the weight's row order. With `gate`, tiles of gate and up alternate in the
    weight, and N_out = N / 2. Returns a row for each pair, [tokens * k, N_out]. With `route`, float32 [tokens, k], it
    returns the sum of route * row over k, in order of k, plus `residual`: [tokens, N_out]. The dtype is `out_dtype`,
    else the residual's, else x's. Raises NoKernelError.
    """
    tokens, k = experts.shape
    assert experts.dtype == torch.int32
    assert x.shape in ((tokens, weight.columns), (tokens * k, weight.columns))
    assert weight.num_matrices > 0
    assert weight.gated == (gate is not None)
    assert gate is None or weight.rows % (2 * TILE) == 0
    assert bias is None or bias.shape == (weight.num_matrices, weight.rows)
    assert route is None or (route.shape == experts.shape and route.dtype == torch.float32)
    width = weight.rows // 2 if gate is not None else weight.rows
    assert residual is None or (route is not None and residual.shape == (tokens, width))
    if out_dtype is None:
        out_dtype = x.dtype if residual is None else residual.dtype
    args = (weight, experts, bias, gate, route, residual, out_dtype)
    declined = declines_weight(x, weight)
    return dispatch("grouped_matmul", __name__, reference.grouped_matmul, implementation, x, *args, declined=declined)
