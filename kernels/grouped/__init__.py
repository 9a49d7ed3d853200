"""Grouped matmul: each row times the matrices of its own experts, for mixtures of experts.

Owns the signature and the choice of implementation. Knows nothing of routing. Which experts are active is known on the
device only: nothing here waits for it, and shapes do not depend on it, so a CUDA graph serves every routing.

A pair is (token, one of its k experts), numbered token * k + j. An expert id outside of the stack (-1 for a row that
pads a batch) has no weights to read: the result of its pair is zero.

Up to 16 tokens are one numerics class: a token's result does not depend on the others in the batch, to the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.choice import Implementation, choose, declines_reference
from edgelm.kernels.gate import Gate
from edgelm.kernels.grouped import reference
from edgelm.kernels.layout import TILE, Weight
from edgelm.kernels.prefill import declines_product


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

    `x` is [tokens, K], each row for all its experts, or [tokens * k, K], a row for each pair; `weight` a stack of E
    matrices [N, K]; `bias` [E, N] in the order of the rows. With `gate` the weight's tiles of gate and up alternate,
    and N_out = N / 2. Returns a row for each pair, [tokens * k, N_out]; with `route`, float32 [tokens, k], the sum of
    route * row over k, in order of k, [tokens, N_out], plus `residual`. The dtype is `out_dtype`, else the
    residual's, else that of x. Raises NoKernelError.
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
    kernel = choose("grouped_matmul", _IMPLEMENTATIONS, implementation, x, weight, implementation)
    y = kernel.run(x, weight, experts, bias=bias, gate=gate, route=route, residual=residual, out_dtype=out_dtype)
    assert isinstance(y, Tensor)
    return y


def _declines_triton(x: Tensor, weight: Weight, *_: object) -> str | None:
    return declines_product(x, weight)


def _run_triton(
    x: Tensor,
    weight: Weight,
    experts: Tensor,
    *,
    bias: Tensor | None,
    gate: Gate | None,
    route: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    from edgelm.kernels.grouped import triton

    return triton.grouped_matmul(
        x, weight, experts, bias=bias, gate=gate, route=route, residual=residual, out_dtype=out_dtype
    )


def _declines_reference(x: Tensor, _: Weight, wanted: str | None) -> str | None:
    return declines_reference(x, wanted)


_IMPLEMENTATIONS = (
    Implementation("triton", _declines_triton, _run_triton),
    Implementation("reference", _declines_reference, reference.grouped_matmul),
)
