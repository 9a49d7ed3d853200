"""The mixture of experts of a sparse layer: each token runs through a few of many feed-forward networks.

Owns routing and the sum over a token's experts. Knows nothing of attention. The host never reads which experts a token
uses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edgelm.kernels.activation import Gate, gated
from edgelm.kernels.grouped import grouped_matmul
from edgelm.kernels.layout import Weight
from edgelm.kernels.matmul import Norm, matmul
from edgelm.kernels.route import route
from edgelm.models.families import Routing


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """The same matrix of every expert, stacked, with the biases."""

    weight: Weight
    bias: Tensor | None = None  # float32 [experts, rows]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Experts:
    """The experts of one layer. `gate_up` is one stack, from `fuse_gated`, or gate and up separately."""

    norm: Norm
    router: Weight  # [experts, hidden_size]
    router_bias: Tensor | None
    gate_up: tuple[Stack, ...]
    down: Stack
    used: int  # experts per token
    routing: Routing
    normalised: bool  # the weights of a token add up to 1
    scale: Tensor | None = None  # float32 [experts], of their results


def mixture(
    x: Tensor, layer: Experts, gate: Gate, residual: Tensor | None, implementation: str, *, routed: Tensor | None = None
) -> Tensor:
    """Return the residual plus the weighted outputs of each token's experts: float32 [tokens, hidden_size].

    x: [tokens, hidden_size], normalized; `routed`: the same for the router, if it has a norm of its own.
    """
    weights, ids = routing(x if routed is None else routed, layer, implementation)
    if len(layer.gate_up) == 1:
        stack = layer.gate_up[0]
        inner = grouped_matmul(x, stack.weight, ids, bias=stack.bias, gate=gate, implementation=implementation)
    else:  # a kernel cannot read two formats
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


def routing(x: Tensor, layer: Experts, implementation: str) -> tuple[Tensor, Tensor]:
    """Return the weights and the experts of each token, float32 and int32 [tokens, used]."""
    logits = matmul(
        x, layer.router, bias=layer.router_bias, out_dtype=torch.float32, implementation=implementation
    )  # [tokens, experts]
    weights, ids = route(
        logits, layer.used, kind=layer.routing, normalise=layer.normalised, implementation=implementation
    )
    return weights if layer.scale is None else weights * layer.scale[ids], ids
