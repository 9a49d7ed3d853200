"""New entries of the cache: norm of each head, rotation by position, rounding to codes, all in one pass over q, k, v.

Owns the op's signature and the choice of its implementation. Knows nothing of models, of block tables, or of the
layout that it fills (kernels/cache); the angles are those of kernels/rope.py.

    q = rope(norm(q)),  k = rope(norm(k)),  cache[slot] = k, v        each norm and the rotation where there is one

Computed in float32 from q, k and v as they are; nothing in between is rounded to 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.cache import LayerCache
from edgelm.kernels.choice import Implementation, choose, declines_reference, declines_triton
from edgelm.kernels.rope import Rope
from edgelm.kernels.store import reference

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)


def store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: LayerCache,
    *,
    rope: Rope | None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Store k and v at `slots`, and return q ready for attention, contiguous [tokens, heads, head_dim].

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]; of one dtype. They may be views of one tensor
    with any strides, but for the last dimension. positions: int32 [tokens]. slots: int64 [tokens], 32 * block +
    offset; below 0 nothing is stored. No slot may occur twice. q_norm, k_norm: float32 [head_dim]. The result has
    q's dtype, or `out_dtype`; it is not rotated by Hadamard.
    """
    tokens, _, head_dim = q.shape
    assert k.shape == v.shape == (tokens, cache.kv_heads, cache.head_dim)
    assert head_dim == cache.head_dim
    assert q.dtype == k.dtype == v.dtype
    assert positions.shape == slots.shape == (tokens,)
    assert positions.dtype == torch.int32, positions.dtype
    assert slots.dtype == torch.int64, slots.dtype  # an offset in a plane does not fit 32 bits
    assert positions.is_contiguous()
    assert slots.is_contiguous()
    for norm in (q_norm, k_norm):
        assert norm is None or (norm.shape == (head_dim,) and norm.dtype == torch.float32 and norm.is_contiguous())
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    assert rope is None or rope.rotated_dim <= head_dim
    chosen = choose("store", IMPLEMENTATIONS, implementation, q, cache, implementation)
    args = (q, k, v, positions, slots, cache, rope, q_norm, k_norm, eps, out_dtype or q.dtype)
    result = chosen.run(*args)
    assert isinstance(result, Tensor)
    return result


def _declines_triton(q: Tensor, cache: LayerCache, _: str | None) -> str | None:
    reason = declines_triton(q)
    if reason is None and cache.head_dim not in HEAD_DIMS:
        reason = f"head size {cache.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    return reason


def _declines_reference(q: Tensor, _: LayerCache, wanted: str | None) -> str | None:
    return declines_reference(q, wanted)


def _run_triton(*args: object) -> Tensor:
    from edgelm.kernels.store.triton import store as run

    return run(*args)  # type: ignore[arg-type]  # the arguments of `store`, in its order


IMPLEMENTATIONS = (
    Implementation("triton", _declines_triton, _run_triton),
    Implementation("reference", _declines_reference, reference.store),
)
