"""The device of the op tests: with KERNEL_DEVICE=cuda new tensors and random generators are on the GPU.

Without it they are on the CPU, and Triton interprets its kernels. Only packaging/gpu_kernels.sh sets it, for the tests
that make all their tensors by torch.
"""

from __future__ import annotations

import os
from typing import Self

if device := os.environ.get("KERNEL_DEVICE"):
    import torch

    if device.startswith("cuda"):
        os.environ.pop("TRITON_INTERPRET", None)  # tests/conftest.py has set it; no kernel has been imported yet

    class Generator(torch.Generator):
        """A random generator on that device, unless it is told another."""

        def __new__(cls, device: str | torch.device = device) -> Self:
            return super().__new__(cls, device)

    torch.Generator = Generator
    torch.set_default_device(device)
