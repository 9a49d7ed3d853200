"""Write new entries to the KV cache: head norms, rotary embedding and rounding to codes in one pass over q, k and v.

Owns the op's signature and the choice of its implementation. Knows nothing of models and of block tables. kernels/cache
owns the layout that it writes, kernels/rope.py the angles.

    q = rope(norm(q)),  k = rope(norm(k)),  cache[slot] = k, norm(v)  the norms and the rotation are optional
    q = q * growth[position // span]                                  where the rope has it

The arithmetic is float32 from the given q, k and v; nothing is rounded to 16 bits in between.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.cache import LayerCache
from edgelm.kernels.choice import Implementation, choose, declines_reference, declines_triton, preferred
from edgelm.kernels.rope import Rope
from edgelm.kernels.write_kv import reference

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256, 512)


def write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cache: LayerCache,
    *,
    rope: Rope | None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    v_norm: Tensor | None = None,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Write k and v to their slots, and return q ready for attention, contiguous [tokens, num_heads, head_dim].

    q: [tokens, num_heads, head_dim]; k, v: [tokens, num_kv_heads, head_dim]; all of one dtype. They may be views of one
    tensor with any strides, if the last dimension is contiguous. positions: int32 [tokens]. slot_mapping: int64
    [tokens], 32 * block + offset, each slot at most once; a token with a negative slot is not written. The
    norms: float32 [head_dim]. The result has q's dtype, or `out_dtype`, and no Hadamard rotation.
    """
    tokens, _, head_dim = q.shape
    assert k.shape == v.shape == (tokens, cache.num_kv_heads, cache.head_dim)
    assert head_dim == cache.head_dim
    assert q.dtype == k.dtype == v.dtype
    assert positions.shape == slot_mapping.shape == (tokens,)
    assert positions.dtype == torch.int32, positions.dtype
    assert slot_mapping.dtype == torch.int64, slot_mapping.dtype  # an offset into a plane may need more than 32 bits
    assert positions.is_contiguous()
    assert slot_mapping.is_contiguous()
    for norm in (q_norm, k_norm, v_norm):
        assert norm is None or (norm.shape == (head_dim,) and norm.dtype == torch.float32 and norm.is_contiguous())
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    assert rope is None or rope.rotated_dim <= head_dim
    implementation = preferred("write_kv", implementation)
    chosen = choose("write_kv", IMPLEMENTATIONS, implementation, q, cache, implementation)
    args = (q, k, v, positions, slot_mapping, cache, rope, q_norm, k_norm, v_norm, eps, out_dtype or q.dtype)
    result = chosen.run(*args)
    assert isinstance(result, Tensor)
    return result


def _declines_triton(q: Tensor, cache: LayerCache, _: str | None) -> str | None:
    reason = declines_triton(q)
    if reason is None and cache.head_dim not in HEAD_DIMS:
        reason = f"head size {cache.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    return reason


def _declines_reference(q: Tensor, _: LayerCache, name: str | None) -> str | None:
    return declines_reference(q, name)


def _run_triton(*args: object) -> Tensor:
    from edgelm.kernels.write_kv.kernel import write_kv as run

    return run(*args)  # type: ignore[arg-type]  # the arguments of `write_kv`, in its order


IMPLEMENTATIONS = (
    Implementation("triton", _declines_triton, _run_triton),
    Implementation("reference", _declines_reference, reference.write_kv),
)
