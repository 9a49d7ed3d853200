"""Sample a token from each row of logits, where the logits are: rows with different parameters in one call.

Owns the layout of the parameters and of the answer, and the choice of implementation. What is computed is specified,
step by step, by `edgelm.sampling.reference`; this differs from it only where that allows any implementation to. Knows
nothing of requests: `edgelm.sampling.device` makes the tensors from them.

Weights are integers in units of 2**-43: float32 weights scaled and cut off. So a sum is exact, and the same in any
order of summation; what is cut off of 2**17 weights is less than 2**-26 of the greatest one. Nothing depends on the
number of rows, and nothing here waits for the device.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from edgelm.kernels.choice import Implementation, choose, declines_reference, declines_triton
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

__all__ = [
    "ID_BITS",
    "MAX_TOP",
    "MAX_VOCAB",
    "NUM_ANSWER",
    "WEIGHT_BITS",
    "Answer",
    "Batch",
    "Flag",
    "Word",
    "sample",
]


def sample(logits: Tensor, batch: Batch, *, implementation: str | None = None) -> Tensor:
    """Return int64 [rows, NUM_ANSWER], the columns of `Answer`, for logits [rows, vocab] of any float type.

    There may be fewer rows than the batch has room for. The logits are only read.
    """
    assert logits.ndim == 2, logits.shape
    assert logits.stride(1) == 1 or logits.shape[1] == 1, logits.stride()
    assert logits.shape[1] <= MAX_VOCAB, logits.shape
    assert batch.rows.is_contiguous()
    assert len(logits) <= len(batch.rows), (logits.shape, batch.rows.shape)
    batch = batch._replace(rows=batch.rows[: len(logits)])

    def run_triton(*arguments: Any) -> object:
        from edgelm.kernels.sampling import triton

        return triton.sample(*arguments)

    implementations = (
        Implementation("triton", lambda x, *_: declines_triton(x), run_triton),
        Implementation("reference", lambda x, *_: declines_reference(x, implementation), reference.sample),
    )
    return cast(Tensor, choose("sample", implementations, implementation, logits, batch).run(logits, batch))
