"""Which GPUs this machine has, and how much of their memory is free.

Owns the question to the driver's tool. Knows nothing of what could run there.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import NamedTuple

TIME_LIMIT_S = 10
MIB = 2**20


class Gpu(NamedTuple):
    """One GPU."""

    name: str
    total_bytes: int
    free_bytes: int


def nvidia_gpus(tool: str | None = None) -> list[Gpu]:
    """Return the GPUs that `nvidia-smi` names; none where there is no such tool, or it fails or does not answer."""
    tool = tool or shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        asked = subprocess.run(
            [tool, "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIME_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [gpu for line in asked.stdout.splitlines() if (gpu := parse_gpu(line)) is not None]


def parse_gpu(line: str) -> Gpu | None:
    """Read "NAME, TOTAL_MIB, FREE_MIB"; None for what is something else, such as "[N/A]" in place of a number."""
    fields = line.strip().rsplit(", ", 2)
    if len(fields) != 3 or not all(size.isascii() and size.isdecimal() for size in fields[1:]):
        return None
    return Gpu(fields[0], int(fields[1]) * MIB, int(fields[2]) * MIB)
