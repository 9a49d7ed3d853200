"""Grouped matmul in plain torch: the specification. Products, sums and gates are float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from edgelm.kernels import layout
from edgelm.kernels.activation import Gate, gated_values
from edgelm.kernels.layout import DenseWeight, Weight, planes
from edgelm.kernels.matmul.reference import gate_and_up


def grouped_matmul(
    x: Tensor,
    weight: Weight,
    experts: Tensor,
    bias: Tensor | None,
    gate: Gate | None,
    route: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply rows by the matrices of their experts, expert by expert."""
    tokens, k = experts.shape
    pairs = experts.flatten()
    rows = (x if len(x) == len(pairs) else x.repeat_interleave(k, 0)).float()
    y = torch.zeros((len(pairs), weight.rows), device=x.device)
    for expert in sorted(set(pairs.tolist())):
        if not 0 <= expert < weight.num_matrices:
            continue
        members = (pairs == expert).nonzero().flatten()
        y[members] = _ordered(rows[members], weight, expert) @ layout.dequantize(matrix(weight, expert)).T
        if bias is not None:
            y[members] += bias[expert].float()
    if gate is not None:
        y = gated_values(*gate_and_up(y), gate)
    if gate is not None or bias is not None:
        inside = (pairs >= 0) & (pairs < weight.num_matrices)
        y = torch.where(inside[:, None], y, 0.0)
    if route is None:
        return y.to(out_dtype)
    parts = y.reshape(tokens, k, -1)
    total = torch.zeros_like(parts[:, 0])
    for j in range(k):
        total += route[:, j, None] * parts[:, j]
    if residual is not None:
        total += residual.float()
    return total.to(out_dtype)


def matrix(weight: Weight, index: int) -> Weight:
    """Return one matrix of a stack, without its order of columns."""
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.data[index], gated=weight.gated)
    single: dict[str, Any] = {name: plane[index] for name, plane in planes(weight).items() if name != "order"}
    return replace(weight, order=None, **single)


class Plan(NamedTuple):
    """Blocks of up to `block` pairs of one expert, which are multiplied together.

    There are as many blocks as any routing can need; unused ones have expert -1. Pairs whose ids are outside of the
    stack have blocks of expert E, which write zeros.
    """

    order: Tensor  # int32 [pairs]: the pairs, sorted by expert, then by number
    blocks: Tensor  # int32 [blocks, 3]: expert, first and end in `order`


def max_blocks(pairs: int, num_experts: int, block: int) -> int:
    """Return the maximum number of blocks that any routing of this many pairs needs."""
    used = min(pairs, num_experts + 1)
    return used + (pairs - used) // block


def make_plan(experts: Tensor, num_experts: int, block: int) -> Plan:
    """Sort pairs by expert and cut them into blocks, without waiting for the device."""
    pairs = experts.flatten().long()
    pairs = torch.where((pairs >= 0) & (pairs < num_experts), pairs, num_experts)
    order = pairs.argsort(stable=True)
    ids = torch.arange(num_experts + 1, device=pairs.device)
    bounds = torch.searchsorted(pairs[order], torch.arange(num_experts + 2, device=pairs.device))
    counts = bounds.diff()
    ends = ((counts + block - 1) // block).cumsum(0)  # of each expert's blocks
    index = torch.arange(max_blocks(pairs.numel(), num_experts, block), device=pairs.device)
    owner = torch.searchsorted(ends, index, right=True)
    valid = owner < len(ids)
    owner = owner.clamp(max=num_experts)
    first_block = ends[owner] - (counts[owner] + block - 1) // block
    first = bounds[owner] + (index - first_block) * block
    end = torch.minimum(first + block, bounds[owner + 1])
    blocks = torch.stack([torch.where(valid, owner, -1), first, end], 1)
    return Plan(order.int(), torch.where(valid[:, None], blocks, -1).int())


def _ordered(rows: Tensor, weight: Weight, expert: int) -> Tensor:
    if isinstance(weight, DenseWeight) or weight.order is None:
        return rows
    return rows[:, weight.order[expert]]
