"""Choose the experts of each token in a mixture of experts.

Owns the signature, the meaning of each kind, and the choice of implementation. Knows nothing of what experts compute.

Selected are the k highest scores, highest first; of equal ones the lower expert id comes first. The scores are the
logits, or with a bias the kind's own values (see `route`) plus the bias. A NaN is selected last, but its weight stays
NaN.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor

from edgelm.kernels.choice import Implementation, choose, declines_reference, declines_triton
from edgelm.kernels.route import reference

RouteKind = Literal["softmax", "topk_softmax", "sigmoid"]


def route(
    logits: Tensor,  # [tokens, experts], the last dimension contiguous
    k: int,
    *,
    kind: RouteKind,
    bias: Tensor | None = None,  # float32 [experts]: changes who is selected, never a weight
    normalise: bool = False,
    scale: float = 1.0,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weights (float32) and the expert ids (int32) of each token, both [tokens, k].

    The values of "softmax" are those over all experts, of "sigmoid" each logit's own; a weight is the expert's value.
    "topk_softmax" selects by the logits (plus bias), and its weights are the softmax of the k selected logits.
    `normalise` divides the weights by their sum; `scale` comes last.
    """
    assert logits.ndim == 2, logits.shape
    assert 1 <= k <= logits.shape[1], (k, logits.shape)
    assert logits.stride(1) == 1 or logits.shape[1] == 1, logits.stride()
    assert kind in ("softmax", "topk_softmax", "sigmoid"), kind
    if bias is not None:
        assert bias.shape == logits.shape[1:], (bias.shape, logits.shape)
        assert bias.dtype == torch.float32, bias.dtype

    def run_triton(*arguments: Any) -> object:
        from edgelm.kernels.route import triton

        return triton.route(*arguments)

    implementations = (
        Implementation("triton", lambda x, *_: declines_triton(x), run_triton),
        Implementation("reference", lambda x, *_: declines_reference(x, implementation), reference.route),
    )
    arguments = logits, k, kind, bias, normalise, scale
    chosen = choose("route", implementations, implementation, *arguments)
    return cast(tuple[Tensor, Tensor], chosen.run(*arguments))
