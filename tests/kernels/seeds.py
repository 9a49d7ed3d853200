"""Seeds of random inputs that differ in each test run; a test that fails has its seed in its name."""

from __future__ import annotations

import os
import secrets

import torch

SEED = int(os.environ.get("KERNEL_SEED", secrets.randbelow(2**31)))  # set it to repeat a failure


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
