"""What kernels are compiled for and measured on: the GPU, its size, and what Triton makes of a dot.

Owns these facts. Knows nothing of any op.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

from edgelm.kernels.choice import has_triton, interpreting
from edgelm.kernels.compile_case import CompileCase, compile_for

OFFLINE_CAPABILITY = 90  # what is compiled for where there is no GPU


class Target(NamedTuple):
    """A GPU and the software on it: what a measurement depends on."""

    gpu: str
    capability: int  # 90: sm_90
    num_sms: int
    memory_bytes: int
    l2_bytes: int
    driver: str
    cuda: str
    torch: str
    triton: str


@cache
def target_of(device: torch.device) -> Target:
    """Describe a device; the CPU is described as a GPU with nothing on it."""
    versions = {"torch": torch.__version__, "triton": triton_version()}
    if device.type != "cuda":
        return Target("cpu", 0, num_sms(device), 0, 0, "none", "none", **versions)
    found = torch.cuda.get_device_properties(device)
    return Target(
        gpu=found.name,
        capability=10 * found.major + found.minor,
        num_sms=found.multi_processor_count,
        memory_bytes=found.total_memory,
        l2_bytes=found.L2_cache_size,
        driver=_driver(),
        cuda=torch.version.cuda or "none",
        **versions,
    )


@cache
def num_sms(device: torch.device) -> int:
    """Return how many programs run at once; on the CPU few: the interpreter splits small inputs as a GPU large ones."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def triton_version() -> str:
    """Return Triton's version, or "none"."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


@cache
def kwidth() -> int:
    """Return how many neighbours along K a thread holds of a 16-bit dot operand: 2, or 4; of an 8-bit one twice that.

    It is 4 in Triton 3.6 and 2 in 3.9. The order in which a kernel joins its operands must fit, or each dot costs a
    shuffle; the result is the same. Read from a compiled probe, which stays in Triton's own cache on the disk.
    """
    if interpreting() or not has_triton():
        return 2
    from edgelm.kernels.target.triton import dot_probe

    case = CompileCase(
        name="target dot",
        fn=dot_probe,
        signature={"words": "*i32", "x": "*fp16", "out": "*fp32"},
        constants={},
        divisible=("words", "x", "out"),
    )
    found = {int(width) for width in re.findall(r"kWidth = (\d+)", compile_for(case, _capability()).asm["ttgir"])}
    assert found in ({2}, {4}), f"a 16-bit dot has kWidth {sorted(found)} in Triton {triton_version()}"
    return found.pop()


def _capability() -> int:
    if not torch.cuda.is_available():
        return OFFLINE_CAPABILITY
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _driver() -> str:
    """Return the version of the driver as its kernel module tells it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found[0] if found else "unknown"
