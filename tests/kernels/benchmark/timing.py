"""Inputs for cold timing, of which the cache cannot hold all, and the speed of the GPU's memory.

Knows nothing of ops and of the clock, which is the engine's own (edgelm/backends/torch/timing.py).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from edgelm.backends.torch.timing import COLD_FACTOR, time_us
from edgelm.kernels.gpu_target import target_of
from tests.kernels.bandwidth import BLOCK_LEN, read
from tests.kernels.benchmark import cloned, nbytes_of

MAX_COPIES = 256
PROBE_BYTES = 1 << 30


def copies_of(inputs: Any, device: torch.device) -> list[Any]:
    """Return the inputs and copies of them, more than the cache can hold."""
    cold = COLD_FACTOR * target_of(device).l2_bytes
    count = min(max(math.ceil(cold / max(nbytes_of(inputs), 1)), 1), MAX_COPIES)
    return [inputs] + [cloned(inputs) for _ in range(count - 1)]


def read_gbps(device: torch.device) -> float:
    """Return how many gigabytes (1e9 bytes) a second the GPU reads when it does nothing else."""
    words = torch.randint(-(2**31), 2**31, (PROBE_BYTES // 4,), dtype=torch.int32, device=device)
    assert words.numel() % BLOCK_LEN == 0
    return nbytes_of(words) / time_us(lambda inputs: read(inputs, implementation="triton"), [words]) / 1e3
