"""The router in plain torch: the specification of the kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TINY = 1e-20  # added to the sum that normalises: weights of zero stay zero


def route(logits: Tensor, k: int, kind: str, normalise: bool) -> tuple[Tensor, Tensor]:
    """See the package's function of this name."""
    logits = logits.float()
    scores = torch.where(logits.isnan(), -math.inf, logits)
    ids = torch.argsort(scores, dim=-1, descending=True, stable=True)[:, :k]
    if kind == "softmax":
        weights = torch.softmax(logits, dim=-1).gather(1, ids)
    else:
        weights = torch.softmax(logits.gather(1, ids), dim=-1)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights, ids.to(torch.int32)
