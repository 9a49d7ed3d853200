"""Attention over a paged, quantized KV cache: new tokens of many sequences against all that each has stored.

Owns the op's signature and the choice of its implementation. Knows nothing of models, of how keys were rotated by
position (kernels/store), or of who fills the block tables.

    logit[h, j] = scale * q[h] . k[h // siblings, j],  cap * tanh(logit / cap) with a soft cap
    out[h]      = sum over j of exp(logit[h, j]) v[j]  /  (sum over j of exp(logit[h, j]) + exp(sink[h]))

Keys and values are those that `cache.read` returns. Position p sees j <= p, with a window only j > p - window. What it
does not see may be anything; of what it sees, an inf or NaN makes all of a row, or a part, NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.attention import reference
from edgelm.kernels.cache import LayerCache
from edgelm.kernels.choice import Implementation, choose, declines_reference, declines_triton

VERIFY_LEN = 16  # up to so many queries of a sequence are one numerics class: decode and verify
HEAD_DIMS = (16, 32, 64, 80, 96, 112, 128, 192, 256)


def attention(
    q: Tensor,
    cache: LayerCache,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    max_query: int,
    out_dtype: torch.dtype | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Return the attention of each row of q, [tokens, heads, head_dim], of q's type or `out_dtype`.

    q: [tokens, heads, head_dim], not rotated by Hadamard. tables: int32 [sequences, blocks], of which a sequence's
    first ceil(length / 32) entries are read. starts: int32 [sequences + 1]: sequence s has the rows starts[s] ..
    starts[s + 1], at most `max_query` of them, the last at position lengths[s] - 1. lengths: int32 [sequences], the
    new tokens included, which are in the cache. A sequence without rows may have length 0. Rows outside of all
    sequences (from starts[-1] on), and in Triton rows from `max_query` on, are not written. window: 0, or how many
    positions a row sees, its own the last. softcap: 0, or the cap. sinks: [heads], one more logit in each denominator.

    What a row does not see may hold anything: inf and NaN in a draft behind it, or left by another sequence.

    In Triton a row of a sequence with up to VERIFY_LEN rows depends neither on the other rows nor on the other
    sequences, bit for bit, and no length, table or start is read by the host: a CUDA graph serves all their values.
    Raises NoKernelError.
    """
    assert q.dim() == 3
    assert q.shape[2] == cache.head_dim
    assert q.shape[1] % cache.kv_heads == 0
    assert starts.shape == (tables.shape[0] + 1,)
    assert lengths.shape == (tables.shape[0],)
    chosen = choose("attention", IMPLEMENTATIONS, implementation, q, cache, implementation)
    out = torch.empty(q.shape, dtype=out_dtype or q.dtype, device=q.device)
    chosen.run(q, cache, tables, starts, lengths, scale, window, softcap, sinks, max_query, out)
    return out


def _triton_declines(q: Tensor, cache: LayerCache, _wanted: str | None) -> str | None:
    if cache.head_dim not in HEAD_DIMS:
        return f"heads of {cache.head_dim}: it takes {', '.join(map(str, HEAD_DIMS))}"
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"q is {q.dtype}"
    return declines_triton(q)


def _run_triton(*args: object) -> None:
    from edgelm.kernels.attention import launch

    launch.run(*args)  # type: ignore[arg-type]  # the arguments of `attention`, in its order


def _reference_declines(q: Tensor, _cache: LayerCache, wanted: str | None) -> str | None:
    return declines_reference(q, wanted)


IMPLEMENTATIONS = (
    Implementation("triton", _triton_declines, _run_triton),
    Implementation("reference", _reference_declines, reference.run),
)
