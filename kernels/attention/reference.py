"""Attention in plain torch: the specification, and the CPU implementation.

Owns the loop over sequences and the softmax of one sequence. Knows nothing of the layout of the cache's planes.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from edgelm.kernels.cache import BLOCK_LEN, LayerCache, read

VERIFY_LEN = 16  # rows of a sequence, at most, that decode and verify steps have; the bits of a row are equal in both
MAX_LOGITS = 1 << 24  # held at a time: 64 MiB


def run(
    q: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    max_query_len: int,
    out: Tensor,
    *,
    only_prompts: bool = False,
) -> None:
    """Write the attention of each row into `out`, [tokens, num_heads, head_dim]. Reads tensors on the host."""
    bounds = query_start_loc.tolist()
    assert not only_prompts or not any(0 < end - first <= VERIFY_LEN for first, end in pairwise(bounds))
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        first, end = bounds[sequence], bounds[sequence + 1]
        if first == end:
            continue
        assert end - first <= min(max_query_len, seq_len)
        start = seq_len - (end - first)  # position of the first row
        num_skipped = max(start - window + 1, 0) // BLOCK_LEN if window else 0  # blocks that no row sees
        blocks = block_tables[sequence, num_skipped : -(-seq_len // BLOCK_LEN)].to(torch.int64)
        skipped_len = num_skipped * BLOCK_LEN
        keys, values = read(cache, blocks, seq_len - skipped_len)
        out[first:end] = one_sequence(q[first:end], keys, values, start - skipped_len, scale, window, softcap, sinks)


def one_sequence(
    q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, window: int, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Return the attention of rows at the positions start.., float32 [rows, num_heads, head_dim]; keys begin at 0."""
    rows, num_heads, head_dim = q.shape
    seq_len, num_kv_heads, _ = keys.shape
    per_kv = num_heads // num_kv_heads
    grouped = (q.float() * scale).reshape(rows, num_kv_heads, per_kv, head_dim).transpose(0, 1)
    keys = keys.permute(1, 2, 0)  # [num_kv_heads, head_dim, seq_len]
    values = values.transpose(0, 1)  # [num_kv_heads, seq_len, head_dim]
    out = torch.empty(rows, num_kv_heads, per_kv, head_dim, device=q.device)
    step = max(MAX_LOGITS // (num_heads * seq_len), 1)
    for row in range(0, rows, step):
        part = grouped[:, row : row + step]  # [num_kv_heads, rows, queries_per_kv, head_dim]
        num_rows = part.shape[1]
        position = torch.arange(start + row, start + row + num_rows, device=q.device)
        low = max(start + row - window + 1, 0) if window else 0
        high = start + row + num_rows  # some row of this part sees each of the keys low .. high
        logits = part.flatten(1, 2) @ keys[:, :, low:high]
        logits = logits.view(num_kv_heads, num_rows, per_kv, high - low)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        part_values, sees_bad = values[:, low:high], None
        if num_rows > 1:
            key = torch.arange(low, high, device=q.device)
            masked = key > position[:, None]
            if window:
                masked |= key <= position[:, None] - window
            logits.masked_fill_(masked[:, None], -torch.inf)
            finite = torch.isfinite(part_values)
            if not finite.all():  # 0 * NaN is NaN, so such values count only for rows that see them
                part_values = part_values.where(finite, 0.0)
                sees_bad = (~masked).float() @ (~finite).float() > 0  # [num_kv_heads, rows, head_dim]
        if sinks is not None:
            sink = sinks.float().view(num_kv_heads, 1, per_kv, 1).expand(-1, num_rows, -1, -1)
            logits = torch.cat((logits, sink), -1)
        weights = torch.softmax(logits, -1)[..., : high - low]
        result = weights.reshape(num_kv_heads, num_rows * per_kv, -1) @ part_values
        result = result.view(num_kv_heads, num_rows, per_kv, head_dim)
        if sees_bad is not None:
            result.masked_fill_(sees_bad[:, :, None], torch.nan)
        out[row : row + num_rows] = result.transpose(0, 1)
    return out.reshape(rows, num_heads, head_dim)
