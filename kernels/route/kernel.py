"""The router in Triton: one program per token, which takes out the best expert k times.

Owns the kernel and its launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelm.kernels.pdl import begin_dependent, uses_pdl
from edgelm.kernels.route.reference import TINY

OPTIONS = {"enable_fp_fusion": True}  # explicit, since Triton's default is about to change


@triton.jit
def route_kernel(
    logits_ptr,  # [tokens, num_experts], rows logits_stride apart
    logits_stride,
    weights_ptr,  # float32 [tokens, K]
    ids_ptr,  # int32 [tokens, K]
    num_experts,
    KIND: tl.constexpr,
    NORMALISE: tl.constexpr,
    TINY: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least num_experts
    launch_pdl: tl.constexpr = False,
):
    """Select the experts of one token. Grid: tokens."""
    begin_dependent(launch_pdl)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < num_experts
    logits = tl.load(logits_ptr + token * logits_stride + expert, inside, other=float("-inf")).to(tl.float32)
    values = logits
    if KIND == "softmax":
        values = tl.exp(logits - tl.max(logits))
        values = values / tl.sum(values)
        any_nan = tl.max((logits != logits).to(tl.int32))  # tl.max skips NaN
        values = tl.where(any_nan > 0, float("nan"), values)
    # One integer in the order of selection: the logit's bits in order in the upper half, and below them a number that
    # is greater for a lower id.
    scores = tl.where(logits != logits, float("-inf"), tl.where(logits == 0, 0.0, logits))
    bits = scores.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    least = -0x7FFFFFFFFFFFFFFF
    order = tl.where(inside, (ordered << 32) | (0x7FFFFFFF - expert).to(tl.int64), least)

    place = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for j in range(K):
        best = tl.max(order)
        here = order == best
        chosen = tl.where(place == j, 0x7FFFFFFF - (best & 0xFFFFFFFF).to(tl.int32), chosen)
        weights = tl.where(place == j, tl.sum(tl.where(here, values, 0.0)), weights)
        order = tl.where(here, least, order)
    valid = place < K
    if KIND == "topk_softmax":
        weights = tl.where(valid, tl.exp(weights - tl.max(tl.where(valid, weights, float("-inf")))), 0.0)
        weights = weights / tl.sum(weights)
    if NORMALISE:
        weights = weights / (tl.sum(weights) + TINY)
    tl.store(weights_ptr + token * K + place, weights, valid)
    tl.store(ids_ptr + token * K + place, chosen, valid)


def route(logits: Tensor, k: int, kind: str, normalise: bool) -> tuple[Tensor, Tensor]:
    """Launch `route_kernel`."""
    tokens, num_experts = logits.shape
    weights = torch.empty((tokens, k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, k), dtype=torch.int32, device=logits.device)
    if tokens:
        block = max(triton.next_power_of_2(num_experts), 32)
        route_kernel[(tokens,)](
            logits,
            logits.stride(0),
            weights,
            ids,
            num_experts,
            KIND=kind,
            NORMALISE=normalise,
            TINY=TINY,
            K=k,
            BLOCK_K=triton.next_power_of_2(k),
            BLOCK=block,
            num_warps=min(max(block // 256, 1), 4),
            **OPTIONS,
            launch_pdl=uses_pdl(),
        )
    return weights, ids
