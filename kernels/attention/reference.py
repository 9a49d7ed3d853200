"""Attention in plain torch: the specification, and what the CPU runs.

Owns a loop over sequences and the softmax of one. Knows nothing of how the cache's planes lie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.cache import BLOCK_LEN, LayerCache, read

MAX_LOGITS = 1 << 24  # held at a time: 64 MiB


def run(
    q: Tensor,
    cache: LayerCache,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    max_query: int,
    out: Tensor,
) -> None:
    """Write the attention of each row into `out`, [tokens, heads, head_dim]. Reads tensors on the host."""
    bounds = starts.tolist()
    for sequence, length in enumerate(lengths.tolist()):
        first, end = bounds[sequence], bounds[sequence + 1]
        if first == end:
            continue
        assert end - first <= min(max_query, length)
        start = length - (end - first)  # the first row's position
        skipped = max(start - window + 1, 0) // BLOCK_LEN if window else 0  # blocks that no row sees
        blocks = tables[sequence, skipped : -(-length // BLOCK_LEN)].to(torch.int64)
        seen = skipped * BLOCK_LEN
        keys, values = read(cache, blocks, length - seen)
        out[first:end] = one_sequence(q[first:end], keys, values, start - seen, scale, window, softcap, sinks)


def one_sequence(
    q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, window: int, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Return the attention of rows at the positions start.., float32 [rows, heads, head_dim]; keys begin at 0."""
    rows, heads, head_dim = q.shape
    length, kv_heads, _ = keys.shape
    siblings = heads // kv_heads
    grouped = (q.float() * scale).reshape(rows, kv_heads, siblings, head_dim).transpose(0, 1)  # [kv_heads, rows, ..]
    keys = keys.permute(1, 2, 0)  # [kv_heads, head_dim, length]
    values = values.transpose(0, 1)  # [kv_heads, length, head_dim]
    out = torch.empty(rows, kv_heads, siblings, head_dim, device=q.device)
    step = max(MAX_LOGITS // (heads * length), 1)
    for row in range(0, rows, step):
        part = grouped[:, row : row + step]
        num_rows = part.shape[1]
        position = torch.arange(start + row, start + row + num_rows, device=q.device)
        low = max(start + row - window + 1, 0) if window else 0
        high = start + row + num_rows  # the keys that a row of this part sees: low .. high
        logits = part.flatten(1, 2) @ keys[:, :, low:high]
        logits = logits.view(kv_heads, num_rows, siblings, high - low)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        part_values, bad = values[:, low:high], None
        if num_rows > 1:
            key = torch.arange(low, high, device=q.device)
            hidden = key > position[:, None]
            if window:
                hidden |= key <= position[:, None] - window
            logits.masked_fill_(hidden[:, None], -torch.inf)
            known = torch.isfinite(part_values)
            if not known.all():  # 0 * NaN is NaN: it counts only for rows that see it
                part_values = part_values.where(known, 0.0)
                bad = (~hidden).float() @ (~known).float() > 0  # [kv_heads, rows, head_dim]
        if sinks is not None:
            sink = sinks.float().view(kv_heads, 1, siblings, 1).expand(-1, num_rows, -1, -1)
            logits = torch.cat((logits, sink), -1)
        weights = torch.softmax(logits, -1)[..., : high - low]
        result = weights.reshape(kv_heads, num_rows * siblings, -1) @ part_values
        result = result.view(kv_heads, num_rows, siblings, head_dim)
        if bad is not None:
            result.masked_fill_(bad[:, :, None], torch.nan)
        out[row : row + num_rows] = result.transpose(0, 1)
    return out.reshape(rows, heads, head_dim)
