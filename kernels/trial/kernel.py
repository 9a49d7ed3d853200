"""The Triton kernels of the trials: a product on tensor cores, and a chain whose kernels read each other's results."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from edgelm.kernels.pdl import begin_dependent, uses_pdl


def product(x: Tensor, y: Tensor, out: Tensor) -> None:
    """Launch `trial_kernel`."""
    trial_kernel[(1,)](x, y, out, SIZE=x.shape[0])


def chain(x: Tensor, spare: Tensor, links: int, rounds: int) -> None:
    """Launch `link_kernel`, from x to `spare`, back to x, and so on."""
    parts, size = x.shape
    for _ in range(links // 2):
        link_kernel[(parts,)](x, spare, rounds, SIZE=size, launch_pdl=uses_pdl())
        link_kernel[(parts,)](spare, x, rounds, SIZE=size, launch_pdl=uses_pdl())


@triton.jit
def trial_kernel(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at)))


@triton.jit
def link_kernel(x_ptr, out_ptr, rounds, SIZE: tl.constexpr, launch_pdl: tl.constexpr = False):
    """Compute a part from the one that the next program of the kernel before has written. Grid: parts."""
    begin_dependent(launch_pdl)
    part = tl.program_id(0)
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + (part + 1) % tl.num_programs(0) * SIZE + at)
    for _ in range(rounds):  # so long that a kernel that did not wait would be seen
        x = x * 3 + 1
    tl.store(out_ptr + part * SIZE + at, x)
