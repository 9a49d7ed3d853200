"""Embedding rows in plain torch: the specification."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from edgelm.kernels import layout
from edgelm.kernels.layout import TILE, DenseWeight, PackedWeight, Weight, planes


def embedding(ids: Tensor, weight: Weight, scale: float, out_dtype: torch.dtype, last: Tensor | None = None) -> Tensor:
    """Return rows of a weight; an id outside of it gives zeros."""
    if last is not None and len(last):
        place = -1 - ids.long()
        named = (place >= 0) & (place < len(last))
        ids = torch.where(named, last[torch.where(named, place, 0)].clamp(min=0), ids.long())
    inside = (ids >= 0) & (ids < weight.rows)
    rows = torch.where(inside, ids, 0).long()
    values = torch.where(inside[:, None], _rows(rows, weight) * scale, 0.0)  # [tokens, columns]
    if isinstance(weight, PackedWeight) and weight.order is not None:
        values = torch.empty_like(values).index_copy_(1, weight.order, values)
    return values.to(out_dtype)


def _rows(rows: Tensor, weight: Weight) -> Tensor:
    if isinstance(weight, DenseWeight):
        return weight.data[rows].float()
    # Dequantize only the tile of each token: the whole vocabulary would take seconds.
    tiles: dict[str, Any] = {name: plane[rows // TILE] for name, plane in planes(weight).items() if name != "order"}
    values = layout.dequantize(replace(weight, rows=len(rows) * TILE, order=None, **tiles))
    return values[torch.arange(len(rows), device=rows.device) * TILE + rows % TILE]
