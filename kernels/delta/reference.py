"""The gated delta net in plain torch, token after token: the specification of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from edgelm.kernels.attention.reference import VERIFY_LEN
from edgelm.kernels.delta.states import StateCache

EPSILON = 1e-6  # of the length of keys and queries


def gated_delta(
    qkv: Tensor,
    beta: Tensor,
    alpha: Tensor,
    conv: Tensor,
    decay: Tensor,
    bias: Tensor,
    cache: StateCache,
    spans: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    _max_query_len: int,
) -> Tensor:
    """See the package's function of this name."""
    sizes = cache.sizes
    out = torch.zeros(len(qkv), sizes.num_value_heads, sizes.value_dim, device=qkv.device)
    rows = torch.cat([qkv, beta, alpha], 1)
    starts = query_start_loc.tolist()
    for sequence, ((slot, position, goal), end) in enumerate(zip(spans.tolist(), seq_lens.tolist(), strict=True)):
        first, last = starts[sequence], starts[sequence + 1]
        if first == last:
            continue
        start = end - (last - first)
        inputs = torch.cat([_kept(cache, slot, position - sizes.window + 1, start), rows[first:last]])
        q, k, v, rate, growth = _prepared(cache, inputs, conv, decay, bias)
        state = cache.states[slot].clone() if position else torch.zeros_like(cache.states[slot])
        for i, at in enumerate(range(position, end)):
            state *= growth[i, :, None, None]
            wrong = v[i] - (state * k[i, :, :, None]).sum(1)
            state += k[i, :, :, None] * (rate[i, :, None] * wrong)[:, None]
            if at >= start:
                out[first + at - start] = (state * q[i, :, :, None]).sum(1)
            if at + 1 == goal:
                cache.states[slot] = state
        kept = range(start if last - first <= VERIFY_LEN else end - sizes.window + 1, end)  # no draft is in more rows
        cache.inputs[slot, [at % cache.inputs.shape[1] for at in kept]] = rows[last - len(kept) : last]
    return out


def _kept(cache: StateCache, slot: int, first: int, end: int) -> Tensor:
    """Return the kept inputs of positions first .. end; those below 0 are zeros."""
    positions = torch.arange(first, end, device=cache.device)
    rows = cache.inputs[slot, positions % cache.inputs.shape[1]]
    return torch.where((positions >= 0)[:, None], rows, torch.zeros_like(rows))


def _prepared(cache: StateCache, inputs: Tensor, conv: Tensor, decay: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Return q, k, v, sigmoid(beta) and the growth of S for each token, float32 [tokens, value heads, ...].

    inputs: the rows of the tokens, behind those of the window before the first one.
    """
    sizes = cache.sizes
    before, heads = sizes.window - 1, sizes.num_value_heads
    x = inputs[:, : sizes.channels].float()
    taps = [x[i : len(x) - before + i] * conv[:, i] for i in range(sizes.window)]
    x = silu(torch.stack(taps).sum(0))
    keys = sizes.num_key_heads * sizes.key_dim
    q, k, v = torch.split(x, [keys, keys, sizes.value_width], 1)
    of_head = torch.arange(heads, device=x.device)
    of_head = of_head % sizes.num_key_heads if sizes.alternating else of_head // (heads // sizes.num_key_heads)
    q, k = (part.view(-1, sizes.num_key_heads, sizes.key_dim) for part in (q, k))
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + EPSILON) for part in (q, k))
    beta, alpha = torch.split(inputs[before:, sizes.channels :].float(), heads, 1)
    return (
        q[:, of_head] * sizes.key_dim**-0.5,
        k[:, of_head],
        v.view(-1, heads, sizes.value_dim),
        torch.sigmoid(beta),
        torch.exp(decay * softplus(alpha + bias)),
    )
