"""Read memory and do nothing else: what a GPU can read in a second, by which every other kernel is judged.

Owns the probe. Knows nothing of clocks: kernels/benchmark times it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.kernels.bandwidth import reference
from edgelm.kernels.choice import Implementation, choose, declines_reference, declines_triton

BLOCK_LEN = 8192  # words; inputs are whole blocks


def read(words: Tensor, *, implementation: str | None = None) -> Tensor:
    """Read int32 [count], a multiple of BLOCK_LEN, and return sums of it, int64 [sums].

    How many is up to the implementation; modulo 2 ** 32 they add up to the sum of the words.
    """
    assert words.dtype == torch.int32
    assert words.numel() % BLOCK_LEN == 0
    assert words.is_contiguous()
    sums = choose("read", _IMPLEMENTATIONS, implementation, words, implementation).run(words)
    assert isinstance(sums, Tensor)
    return sums


def _run_triton(words: Tensor) -> Tensor:
    from edgelm.kernels.bandwidth import triton

    return triton.read(words)


_IMPLEMENTATIONS = (
    Implementation("triton", lambda words, _: declines_triton(words), _run_triton),
    Implementation("reference", declines_reference, reference.read),
)
