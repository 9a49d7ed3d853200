"""The check whether our own kernels can run on a GPU here, and the reason if they cannot.

Owns the order of the checks: the cheap ones come first, and torch is imported only if there is a driver. Knows nothing
of models.
"""

from __future__ import annotations

import re
import warnings
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from edgelm.base.machine.gpu import INSTALL, CudaState

MIN_CAPABILITY = 8, 0
TRITON = (3, 6), (3, 10)  # the first supported version, and the first that is not
DRIVER_FILES = "/dev/nvidiactl", "/dev/dxg"  # Linux, WSL


def find_cuda(driver_files: tuple[str, ...] = DRIVER_FILES) -> CudaState:
    """Check the driver, the packages and the GPU, in this order."""
    if not any(Path(file).exists() for file in driver_files):
        return CudaState("no NVIDIA driver was found")
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            return CudaState(f"{package} is not installed", INSTALL)
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "0"
    number = tuple(int(part) for part in triton.split(".")[:2] if part.isdecimal())
    if not TRITON[0] <= number < TRITON[1]:
        return CudaState(f"triton is {triton}, and 3.6 to 3.9 are known to work", INSTALL)
    return _check_gpu()


def _check_gpu() -> CudaState:
    import torch  # not at the top: it takes seconds, and most machines do not need it

    if torch.version.cuda is None:
        return CudaState("this build of torch has no CUDA", INSTALL)
    try:
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            available = torch.cuda.is_available()
        if not available:
            reason = next((text for warning in noted if "CUDA initialization" in (text := str(warning.message))), "")
            return _unusable(reason, torch.__version__, torch.version.cuda)
        name = torch.cuda.get_device_name(0)
        capability = torch.cuda.get_device_capability(0)
        free, total = torch.cuda.mem_get_info(0)
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:  # the latter while CUDA starts
        return CudaState(f"the GPU does not answer: {str(error).splitlines()[0]}", "see what nvidia-smi says")
    if capability < MIN_CAPABILITY:
        return CudaState(
            f"{name} is older than the Ampere generation (sm_80)", "llama.cpp runs on it", name, free, total
        )
    return CudaState("", "", name, free, total)


def _unusable(warning: str, torch_version: str, cuda_version: str) -> CudaState:
    """Explain a warning of torch, which raises nothing where it cannot use the driver."""
    if old := re.search(r"too old \(found version (\d+)\)", warning):
        number = f"{int(old[1]) // 1000}.{int(old[1]) % 1000 // 10}"  # 12040: CUDA 12.4
        needed = f"torch {torch_version}, which is built for CUDA {cuda_version}"
        return CudaState(f"the NVIDIA driver is for CUDA {number}, too old for {needed}", "update the NVIDIA driver")
    reason = re.split(r"CUDA initialization: |\. |, e\.g\.|\(Triggered", warning)[1].strip() if warning else ""
    if reason:
        hint = "restart the machine if the NVIDIA driver was updated; see what nvidia-smi says"
        return CudaState(f"torch finds no usable GPU: {reason}", hint)
    return CudaState("torch finds no usable GPU", "see what nvidia-smi says, and CUDA_VISIBLE_DEVICES")
