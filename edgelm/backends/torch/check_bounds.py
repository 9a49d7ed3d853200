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

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from edgelm.kernels import layout
from edgelm.kernels.activation import Gate
from edgelm.kernels.cache import BLOCK_LEN, LayerCache, read
from edgelm.kernels.cache.quantize import GROUP, rotate
from edgelm.kernels.grouped.reference import matrix
from edgelm.kernels.layout import TILE, DenseWeight, Weight, row_parts
from edgelm.kernels.matmul.reference import Lengths, gate_and_up, inverse_lengths

LIKELY = 8.0  # standard deviations, at most
UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
UNIT_TF32 = 2.0**-11  # tensor cores may round float32 to it
SUBNORMAL = 2.0**-25  # half of the smallest float16
POINTWISE = frozenset({"rms_norm", "add_rms_norm", "embedding", "gated", "softcap", "dequantize", "gate_heads"})
FEW_STEPS = 2.0**-16  # of float32 operations one after another, relative to the largest value of a row
NUM_CODES = {"int8": 127, "int6": 32, "int4": 8}  # from 0 to the largest number of a group
RARE = 2.0**-8  # of the written elements, or one group of them
STEEPEST = 1.2  # slope of a gate, at most


class Bound(NamedTuple):
    """The bound of each element. All but RARE of the `num_written` elements are within `usual`, too."""

    most: Tensor
    usual: Tensor | None = None
    num_written: int = 0


def bounds_of(
    op: str, chosen: Sequence[Any], run: Sequence[Any], results: Sequence[Tensor]
) -> list[Bound | None] | None:
    """Return the bound of each of an op's results, or None where it has none: whole numbers are right or wrong.

    `chosen` are the arguments by which the implementation was chosen, `run` those with which it runs, `results` those
    of plain torch.
    """
    if op in POINTWISE:
        return [Bound(pointwise_bound(result)) for result in results]
    if op == "attention":
        return [Bound(attention_bound(*run))]
    if op == "route":
        return [Bound(route_bound(chosen[0], results[0])), None]
    if op == "write_kv":
        return [Bound(pointwise_bound(results[0])), *entry_bounds(run[5], run[4], *results[1:])]
    if op == "matmul_scaled":
        return list(scaled_bounds(chosen, results))
    bound_of = MATMULS.get(op)
    return None if bound_of is None else [Bound(rounded(bound_of(*chosen), results[0]))]


def rounded(bound: Tensor, result: Tensor) -> Tensor:
    """Add the rounding of both results to their type."""
    return bound.view(result.shape) + 2 * UNITS[result.dtype] * (result.abs().float() + bound.view(result.shape))


def pointwise_bound(result: Tensor) -> Tensor:
    """Return the bound of an op with a few operations for each element, or of a sum of squares with positive terms."""
    values = result.float().abs()
    largest = torch.where(values.isfinite(), values, 0.0).amax(-1, keepdim=True)
    return 4 * UNITS[result.dtype] * values + FEW_STEPS * largest


def route_bound(logits: Tensor, weights: Tensor) -> Tensor:
    """Return the bound of the weights of experts: exponentials of float32 differences, each divided by their sum."""
    x = logits.float()
    reach = (x.amax(1, keepdim=True) - x.amin(1, keepdim=True)).clamp(max=100.0)  # beyond, an exponential is 0
    return weights.abs() * ((reach + 4) * 2.0**-22 + (x.shape[1] + 8) * 2.0**-24)


def entry_bounds(cache: LayerCache, slots: Tensor, *results: Tensor) -> list[Bound | None]:
    """Return the bounds of keys and values that `write_kv` has written, [positions, kv heads, head_dim] each.

    Where a number is at the border of two codes, the last bit of float32 decides: it may be off by one code, and a
    scale by its last bit. That is rare. Of rotated numbers up to four of a group may have been at a border.
    """
    num_written = int((slots >= 0).sum()) * cache.num_kv_heads * cache.head_dim
    bounds: list[Bound | None] = []
    for result, kind in zip(results, (cache.format.key, cache.format.value), strict=True):
        wide = pad(result.float(), (0, -result.shape[-1] % GROUP)).nan_to_num(0.0)
        stored = rotate(wide) if cache.format.rotated else wide
        largest = _largest_of_group(stored.abs())
        if kind is None:
            step = 2.0**-10 * stored.abs() + SUBNORMAL
        elif kind == "fp8":
            step = stored.abs() / 8 + largest.amax(-1, keepdim=True) * 2.0**-17
        else:
            step = largest / NUM_CODES[kind]
        step = step + 2.0**-10 * stored.abs()
        if cache.format.rotated:
            step = 4 * GROUP**-0.5 * _largest_of_group(step)
        usual = FEW_STEPS * largest.amax(-1, keepdim=True).expand_as(step)
        width = result.shape[-1]
        bounds.append(Bound((step + usual)[..., :width], usual[..., :width], num_written))
    return bounds


def _groups(x: Tensor) -> Tensor:
    """Return [.., width] as [.., width / 32, 32]."""
    return x.reshape(*x.shape[:-1], -1, GROUP)


def _largest_of_group(x: Tensor) -> Tensor:
    groups = _groups(x)
    return groups.amax(-1, keepdim=True).expand_as(groups).reshape(x.shape)


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
    lengths: Lengths | None,
    _out_dtype: torch.dtype,
    _out: Tensor | None = None,
) -> Tensor:
    """Return the bound of `matmul`."""
    dtype, x = x.dtype, x.float()
    if lengths is not None:
        x = x * inverse_lengths(lengths, x.shape[1])
    order = None if isinstance(weight, DenseWeight) else weight.order
    if order is not None:
        x = x[:, order]
    products, limits = [], []
    for part in row_parts(weight):
        values = layout.dequantize(part).float()
        products.append(x @ values.T)
        limits.append(product_bound(x, values, dtype))
    return finished(torch.cat(products, 1), torch.cat(limits, 1), bias, gate)


def scaled_bounds(chosen: Sequence[Any], results: Sequence[Tensor]) -> Iterator[Bound]:
    """Yield the bounds of the results of `matmul_scaled`: y, y times the norm's weight, sums of TILE squares of y."""
    x, weight, bias, residual, factors, _ = chosen
    y, scaled, squares = results
    bound = rounded(matmul_bound(x, weight, bias, residual, None, None, y.dtype), y)
    yield Bound(bound)
    yield Bound(rounded(bound * factors.abs(), scaled))
    of_squares = pad((2 * y.abs() + bound) * bound, (0, -y.shape[1] % TILE)).view(*squares.shape, TILE)
    yield Bound(rounded(of_squares.sum(-1) + FEW_STEPS * squares, squares))


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

    A result is o = sum of p[j] * v[j] over positions; a sink is one whose v is 0. Errors e[j] of logits move it by the
    sum of p[j] * e[j] * (v[j] - o), at most max exp(2 |e[j]|) times the root of (sum of p[j] * e[j]**2) times (sum of
    p[j] * (v[j] - o)**2). A logit is a product of rounded numbers, so e[j] is at most 8 * u * sqrt(sum of q**2 * k**2);
    q may be rounded twice, before and after its rotation. Weights and values are rounded too, each at most by
    8 * u * sqrt(sum of p[j]**2 * v[j]**2). Errors of numbers in the basis of a rotated cache are independent, and the
    rotation back averages their squares.
    """
    unit, rotated = _attention_unit(q, cache), cache.format.rotated
    bound = torch.full(q.shape, torch.inf, device=q.device)
    starts = query_start_loc.tolist()
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        first, end = starts[sequence], starts[sequence + 1]
        if first == end:
            continue
        blocks = block_tables[sequence, : -(-seq_len // BLOCK_LEN)].to(torch.int64)
        plain = [_heads_first(part) for part in (q[first:end], *read(cache, blocks, seq_len))]
        queries, keys, values = plain  # [heads, rows, width], [kv heads, length, width] twice
        turned = [rotate(part) if rotated else part for part in plain]
        seen = _seen(seq_len - (end - first), end - first, seq_len, window, q.device)
        for head in range(q.shape[1]):
            of_kv = head * len(keys) // q.shape[1]
            logits = queries[head] @ keys[of_kv].T * scale
            logits = softcap * torch.tanh(logits / softcap) if softcap else logits
            logits = logits.masked_fill(~seen, -torch.inf)
            if sinks is not None:
                logits = torch.cat([logits, sinks[head].float().expand(len(logits), 1)], 1)
            weights = torch.softmax(logits, -1)[:, :seq_len]
            value = values[of_kv]
            result, squares = weights @ value, weights @ value.square()
            off = queries[head].square() @ keys[of_kv].square().T
            off = off + (2 if rotated else 1) * turned[0][head].square() @ turned[1][of_kv].square().T
            off = off.masked_fill(~seen, 0.0) * (scale * unit) ** 2  # squares of e[j] / 8
            most = torch.exp(2 * LIKELY * off.amax(1, keepdim=True).sqrt())
            moved = (weights * off).sum(1, keepdim=True) * (squares - result.square()).clamp(min=0)
            of_values = weights.square() @ turned[2][of_kv].square()
            rounded_parts = weights.square() @ value.square() + (_averaged(of_values) if rotated else of_values)
            limit = LIKELY * (most * moved.sqrt() + unit * rounded_parts.sqrt())
            largest = squares.amax(1, keepdim=True).sqrt()  # float32, in any basis
            limit = limit + FEW_STEPS * largest + SUBNORMAL * seq_len
            limit = limit + 2 * UNITS[out.dtype] * (result.abs() + limit)
            bound[first:end, head] = limit[:, : q.shape[2]]
    return bound


def _attention_unit(q: Tensor, cache: LayerCache) -> float:
    """Return the relative rounding of a dot's operands: codes are multiplied in float16."""
    if q.dtype == torch.float32 or cache.keys.dtype == torch.float32:
        return UNIT_TF32
    return UNITS[torch.float16 if cache.format.key else cache.keys.dtype]


def _heads_first(x: Tensor) -> Tensor:
    """Return [rows, heads, head_dim] as float32 [heads, rows, width]."""
    return pad(x.float(), (0, -x.shape[-1] % GROUP)).transpose(0, 1)


def _averaged(squares: Tensor) -> Tensor:
    """Return for each element the mean of its group of 32: a rotation adds these squares, each times 1 / 32."""
    groups = _groups(squares)
    return groups.mean(-1, keepdim=True).expand_as(groups).reshape(squares.shape)


def _seen(start: int, rows: int, length: int, window: int, device: torch.device) -> Tensor:
    """Return which positions each row sees: bool [rows, length]."""
    position = torch.arange(start, start + rows, device=device)[:, None]
    key = torch.arange(length, device=device)
    seen = key <= position
    return seen & (key > position - window) if window else seen
