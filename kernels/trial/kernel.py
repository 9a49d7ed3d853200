"""The Triton kernel of the trial: one program, one product on tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def product(x: Tensor, y: Tensor, out: Tensor) -> None:
    """Launch the kernel."""
    trial_kernel[(1,)](x, y, out, SIZE=x.shape[0])


@triton.jit
def trial_kernel(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at)))
