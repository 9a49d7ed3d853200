"""The GPUs of this machine as data, for processes that import no native code.

Owns the query to the driver's tool, and the type that cuda.py fills. Knows nothing of what runs on a GPU.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

TIME_LIMIT_S = 10
MIB = 2**20
INSTALL = "pipx install 'edgelm[cuda]'"


@dataclass(frozen=True, slots=True)
class CudaState:
    """Whether our kernels can run on a GPU here. `problem` is empty if they can run on `name`.

    A problem continues the line "CUDA is not used: ".
    """

    problem: str
    hint: str = ""
    name: str = ""
    free_bytes: int = 0
    total_bytes: int = 0


class Gpu(NamedTuple):
    """One GPU."""

    name: str
    total_bytes: int
    free_bytes: int
    driver: str = ""  # its version


def has_torch() -> bool:
    """Return whether torch is installed, without importing it."""
    return find_spec("torch") is not None


def nvidia_gpus(tool: str | None = None) -> list[Gpu]:
    """Return the GPUs that `nvidia-smi` lists; none if the tool is missing, fails, or does not answer."""
    tool = tool or shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, "--query-gpu=name,driver_version,memory.total,memory.free", "--format=csv,noheader,nounits"],
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


def _parse_gpu(line: str) -> Gpu | None:
    """Parse "NAME, DRIVER, TOTAL_MIB, FREE_MIB"; return None for any other line, such as one with "[N/A]" in it."""
    fields = line.strip().rsplit(", ", 3)
    if len(fields) != 4 or not all(size.isascii() and size.isdecimal() for size in fields[2:]):
        return None
    return Gpu(fields[0], int(fields[2]) * MIB, int(fields[3]) * MIB, fields[1])
