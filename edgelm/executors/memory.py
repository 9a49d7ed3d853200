"""How much memory this process can still take without swapping or being killed.

Owns the reading of the machine's and the control groups' counters. Knows nothing of models.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from edgelm.executors.cgroup import cgroup_folders, read_text
from edgelm.executors.cores import sysctl


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that are free or can be freed at once, within the limits of all control groups above."""
    if sys.platform == "darwin":
        return mac_memory_bytes(_vm_stat()) or sysctl("hw.memsize") or _installed_bytes()
    else:
        return linux_memory_bytes(root)


def linux_memory_bytes(root: Path = Path("/")) -> int:
    """Return the smaller of what the machine has available and what each control group leaves."""
    machine = _counters(root / "proc/meminfo")
    available = machine.get("MemAvailable", machine.get("MemFree", 0) + machine.get("Cached", 0))
    return max(0, min([available * 1024 if machine else _installed_bytes(), *_group_rooms(root)]))


def mac_memory_bytes(vm_stat: str) -> int:
    """Return the free and inactive memory in the output of macOS's `vm_stat`, 0 where it says something else."""
    page = re.search(r"page size of (\d+) bytes", vm_stat)
    pages = dict(re.findall(r"^Pages ([a-z]+):\s+(\d+)\.", vm_stat, re.MULTILINE))
    free = sum(int(pages.get(name, 0)) for name in ("free", "speculative", "inactive"))
    return int(page[1]) * free if page else 0


def _group_rooms(root: Path) -> Iterator[int]:
    """Yield, for each limited control group, its limit less what it holds and cannot drop."""
    for folder in cgroup_folders("memory", root):
        stat = _counters(folder / "memory.stat")
        for limits, usage, dropped in (
            (("memory.max", "memory.high"), "memory.current", "inactive_file"),
            (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
        ):
            used = _integer(folder / usage)
            for limit in (_integer(folder / name) for name in limits):
                if limit is not None and used is not None:
                    yield limit - used + min(used, stat.get(dropped, 0))


def _integer(path: Path) -> int | None:
    """Return the file's one integer; None where it is absent or says "max"."""
    text = (read_text(path) or "").strip()
    return int(text) if text.isdecimal() else None


def _counters(path: Path) -> dict[str, int]:
    """Return the "name number" lines of a file, with or without a colon and a unit."""
    found = re.findall(r"^([\w()]+):?\s+(\d+)", read_text(path) or "", re.MULTILINE)
    return {name: int(number) for name, number in found}


def _installed_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _vm_stat() -> str:
    try:
        return subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
