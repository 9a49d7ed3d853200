"""The device of the op tests, and a fixture that they share.

With KERNEL_DEVICE=cuda new tensors and random generators are on the GPU. Without it they are on the CPU, and Triton
interprets its kernels. Only packaging/gpu_kernels.sh sets it, for the tests that make all their tensors by torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

import pytest

if TYPE_CHECKING:
    import torch

if device := os.environ.get("KERNEL_DEVICE"):
    import torch

    if device.startswith("cuda"):
        os.environ.pop("TRITON_INTERPRET", None)  # set by tests/conftest.py; no kernel has been imported yet
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS requires it

    class Generator(torch.Generator):
        """A random generator on that device, unless another is given."""

        def __new__(cls, device: str | torch.device = device) -> Self:
            return super().__new__(cls, device)

    torch.Generator = Generator
    torch.set_default_device(device)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill new memory with NaN, or with the largest integer."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def generator() -> torch.Generator:
    """Return a generator whose seed is printed, on the device of the tests."""
    import torch

    generator = torch.Generator()
    print(f"seed {generator.seed()}")
    return generator
