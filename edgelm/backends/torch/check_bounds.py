"""Bounds of the difference between a kernel and plain torch, element by element, for the self-check.

A kernel may round numbers to 16 bits and add in another order, no more. Of K products x[k] * w[k] whose numbers are
rounded with a relative error of at most u, independently and with mean 0, the sum is off by more than
8 * u * sqrt(sum of x[k]**2 * w[k]**2) with a probability below 2 * exp(-8**2 / 2) = 3e-14. That is Hoeffding's
inequality, as in Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM Journal on Scientific
Computing 41 (2019). A bound of the worst case, u * sum of |x[k] * w[k]|, is larger by up to sqrt(K), and would let a
wrong column pass.

Owns the formulas. Knows nothing of how the results were computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from edgelm.kernels import layout
from edgelm.kernels.activation import Gate
from edgelm.kernels.attention.reference import one_sequence
from edgelm.kernels.cache import BLOCK_LEN, LayerCache, read
from edgelm.kernels.grouped.reference import matrix
from edgelm.kernels.layout import DenseWeight, Weight, row_parts
from edgelm.kernels.matmul.reference import Norm, gate_and_up

LIKELY = 8.0  # standard deviations, at most
UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
UNIT_TF32 = 2.0**-11  # tensor cores may round float32 to it
SUBNORMAL = 2.0**-25  # half of the smallest float16
POINTWISE = frozenset({"rms_norm", "add_rms_norm", "embedding", "gated", "softcap", "dequantize"})
FEW_STEPS = 2.0**-16  # of float32 operations one after another, relative to the largest value of a row
STEEPEST = 1.2  # slope of a gate, at most


def bounds_of(op: str, chosen: Sequence[Any], run: Sequence[Any], results: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the bound of each element of an op's results, or None where the op has no such bound.

    `chosen` are the arguments by which the implementation was chosen, `run` those with which it runs, `results` those
    of plain torch.
    """
    if not all(result.is_floating_point() for result in results):
        return None
    if op in POINTWISE:
        return [pointwise_bound(result) for result in results]
    if op == "attention":
        return [attention_bound(*run)]
    bound_of = MATMULS.get(op)
    return None if bound_of is None else [rounded(bound_of(*chosen), results[0])]


def rounded(bound: Tensor, result: Tensor) -> Tensor:
    """Add the rounding of both results to their type."""
    return bound.view(result.shape) + 2 * UNITS[result.dtype] * (result.abs().float() + bound.view(result.shape))


def pointwise_bound(result: Tensor) -> Tensor:
    """Return the bound of an op with a few operations for each element, or of a sum of squares with positive terms."""
    values = result.float().abs()
    largest = torch.where(values.isfinite(), values, 0.0).amax(-1, keepdim=True)
    return 4 * UNITS[result.dtype] * values + FEW_STEPS * largest


# -- matmuls -----------------------------------------------------------------------------------------------------------


def product_bound(x: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bound of x @ values.T, float32 [rows, N]; `dtype` is that in which the kernel may multiply.

    Both factors are rounded. So are K partial sums, each of them at most 3 * max(w) * sqrt(K) * norm(x): the codes and
    the offsets of a weight may be added apart, and are up to three times as large as the weight.
    """
    unit = UNIT_TF32 if dtype == torch.float32 else UNITS[dtype]
    products = (x.square() @ values.square().T).sqrt()
    size = x.square().sum(1, keepdim=True).sqrt()
    sums = 3 * x.shape[1] * 2 * UNITS[torch.float32] * values.abs().amax(1)
    limit: Tensor = LIKELY * (2 * unit * products + size * (sums + SUBNORMAL))
    return limit


def finished(y: Tensor, bound: Tensor, bias: Tensor | None, gate: Gate | None) -> Tensor:
    """Return the bound after a gate, from a product and its bound. A bias alone and a residual do not change it."""
    if gate is None:
        return bound
    if bias is not None:
        y = y + bias.float()
    (values, up), (own, of_up) = gate_and_up(y), gate_and_up(bound)
    factor = up.abs() + (1 if gate.kind == "swiglu_oai" else 0)
    return STEEPEST * own * (factor + of_up) + STEEPEST * values.abs() * of_up + FEW_STEPS * (values.abs() + 1) * factor


def matmul_bound(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    _residual: Tensor | None,
    gate: Gate | None,
    norm: Norm | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return the bound of `matmul`; a residual stream that is normed is multiplied as the result's type."""
    dtype = out_dtype if norm is not None and x.dtype == torch.float32 else x.dtype
    x = x.float()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
    order = None if isinstance(weight, DenseWeight) else weight.order
    if order is not None:
        x = x[:, order]
    products, limits = [], []
    for part in row_parts(weight):
        values = layout.dequantize(part).float()
        products.append(x @ values.T)
        limits.append(product_bound(x, values, dtype))
    return finished(torch.cat(products, 1), torch.cat(limits, 1), bias, gate)


def prompt_bound(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None, gate: Gate | None, out_dtype: torch.dtype
) -> Tensor:
    """Return the bound of `dequant_gemm`."""
    return matmul_bound(x, weight, bias, residual, gate, None, out_dtype)


def grouped_bound(
    x: Tensor,
    weight: Weight,
    experts: Tensor,
    bias: Tensor | None,
    gate: Gate | None,
    route: Tensor | None,
    _residual: Tensor | None,
    _out_dtype: torch.dtype,
) -> Tensor:
    """Return the bound of `grouped_matmul`: with a route, the sum over a token's experts."""
    tokens, k = experts.shape
    pairs = experts.flatten()
    rows = (x if len(x) == len(pairs) else x.repeat_interleave(k, 0)).float()
    width = weight.rows // 2 if gate is not None else weight.rows
    bound = torch.zeros((len(pairs), width), device=x.device)
    for expert in range(weight.num_matrices):
        members = (pairs == expert).nonzero().flatten()
        if not len(members):
            continue
        of_expert = rows[members]
        if not isinstance(weight, DenseWeight) and weight.order is not None:
            of_expert = of_expert[:, weight.order[expert]]
        values = layout.dequantize(matrix(weight, expert)).float()
        limit = product_bound(of_expert, values, x.dtype)
        own_bias = None if bias is None else bias[expert]
        bound[members] = finished(of_expert @ values.T, limit, own_bias, gate)
    if route is None:
        return bound
    return (route.abs()[..., None] * bound.view(tokens, k, -1)).sum(1)


MATMULS: dict[str, Callable[..., Tensor]] = {
    "matmul": matmul_bound,
    "dequant_gemm": prompt_bound,
    "grouped_matmul": grouped_bound,
}


# -- attention ---------------------------------------------------------------------------------------------------------


def attention_bound(
    q: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    _max_query_len: int,
    out: Tensor,
) -> Tensor:
    """Return the bound of `attention`, inf for rows that no sequence has.

    A result is the sum of p[j] * v[j], where the p are positive with a sum of at most 1. Each p and each v has a
    relative error, so the sum is off by at most 8 * u * sqrt(sum of (p[j] * v[j])**2). With p <= 1 this is at most
    8 * u * sqrt(sum of p[j] * v[j]**2), the attention over squared values. That is larger by the root of the number of
    positions that count, which leaves room for the errors of logits: they move weight between positions.
    """
    unit = UNIT_TF32 if q.dtype == torch.float32 else UNITS[q.dtype]
    bound = torch.full(q.shape, torch.inf, device=q.device)
    starts = query_start_loc.tolist()
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        first, end = starts[sequence], starts[sequence + 1]
        if first == end:
            continue
        blocks = block_tables[sequence, : -(-seq_len // BLOCK_LEN)].to(torch.int64)
        keys, values = read(cache, blocks, seq_len)
        start = seq_len - (end - first)
        squares = one_sequence(q[first:end], keys, values.square(), start, scale, window, softcap, sinks)
        largest = squares.amax(-1, keepdim=True)  # errors of values that are stored rotated spread over a head
        bound[first:end] = (LIKELY * 2 * unit + 2 * UNITS[out.dtype]) * largest.clamp(min=0).sqrt()
    return bound
