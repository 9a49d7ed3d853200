"""The GPUs of this machine as data, for processes that import no native code.

Owns the query to the driver's tool, and the type that cuda.py fills. Knows nothing of what runs on a GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

TIME_LIMIT_S = 10
FIELDS = ("name", "driver_version", "memory.total", "memory.free", "uuid", "mig.mode.current")  # of nvidia-smi
VISIBLE = "CUDA_VISIBLE_DEVICES"
MIB = 2**20
WSL = Path("usr/lib/wsl/lib")  # the driver of Windows in WSL: a service's PATH may lack it
NVIDIA, AMD = "0x10de", "0x1002"  # vendors on the PCI bus
DISPLAY = "0x03"  # the class of a graphics card begins so
LEAST_VRAM = 2**31  # an AMD processor with graphics has less of its own, as a rule
NO_DRIVER = "no NVIDIA driver was found"
INSTALL = "pipx install 'edgelm[cuda]'"


@dataclass(frozen=True, slots=True)
class CudaState:
    """Whether our kernels can run on a GPU here. `problem` is empty if they can run on `name`.

    A problem continues the line "CUDA is not used: ".
    """

    problem: str
    hint: str = ""
    name: str = ""
    free_bytes: int = 0  # beside the context of the process that asked
    total_bytes: int = 0
    context_bytes: int = 0  # of that context; 0: not known


class Gpu(NamedTuple):
    """One GPU."""

    name: str
    total_bytes: int
    free_bytes: int
    driver: str = ""  # its version
    uuid: str = ""
    mig: bool = False  # it is divided into parts, each of which CUDA takes for a GPU


def has_torch() -> bool:
    """Return whether torch is installed, without importing it."""
    return find_spec("torch") is not None


class StandingGpu(NamedTuple):
    """A graphics card that stands in this machine. `problem` is why our kernels cannot use it, whatever the model."""

    name: str
    problem: str = ""
    hint: str = ""
    backend: str = "cuda"  # ggml's, of llama.cpp


def standing_gpu(root: Path = Path("/")) -> StandingGpu | None:
    """Return the graphics card with memory of its own in this machine, whatever its driver; None: there is none.

    One that the user hides from CUDA is none.
    """
    if os.environ.get(VISIBLE, "0").strip() in ("", "-1"):
        return None
    if gpus := nvidia_gpus():
        return StandingGpu(", ".join(dict.fromkeys(gpu.name for gpu in gpus)))
    for card in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor, kind, memory = (_word(card / name) for name in ("vendor", "class", "mem_info_vram_total"))
        if vendor == NVIDIA and kind.startswith(DISPLAY):
            return StandingGpu("the NVIDIA GPU", NO_DRIVER, "install the NVIDIA driver")
        if vendor == AMD and memory.isdecimal() and int(memory) >= LEAST_VRAM:
            return StandingGpu("the AMD GPU", "our own kernels need one of NVIDIA", backend="vulkan")
    return None


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def nvidia_gpus(tool: str | None = None) -> list[Gpu]:
    """Return the GPUs that `nvidia-smi` lists; none if the tool is missing, fails, or does not answer."""
    tool = tool or shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=f"/{WSL}")
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIME_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [gpu for line in done.stdout.splitlines() if (gpu := _parse_gpu(line)) is not None]


def usable_gpus() -> list[Gpu]:
    """Return those GPUs that CUDA_VISIBLE_DEVICES leaves to us."""
    gpus = nvidia_gpus()
    if VISIBLE not in os.environ:
        return gpus
    names = [name.strip() for name in os.environ[VISIBLE].split(",")]
    return [gpu for index, gpu in enumerate(gpus) if any(_is_named(gpu, index, name) for name in names)]


def _is_named(gpu: Gpu, index: int, name: str) -> bool:
    return name == str(index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))


def _parse_gpu(line: str) -> Gpu | None:
    """Parse the FIELDS of one GPU; return None for any other line, such as one with "[N/A]" for its memory."""
    fields = line.strip().rsplit(", ", len(FIELDS) - 1)
    if len(fields) != len(FIELDS) or not all(size.isascii() and size.isdecimal() for size in fields[2:4]):
        return None
    name, driver, total, free, uuid, mig = fields
    return Gpu(name, int(total) * MIB, int(free) * MIB, driver, uuid, mig == "Enabled")
