"""The check whether our own kernels can run on a GPU here, and the reason if they cannot.

Owns the order of the checks: the cheap ones come first, and torch is imported only if there is a driver. Knows nothing
of models.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shlex
import shutil
import sys
import warnings
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from edgelm.base.atomic import atomic_write
from edgelm.base.errors import EngineError
from edgelm.base.machine.gpu import (
    VISIBLE,
    CudaState,
    compute_capabilities,
    driver_place,
    nvidia_gpus,
    standing_gpu,
    usable_gpus,
)
from edgelm.base.machine.llama_build import extra_command, find_build, gpu_backend_command, install_command
from edgelm.base.machine.memory import available_memory_bytes
from edgelm.base.places import own_places

MIN_CAPABILITY = 8, 0
TRITON = (3, 6), (3, 10)  # the first version that kernels were compiled with, and the first with which none was
TESTED = "3.6.0", "3.7.1"  # what the extra `cuda` brings
NO_GPU = "no NVIDIA GPU was found"
MUCH_FREER = 2  # times the free memory of any other GPU
DRIVER_FILES = "/dev/nvidiactl", "/dev/dxg"  # Linux, WSL
DRIVER = "libcuda.so.1"

log = logging.getLogger(__name__)


def find_cuda(driver_files: tuple[str, ...] = DRIVER_FILES) -> CudaState:
    """Check the driver, the packages and the GPU, in this order."""
    if not any(Path(file).exists() for file in driver_files):
        card = standing_gpu()
        if not (card and card.ours):
            return CudaState(NO_GPU)
        if card.problem:  # else nvidia-smi lists it, so the driver is there under another name
            return CudaState(card.problem, card.hint)
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            return CudaState(f"{package} is not installed", extra_command("cuda"))
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "0"
    number = tuple(int(part) for part in triton.split(".")[:2] if part.isdecimal())
    if not TRITON[0] <= number < TRITON[1]:
        return CudaState(f"triton is {triton}, and {' and '.join(TESTED)} are tested", extra_command("cuda"))
    _note_triton(triton)
    _name_the_freest_first()
    _name_zig()
    return _check_gpu()


@cache
def _note_triton(triton: str) -> None:
    """Log once that kernels are compiled by a version whose results may be right and slower."""
    if triton not in TESTED:
        log.info("triton is %s: kernels may be slower than with %s", triton, " or ".join(TESTED))


def _name_the_freest_first() -> None:
    """Let CUDA count the GPU with the most free memory as the first, unless the user has ordered them.

    Of different ones CUDA's own first is the fastest. Another is taken where it has much more free memory than all
    others, and is not too old. It has no effect where CUDA has begun in this process. llama.cpp still sees all of them.
    """
    if VISIBLE in os.environ:
        return
    gpus = nvidia_gpus()
    if len(gpus) < 2 or not all(gpu.uuid and not gpu.mig for gpu in gpus):
        return
    ordered = sorted(gpus, key=lambda gpu: -gpu.free_bytes)
    if len({gpu.name for gpu in gpus}) > 1:
        known = compute_capabilities()
        fine = [gpu for gpu in ordered if known.get(gpu.uuid, (0, 0)) >= MIN_CAPABILITY]
        if not fine or any(fine[0].free_bytes < MUCH_FREER * gpu.free_bytes for gpu in fine[1:]):
            return
        ordered = [*fine, *(gpu for gpu in ordered if gpu not in fine)]
    os.environ[VISIBLE] = ",".join(gpu.uuid for gpu in ordered)


def _name_zig() -> None:
    """Let Triton compile C by PyPI's ziglang where that is installed and no other compiler is.

    Triton wants the path of one program, and zig's C compiler is a command of it.
    """
    if "CC" in os.environ or shutil.which("gcc") or shutil.which("clang") or find_spec("ziglang") is None:
        return
    script = own_places().cache / "zig-cc"
    command = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ziglang cc "$@"\n'
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(script, command.encode())
        script.chmod(0o755)
    except OSError:
        return  # Triton then says that there is no compiler
    os.environ["CC"] = str(script)


def _start_driver() -> None:
    """Start the driver in a call that lets other threads run, so that a watchdog notices where it hangs.

    torch starts it while it holds Python's lock. What fails here fails for torch too, which says why.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(DRIVER).cuInit(0)


@cache
def context_bytes() -> int:
    """Return the bytes of this process's CUDA context, by what was free before it; 0: that is not known.

    The first call makes the context. nvidia-smi does not know the memory of a part of a GPU (MIG).
    """
    import torch

    before = {gpu.uuid: gpu.free_bytes for gpu in usable_gpus() if gpu.uuid and not gpu.mig}
    if not before or torch.cuda.is_initialized():
        return 0
    free, _ = torch.cuda.mem_get_info(0)
    uuid = _uuid()
    was_free = next((free_bytes for name, free_bytes in before.items() if uuid and name.endswith(uuid)), free)
    return max(0, was_free - free)


def gpu_memory() -> tuple[int, int]:
    """Return the free bytes and all bytes of CUDA's first GPU.

    Where it shares the machine's memory (GB10, Orin), CUDA does not count as free what the page cache holds, which the
    system drops for whoever asks.
    """
    import torch

    free, total = torch.cuda.mem_get_info(0)
    if getattr(torch.cuda.get_device_properties(0), "is_integrated", False):
        free = min(max(free, available_memory_bytes()), total)
    return free, total


def _uuid() -> str:
    """Return the UUID of CUDA's first GPU, as nvidia-smi ends it; empty: this torch does not tell it."""
    import torch

    return str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))


def _check_gpu() -> CudaState:
    import torch  # not at the top: it takes seconds, and most machines do not need it

    if torch.version.cuda is None:
        return CudaState("this build of torch has no CUDA", f"uninstall torch, then {extra_command('cuda')}")
    _start_driver()
    try:
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            available = torch.cuda.is_available()
        if not available:
            reason = next((text for warning in noted if "CUDA initialization" in (text := str(warning.message))), "")
            return _unusable(reason, torch.__version__, torch.version.cuda)
        context = context_bytes()
        name = torch.cuda.get_device_name(0)
        capability = torch.cuda.get_device_capability(0)
        free, total = gpu_memory()
        uuid = _uuid()
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:  # the latter while CUDA starts
        return CudaState(f"the GPU does not answer: {str(error).splitlines()[0]}", "see what nvidia-smi says")
    if capability < MIN_CAPABILITY:
        return CudaState(
            "the GPU is older than the Ampere generation (sm_80)", "llama.cpp runs on it", name, free, total
        )
    return CudaState("", "", name, free, total, context, uuid=uuid)


def _unusable(warning: str, torch_version: str, cuda_version: str) -> CudaState:
    """Explain a warning of torch, which raises nothing where it cannot use the driver."""
    if old := re.search(r"too old \(found version (\d+)\)", warning):
        major, minor = divmod(int(old[1]), 1000)  # 12040: CUDA 12.4
        needed = f"torch {torch_version}, which is built for CUDA {cuda_version}"
        problem = f"the NVIDIA driver is for CUDA {major}.{minor // 10}, too old for {needed}"
        try:  # llama.cpp's CUDA 12 needs driver 525, its Vulkan an older one
            other = gpu_backend_command(find_build(), "cuda" if major >= 12 else "vulkan")
        except EngineError:
            other = "`edgelm help gpu` has the command"
        # torch from 2.11 on is built for CUDA 13, which needs driver 580.
        hint = f"update the driver{driver_place()} to 580 or newer, or use llama.cpp on the GPU ({other})"
        if major >= 12:
            hint += f", or keep the driver: {install_command('torch==2.10.*', other_release=True)}"
        return CudaState(problem, hint, old_driver=True)
    reason = re.split(r"CUDA initialization: |\. |, e\.g\.|\(Triggered", warning)[1].strip() if warning else ""
    if reason:
        hint = "restart the machine if the NVIDIA driver was updated; see what nvidia-smi says"
        return CudaState(f"torch finds no usable GPU: {reason}", hint)
    return CudaState("torch finds no usable GPU", "see what nvidia-smi says, and CUDA_VISIBLE_DEVICES")
