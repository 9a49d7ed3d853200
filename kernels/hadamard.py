"""The Hadamard rotation of groups of 32, which spreads an outlier over its whole group.

Owns the matrix and the order of its additions. The matrix is orthonormal and symmetric: it is its own inverse. Knows
nothing of caches; `edgelm.kernels.cache.triton` has the same rotation for kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
FACTOR = 32**-0.5  # multiplied last, as a float32


def matrix(device: torch.device | str = "cpu") -> Tensor:
    """Return the rotation, float32 [32, 32]: FACTOR at (i, j), negative where i & j has an odd number of ones."""
    index = torch.arange(GROUP, device=device)
    common = index[:, None] & index[None, :]
    ones = torch.stack([(common >> bit) & 1 for bit in range(5)]).sum(0)
    return torch.where(ones % 2 == 1, -FACTOR, FACTOR).float()


def rotate(x: Tensor) -> Tensor:
    """Rotate the groups of the last dimension, float32 [..., 32 * n]: sums and differences 16, 8, 4, 2 and 1 apart."""
    shape = x.shape
    for stride in (16, 8, 4, 2, 1):
        pairs = x.reshape(*shape[:-1], shape[-1] // (2 * stride), 2, stride)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([first + second, first - second], -2)
    return x.reshape(shape) * FACTOR
