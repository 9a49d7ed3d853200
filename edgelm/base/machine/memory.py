"""The memory that this process can still take without swapping or being killed.

Owns the reading of the machine's and the control groups' counters. Knows nothing of models.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgelm.base.machine.cpu import cgroup_folders, read_text, sysctl

ARC = "proc/spl/kstat/zfs/arcstats"
ARC_SHARE = 0.9  # of what may shrink: it does so as others ask
USABLE = 0.95  # of the free memory: other programs run too, and no prediction is exact


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that are free or can be freed at once, within the limits of all control groups."""
    if sys.platform == "darwin":
        return mac_memory_bytes(_vm_stat()) or sysctl("hw.memsize") or _installed_bytes()
    else:
        return linux_memory_bytes(root)


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The memory of a process and of those that it started, in bytes."""

    resident: int  # pages that several processes share count in equal parts: the sum over all processes is true
    held: int  # of these, what the system cannot drop: no pages of mapped files


def process_memory(pid: int, root: Path = Path("/")) -> ProcessMemory | None:
    """Return the memory of a process and its descendants; None if it has ended, or on a system other than Linux."""
    rollup = _counters(root / f"proc/{pid}/smaps_rollup")
    if "Pss" not in rollup:
        return None
    resident, held = rollup["Pss"], rollup.get("Pss_Anon", 0) + rollup.get("Pss_Shmem", 0)
    own = ProcessMemory(resident * 1024, held * 1024)
    parts = [process_memory(child, root) for child in _children(pid, root)]
    return ProcessMemory(
        own.resident + sum(part.resident for part in parts if part), own.held + sum(part.held for part in parts if part)
    )


def _children(pid: int, root: Path) -> Iterator[int]:
    for file in sorted(root.glob(f"proc/{pid}/task/*/children")):
        yield from (int(child) for child in (read_text(file) or "").split())


def linux_memory_bytes(root: Path = Path("/")) -> int:
    """Return the smaller of the machine's available memory and the room in each control group."""
    machine = _counters(root / "proc/meminfo")
    available = machine.get("MemAvailable", machine.get("MemFree", 0) + machine.get("Cached", 0)) * 1024
    available += _zfs_bytes(root)
    return max(0, min([available if machine else _installed_bytes(), *_cgroup_rooms(root)]))


def _zfs_bytes(root: Path) -> int:
    """Return what the cache of ZFS gives back: it is no page cache, and MemAvailable counts it as used."""
    lines = re.findall(r"^(size|c_min)\s+\d+\s+(\d+)$", read_text(root / ARC) or "", re.MULTILINE)
    arc = {name: int(number) for name, number in lines}
    return max(0, int(ARC_SHARE * (arc.get("size", 0) - arc.get("c_min", 0))))


def mac_memory_bytes(vm_stat: str) -> int:
    """Return the free and inactive bytes in the output of macOS's `vm_stat`; 0 for any other text."""
    page = re.search(r"page size of (\d+) bytes", vm_stat)
    pages = dict(re.findall(r"^Pages ([a-z]+):\s+(\d+)\.", vm_stat, re.MULTILINE))
    free = sum(int(pages.get(name, 0)) for name in ("free", "speculative", "inactive"))
    return int(page[1]) * free if page else 0


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Yield the room in each limited control group: its limit minus the memory that it cannot drop."""
    for folder in cgroup_folders("memory", root):
        stat = _counters(folder / "memory.stat")
        # Pages of files, also active ones: of a model that was read twice most are.
        for limits, usage, files in (
            (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")),
            (("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
        ):
            used = _integer(folder / usage)
            for limit in (_integer(folder / name) for name in limits):
                if limit is not None and used is not None:
                    yield limit - used + min(used, sum(stat.get(name, 0) for name in files))


def _integer(path: Path) -> int | None:
    """Return the one integer in a file; None if the file is absent or says "max"."""
    text = (read_text(path) or "").strip()
    return int(text) if text.isdecimal() else None


def _counters(path: Path) -> dict[str, int]:
    """Return the "name number" lines of a file, with or without a colon and a unit."""
    lines = re.findall(r"^([\w()]+):?\s+(\d+)", read_text(path) or "", re.MULTILINE)
    return {name: int(number) for name, number in lines}


def _installed_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _vm_stat() -> str:
    try:
        return subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
