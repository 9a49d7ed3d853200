"""Whether our own kernels can run on a GPU here, and why not.

    python -m edgelm.executors.cuda        # the answer as one line of JSON, for processes that do not import torch

Owns that question, asked so that what is cheap comes first: torch is imported only where there is a driver. Knows
nothing of models.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from edgelm.executors.cuda_state import INSTALL, CudaState

LEAST_CAPABILITY = 8, 0
TRITON = (3, 6), (3, 10)  # from, below
DRIVER_FILES = "/dev/nvidiactl", "/dev/dxg"  # Linux, WSL


def find_cuda(driver_files: tuple[str, ...] = DRIVER_FILES) -> CudaState:
    """Look at packages, driver and GPU, in this order."""
    if not any(Path(each).exists() for each in driver_files):
        return CudaState("no NVIDIA driver was found")
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            return CudaState(f"{package} is not installed", INSTALL)
    try:
        found = version("triton")
    except PackageNotFoundError:
        found = "0"
    number = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    if not TRITON[0] <= number < TRITON[1]:
        return CudaState(f"triton is {found}, and 3.6 to 3.9 are known to work", INSTALL)
    return _look_at_gpu()


def _look_at_gpu() -> CudaState:
    import torch  # here: it takes seconds, and most machines need not wait for it

    if torch.version.cuda is None:
        return CudaState("this build of torch has no CUDA", INSTALL)
    try:
        if not torch.cuda.is_available():
            return CudaState("torch finds no usable GPU", "see what nvidia-smi says; the driver may be too old")
        name = torch.cuda.get_device_name(0)
        capability = torch.cuda.get_device_capability(0)
        free, total = torch.cuda.mem_get_info(0)
    except RuntimeError as error:
        return CudaState(f"the GPU does not answer: {str(error).splitlines()[0]}", "see what nvidia-smi says")
    if capability < LEAST_CAPABILITY:
        return CudaState(
            f"{name} is older than the Ampere generation (sm_80)", "llama.cpp runs on it", name, free, total
        )
    return CudaState("", "", name, free, total)


if __name__ == "__main__":
    json.dump(asdict(find_cuda()), sys.stdout)
