"""Sample a token from each row of logits on the logits' device; each row has its own parameters.

Owns the layout of parameters and answers, and the choice of implementation. `engine/sampling/reference.py` specifies
the result step by step; this op differs from it only where that specification allows it. Knows nothing of requests:
`edgelm.backends.torch.sampler` makes the tensors from them.

Weights are integers in units of 2**-43: float32 weights, scaled and truncated. So a sum is exact, and the same in any
order of summation; the truncation of 2**17 weights adds up to less than 2**-26 of the greatest one. Nothing depends on
the number of rows, and nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.choice import dispatch
from edgelm.kernels.sampling import reference
from edgelm.kernels.sampling.layout import (
    ID_BITS,
    MAX_TOP,
    MAX_VOCAB,
    NUM_ANSWER,
    WEIGHT_BITS,
    Answer,
    Batch,
    Flag,
    Word,
)

__all__ = ["ID_BITS", "MAX_TOP", "MAX_VOCAB", "NUM_ANSWER", "WEIGHT_BITS", "Answer", "Batch", "Flag", "Word", "sample"]


def sample(logits: Tensor, batch: Batch, *, out: Tensor | None = None, implementation: str | None = None) -> Tensor:
    """Return int64 [rows, NUM_ANSWER], the columns of `Answer`, for logits [rows, vocab] of any float type.

    There may be fewer rows than the batch has room for. The logits are not changed. The result goes to `out`, by
    default to a new tensor.
    """
    assert logits.ndim == 2, logits.shape
    assert logits.stride(1) == 1 or logits.shape[1] == 1, logits.stride()
    assert logits.shape[1] <= MAX_VOCAB, logits.shape
    assert batch.rows.is_contiguous()
    assert len(logits) <= len(batch.rows), (logits.shape, batch.rows.shape)
    if out is not None:
        assert (out.shape, out.dtype) == ((len(logits), NUM_ANSWER), torch.int64), (out.shape, out.dtype)
        assert out.is_contiguous()
    batch = batch._replace(rows=batch.rows[: len(logits)])
    return dispatch("sample", __name__, reference.sample, implementation, logits, batch, out)
