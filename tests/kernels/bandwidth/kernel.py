"""The bandwidth probe in Triton: one wave of programs; program i of n reads the blocks i, i + n, and so on."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelm.kernels.gpu_target import num_sms
from edgelm.kernels.tuning import TABLE


class Config(NamedTuple):
    """The words that a program reads at once, its warps, and the programs per multiprocessor."""

    block: int
    num_warps: int
    per_sm: int


CANDIDATES = [Config(8192, 8, 8), Config(8192, 8, 4), Config(4096, 8, 8), Config(4096, 4, 16), Config(2048, 4, 16)]


def read(words: Tensor) -> Tensor:
    """Launch the kernel with as many programs as fit on the GPU."""
    config = TABLE.best("bandwidth", "read", lambda: CANDIDATES)
    blocks = words.numel() // config.block
    programs = min(blocks, num_sms(words.device) * config.per_sm)
    sums = torch.empty(programs, dtype=torch.int64, device=words.device)
    read_kernel[(programs,)](words, sums, blocks, BLOCK=config.block, num_warps=config.num_warps)
    return sums


@triton.jit
def read_kernel(words, sums, blocks, BLOCK: tl.constexpr):
    """Write the sum of a program's blocks to sums, int64 [programs]. words: int32 [blocks * BLOCK]."""
    total = tl.zeros([BLOCK], tl.int32)
    first = tl.program_id(0).to(tl.int64)  # so that `block` has 64 bits too, and offsets do not overflow
    for block in range(first, blocks, tl.num_programs(0)):
        total += tl.load(words + block * BLOCK + tl.arange(0, BLOCK), eviction_policy="evict_first")
    tl.store(sums + tl.program_id(0), tl.sum(total.to(tl.int64), 0))
