"""The router in plain torch: the specification of the kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TINY = 1e-20  # added to the sum that normalises: weights of zero stay zero


def route(
    logits: Tensor, k: int, kind: str, bias: Tensor | None, normalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """See the package's function of this name."""
    logits = logits.float()
    match kind:
        case "softmax":
            values = torch.softmax(logits, dim=-1)
        case "sigmoid":
            values = torch.sigmoid(logits)
        case _:
            values = logits
    scores = logits if bias is None else values + bias
    scores = torch.where(scores.isnan(), -math.inf, scores)
    ids = torch.argsort(scores, dim=-1, descending=True, stable=True)[:, :k]
    weights = values.gather(1, ids)
    if kind == "topk_softmax":
        weights = torch.softmax(weights, dim=-1)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights * scale, ids.to(torch.int32)
