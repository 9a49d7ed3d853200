"""Two trials of a device by kernels of their own: whether kernels can be compiled and run on it at all, and whether a
kernel that begins while the one before it still runs (kernels/pdl.py) waits for its results.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIZE = 16  # rows and columns of the product
PART = 256  # numbers of a program of the chain


def product(x: Tensor, y: Tensor, out: Tensor) -> None:
    """Write x @ y to `out`, float32; x and y are float16; all are [SIZE, SIZE]. Raises what Triton raises."""
    assert x.shape == y.shape == out.shape == (SIZE, SIZE)
    from edgelm.kernels.trial.kernel import product as run  # Triton is not installed everywhere

    run(x, y, out)


def chain(x: Tensor, spare: Tensor, links: int, rounds: int) -> None:
    """Let x, int32 [parts, PART], go through an even number of kernels, each of which takes `rounds` to compute it."""
    assert x.shape == spare.shape == (len(x), PART)
    assert x.dtype == spare.dtype == torch.int32
    assert links % 2 == 0
    from edgelm.kernels.trial.kernel import chain as run

    run(x, spare, links, rounds)


def chained(x: Tensor, links: int, rounds: int) -> Tensor:
    """Return the result of `chain` on x, computed by torch."""
    factor, term = pow(3, rounds, 2**32), (pow(3, rounds, 2**33) - 1) // 2  # x * 3 + 1, `rounds` times
    y = x.to(torch.int64)
    for _ in range(links):
        y = (y.roll(-1, 0) * factor + term) % 2**32
    return torch.where(y < 2**31, y, y - 2**32).to(torch.int32)
