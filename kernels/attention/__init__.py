"""Attention over a paged, quantized KV cache: new tokens of many sequences against all that each sequence has stored.

Owns the op's signature and the choice of its implementation. Knows nothing of models, of how keys are rotated by
position (kernels/write_kv), or of who fills the block tables.

    logit[h, j] = scale * q[h] . k[h // queries_per_kv, j],  cap * tanh(logit / cap) with a soft cap
    out[h]      = sum over j of exp(logit[h, j]) v[j]  /  (sum over j of exp(logit[h, j]) + exp(sink[h]))

Keys and values are as `cache.read` returns them. Position p sees j <= p, with a window only j > p - window. An inf or
NaN at a position that a row sees makes the row NaN, or a part of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from edgelm.kernels.attention import reference
from edgelm.kernels.attention.reference import VERIFY_LEN
from edgelm.kernels.cache import LayerCache
from edgelm.kernels.choice import Implementation, choose, declines_reference, declines_triton, preferred

__all__ = ["HEAD_DIMS", "VERIFY_LEN", "attention"]

HEAD_DIMS = (16, 32, 64, 80, 96, 112, 128, 192, 256, 512)


def attention(
    q: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    max_query_len: int,
    only_prompts: bool = False,
    out_dtype: torch.dtype | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Return the attention of each row of q: [tokens, num_heads, head_dim], of q's type or `out_dtype`.

    q: [tokens, num_heads, head_dim], without Hadamard rotation. block_tables: int32 [sequences, max_blocks], of which
    the first ceil(seq_len / 32) entries of a sequence are read. query_start_loc: int32 [sequences + 1]: sequence s has
    the rows query_start_loc[s] .. query_start_loc[s + 1], at most `max_query_len` of them; the last row is at position
    seq_lens[s] - 1. seq_lens: int32 [sequences], with the new tokens, which are already in the cache; a sequence
    without rows may have length 0. Rows outside of all sequences (from query_start_loc[-1] on) are not written, and in
    Triton a sequence's rows from `max_query_len` on. only_prompts: no sequence has 1 to VERIFY_LEN rows, so the kernels
    of such rows are not launched. window: 0, or the number of positions that a row sees, with its own. softcap: 0, or
    the cap. sinks: [num_heads], one more logit in each denominator.

    Positions that a row does not see may hold anything: inf and NaN of later draft tokens, or of another sequence.

    In Triton, a row of a sequence with at most VERIFY_LEN rows depends neither on other rows nor on other sequences,
    bit for bit. The host reads no tensor, so one CUDA graph serves all their values. Raises NoKernelError.
    """
    assert q.dim() == 3
    assert q.shape[2] == cache.head_dim
    assert q.shape[1] % cache.num_kv_heads == 0
    assert query_start_loc.shape == (block_tables.shape[0] + 1,)
    assert seq_lens.shape == (block_tables.shape[0],)
    implementation = preferred("attention", implementation)
    chosen = choose("attention", IMPLEMENTATIONS, implementation, q, cache, implementation)
    out = torch.empty(q.shape, dtype=out_dtype or q.dtype, device=q.device)
    arguments = (q, cache, block_tables, query_start_loc, seq_lens, scale, window, softcap, sinks, max_query_len, out)
    chosen.run(*arguments, only_prompts=only_prompts)
    return out


def _triton_declines(q: Tensor, cache: LayerCache, _name: str | None) -> str | None:
    if cache.head_dim not in HEAD_DIMS:
        return f"heads of {cache.head_dim}: it takes {', '.join(map(str, HEAD_DIMS))}"
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"q is {q.dtype}"
    return declines_triton(q)


def _run_triton(*args: Any, only_prompts: bool) -> None:
    from edgelm.kernels.attention import launch

    launch.run(*args, only_prompts=only_prompts)


def _reference_declines(q: Tensor, _cache: LayerCache, name: str | None) -> str | None:
    return declines_reference(q, name)


IMPLEMENTATIONS = (
    Implementation("triton", _triton_declines, _run_triton),
    Implementation("reference", _reference_declines, reference.run),
)
