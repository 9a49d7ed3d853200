"""Choose the experts of each token in a mixture of experts.

Owns the signature, the meaning of each kind, and the choice of implementation. Knows nothing of what experts compute.

The k experts with the highest logits are selected, the highest first; of equal logits the lower expert id comes first.
A NaN is selected last, and its weight stays NaN.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from edgelm.kernels.choice import dispatch
from edgelm.kernels.route import reference

RouteKind = Literal["softmax", "topk_softmax"]


def route(
    logits: Tensor,  # [tokens, experts], the last dimension contiguous
    k: int,
    *,
    kind: RouteKind,
    normalise: bool = False,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weights (float32) and the expert ids (int32) of each token, both [tokens, k].

    The weights are the softmax over all experts ("softmax") or over the k selected logits ("topk_softmax");
    `normalise` divides them by their sum.
    """
    assert logits.ndim == 2, logits.shape
    assert 1 <= k <= logits.shape[1], (k, logits.shape)
    assert logits.stride(1) == 1 or logits.shape[1] == 1, logits.stride()
    assert kind in ("softmax", "topk_softmax"), kind
    return dispatch("route", __name__, reference.route, implementation, logits, k, kind, normalise)
