"""Read memory and do nothing else: the read bandwidth of a GPU, by which every other kernel is judged.

Owns the probe. Knows nothing of clocks: tests/kernels/benchmark times it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.choice import dispatch

BLOCK_LEN = 8192  # words; inputs are whole blocks


def read(words: Tensor, *, implementation: str | None = None) -> Tensor:
    """Read int32 [count], a multiple of BLOCK_LEN, and return partial sums of it, int64 [sums].

    Their number depends on the implementation; modulo 2 ** 32 they add up to the sum of the words.
    """
    assert words.dtype == torch.int32
    assert words.numel() % BLOCK_LEN == 0
    assert words.is_contiguous()
    return dispatch("read", __name__, _reference, implementation, words)


def _reference(words: Tensor) -> Tensor:
    return words.sum(dtype=torch.int64).reshape(1)
