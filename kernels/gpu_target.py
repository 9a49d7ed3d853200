"""The GPU that kernels are compiled for and measured on: its size, its software, and what Triton makes of a dot on it.

Owns these facts. Knows nothing of any op.
"""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from edgelm.kernels.choice import has_triton, interpreting

HBM = (80, 90, 100, 103)  # compute capabilities of GPUs with high-bandwidth memory
OFFLINE_CAPABILITY = 90  # compute capability that kernels are compiled for where there is no GPU
SOUND_TRITON = (3, 9)  # the first release without the faults that kernels avoid in older ones


class Target(NamedTuple):
    """A GPU and its software: everything that a measurement depends on."""

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
    """Describe a device. The CPU is described as a GPU without memory."""
    versions = {"torch": torch.__version__, "triton": triton_version()}
    if device.type != "cuda":
        return Target("cpu", 0, num_sms(device), 0, 0, "none", "none", **versions)
    properties = torch.cuda.get_device_properties(device)
    return Target(
        gpu=properties.name,
        capability=10 * properties.major + properties.minor,
        num_sms=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size,
        driver=_driver_version(),
        cuda=torch.version.cuda or "none",
        **versions,
    )


@cache
def num_sms(device: torch.device) -> int:
    """Return the number of streaming multiprocessors; 4 on the CPU, so that the interpreter splits small inputs too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def triton_version() -> str:
    """Return Triton's version, or "none"."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


@cache
def triton_has_faults() -> bool:
    """Return whether Triton is older than SOUND_TRITON."""
    return tuple(int(number) for number in re.findall(r"\d+", triton_version())[:2]) < SOUND_TRITON


def stages_of_products(num_stages: int) -> int:
    """Return the stages of a loop of `tl.dot` that should have `num_stages`: 1 where Triton pipelines it wrongly.

    On sm_90, Triton 3.6 lets the next iteration write registers that wgmma still reads, and so does a ptxas older than
    13.3 (Triton 3.9 has 13.4; triton-lang/triton, issue 9433). Triton 3.6 also has no fence between cp.async and wgmma
    (pull request 9610). With one stage, operands are stored and fenced, and products are waited for at once.
    """
    return 1 if triton_has_faults() and has_wgmma() else num_stages


def has_wgmma() -> bool:
    """Return whether kernels are compiled to wgmma: on sm_90 only."""
    return _capability() // 10 == 9


def has_hbm() -> bool:
    """Return whether memory is so fast that it seldom bounds a decode step: A100, H100, B200 and their like."""
    return _capability() in HBM


def _capability() -> int:
    """Return the compute capability that kernels are compiled for; 0: they are interpreted."""
    if interpreting():
        return 0
    from triton.runtime import driver

    return capability_of(driver.active, driver.active.get_current_device())


@lru_cache(maxsize=32)
def capability_of(active: Any, _device: int) -> int:
    """Return the compute capability of a driver's current device, which would take time at each launch."""
    capability = active.get_current_target().arch
    assert isinstance(capability, int), capability
    return capability


@cache
def kwidth() -> int:
    """Return how many neighbours along K a thread holds of a 16-bit dot operand: 2 or 4 (twice that for 8 bits).

    Triton 3.6 chooses 4, Triton 3.9 chooses 2. Kernels must join their operands in the same order, or each dot needs a
    shuffle; the result is the same. The width is read from a compiled probe, which Triton keeps in its disk cache.
    """
    if interpreting() or not has_triton():
        return 2
    from triton import knobs

    try:
        widths = _dot_widths()
    except (KeyError, ValueError):  # a file of the cache is damaged: no JSON, no text, or gone
        widths = set()
    if not widths:  # only binaries were stored (TRITON_STORE_BINARY_ONLY), or the file is gone or empty
        with knobs.compilation.scope():
            knobs.compilation.store_binary_only, knobs.compilation.always_compile = False, True
            widths = _dot_widths()
    assert widths in ({2}, {4}), f"a 16-bit dot has kWidth {sorted(widths)} in Triton {triton_version()}"
    return widths.pop()


def _dot_widths() -> set[int]:
    return {int(width) for width in re.findall(r"kWidth = (\d+)", _compiled_dot_probe().asm.get("ttgir", ""))}


def _compiled_dot_probe() -> Any:
    """Compile the probe for this GPU, or for OFFLINE_CAPABILITY where there is none."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from edgelm.kernels.unpack import dot_probe

    capability = OFFLINE_CAPABILITY
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        capability = 10 * major + minor
    signature = {"words": "*i32", "x": "*fp16", "out": "*fp32"}
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(len(signature))}
    source = ASTSource(dot_probe, signature, {}, aligned)
    options = {"enable_fp_fusion": True, "num_warps": 4}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _driver_version() -> str:
    """Return the driver's version as its kernel module reports it, or its library: WSL has no such module."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = _nvml_version()
    match = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return match[0] if match else "unknown"


def _nvml_version() -> str:
    text = ctypes.create_string_buffer(80)
    with suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            nvml.nvmlSystemGetDriverVersion(text, len(text))
            nvml.nvmlShutdown()
    return text.value.decode(errors="replace")
