"""How many kernels are tuned for a GPU, for processes that do not import torch."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from edgelm.kernels.tuning import TUNED, num_measured


def num_tuned(cache: Path, gpu: str) -> int:
    """Return of how many kernels the fastest variant on a GPU of this name is known."""
    try:
        return num_measured(cache / TUNED, gpu, version("triton"))
    except PackageNotFoundError:
        return 0
