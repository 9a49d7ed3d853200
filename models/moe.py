"""The mixture of experts of a sparse layer: each token goes through a few of many feed-forward networks.

Owns routing and the sum over a token's experts. Knows nothing of attention. Which experts are used is known on the
device only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edgelm.kernels.activation import gated
from edgelm.kernels.gate import Gate
from edgelm.kernels.grouped import grouped_matmul
from edgelm.kernels.layout import Weight
from edgelm.kernels.matmul import Norm, matmul
from edgelm.kernels.route import route
from edgelm.models.families import Routing


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """A matrix of each expert, with their biases."""

    weight: Weight
    bias: Tensor | None = None  # float32 [experts, rows]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Experts:
    """The experts of one layer. `gate_up` is one stack, of `fuse_gated`, or gate and up one after the other."""

    norm: Norm
    router: Weight  # [experts, width]
    router_bias: Tensor | None
    gate_up: tuple[Stack, ...]
    down: Stack
    used: int  # experts of each token
    routing: Routing
    normalised: bool


def mixture(x: Tensor, layer: Experts, gate: Gate, residual: Tensor, implementation: str) -> Tensor:
    """Return residual plus what each token's experts give for x [tokens, width], float32 as the residual."""
    logits = matmul(
        x, layer.router, bias=layer.router_bias, out_dtype=torch.float32, implementation=implementation
    )  # [tokens, experts]
    weights, ids = route(
        logits, layer.used, kind=layer.routing, normalise=layer.normalised, implementation=implementation
    )
    if len(layer.gate_up) == 1:
        stack = layer.gate_up[0]
        inner = grouped_matmul(x, stack.weight, ids, bias=stack.bias, gate=gate, implementation=implementation)
    else:  # two formats: one kernel cannot read both
        halves = [
            grouped_matmul(x, stack.weight, ids, bias=stack.bias, implementation=implementation)
            for stack in layer.gate_up
        ]
        inner = gated(torch.cat(halves, 1), gate, implementation=implementation)
    return grouped_matmul(
        inner,
        layer.down.weight,
        ids,
        bias=layer.down.bias,
        route=weights,
        residual=residual,
        out_dtype=torch.float32,
        implementation=implementation,
    )
