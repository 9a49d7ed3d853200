"""`write_kv` in plain torch: the specification of every stored byte."""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.cache import BLOCK_LEN, LayerCache, order, quantize
from edgelm.kernels.rope import Rope, apply_rope, growth_at


def write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cache: LayerCache,
    rope: Rope | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    v_norm: Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """See the package's function of this name."""
    queries, keys = _rotated(q, q_norm, eps, positions, rope), _rotated(k, k_norm, eps, positions, rope)
    if rope is not None and rope.growth is not None:
        queries = queries * growth_at(rope, positions)[:, None, None]
    written = slot_mapping >= 0
    values = v.float() if v_norm is None else head_norm(v.float(), v_norm, eps)
    _write_entries(cache, slot_mapping[written], keys[written], values[written])
    return queries.to(out_dtype)


def _rotated(x: Tensor, norm: Tensor | None, eps: float, positions: Tensor, rope: Rope | None) -> Tensor:
    x = x.float()
    if norm is not None:
        x = head_norm(x, norm, eps)
    return x if rope is None else apply_rope(x, positions, rope)


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of each head of x, float32.

    The squares are added in float64, so that their order does not matter. The square root is computed in float64 too:
    torch's float32 square root is not always the nearest number.
    """
    mean = x.double().square().sum(-1, keepdim=True).float() * (1 / x.shape[-1])
    return x * (1.0 / torch.sqrt((mean + eps).double()).float()) * weight


def _write_entries(cache: LayerCache, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write entries, float32 [tokens, num_kv_heads, head_dim], to their slots, int64 [tokens]."""
    block, offset = slots // BLOCK_LEN, slots % BLOCK_LEN
    padding = (0, cache.width - cache.head_dim)
    keys, values = (torch.nn.functional.pad(entries, padding) for entries in (keys, values))
    if cache.format.rotated:
        keys, values = quantize.rotate(keys), quantize.rotate(values)
    key_kind, value_kind = cache.format.key, cache.format.value
    if key_kind is None:
        cache.keys[block, :, offset] = keys.to(cache.keys.dtype)
    else:
        codes, scales = quantize.encode(keys, key_kind)
        assert cache.key_scales is not None
        cache.key_scales[block, :, :, offset] = scales
        if cache.key_high is None:
            cache.keys[block, :, offset] = order.pack_key_bytes(codes)
        else:
            cache.keys[block, :, offset], cache.key_high[block, :, offset] = order.pack_key_words(codes)
    column = order.token_column(offset, value_kind == "int4")
    if value_kind is None:
        cache.values[block, :, :, column] = values.to(cache.values.dtype)
        return
    codes, scales = quantize.encode(values, value_kind)
    assert cache.value_scales is not None
    cache.value_scales[block, :, :, offset] = scales
    if value_kind == "int4":
        cache.values.view(torch.uint8)[block, :, :, :, column] = order.pack_value_nibbles(codes)
    else:
        cache.values[block, :, :, column] = codes
