"""How many processor cores this process may use.

Owns the reading of affinity, topology and quota. Does not know what the cores are used for: the executor chooses
thread counts from them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from edgelm.executors.cgroup import cgroup_folders, read_text

MOST_CPUS = 65_536  # of any machine: a bound for what a damaged file can cost


class Cores(NamedTuple):
    """Cores that this process may use; both are at least 1."""

    physical: int  # fast cores where a processor has two kinds
    logical: int  # hardware threads, of all kinds


def usable_cores(root: Path = Path("/")) -> Cores:
    """Return the cores this process may use: the machine's, less affinity and quota."""
    if sys.platform == "darwin":
        return mac_cores(sysctl)
    else:
        return linux_cores(os.sched_getaffinity(0), root)


def linux_cores(allowed: Collection[int], root: Path = Path("/")) -> Cores:
    """Return the cores among the `allowed` processors, within the quota of all control groups above this process."""
    devices = root / "sys/devices"
    fast = parse_cpu_list(read_text(devices / "cpu_core/cpus") or "").intersection(allowed) or allowed
    siblings = {_siblings(devices / f"system/cpu/cpu{cpu}/topology", cpu) for cpu in fast}
    quota = min(_quotas(root), default=float("inf"))
    # Rounded down: a team of threads that outruns its quota is stopped as a whole for the rest of each period,
    # and what is left of the quota serves the front process.
    most = max(1, int(min(quota, len(allowed))))
    return Cores(physical=min(len(siblings), most), logical=min(len(allowed), most))


def mac_cores(sysctl: Callable[[str], int | None]) -> Cores:
    """Return macOS's cores, the performance cores where it tells them apart."""
    logical = sysctl("hw.logicalcpu") or os.cpu_count() or 1
    physical = sysctl("hw.perflevel0.physicalcpu") or sysctl("hw.physicalcpu") or logical
    return Cores(physical=physical, logical=max(physical, logical))


def sysctl(name: str) -> int | None:
    """Return an integer of macOS's `sysctl`, None where there is no such name."""
    try:
        done = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=True)
        return int(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse the kernel's list format ("0-3,8"); the empty set where it is something else."""
    cpus: set[int] = set()
    try:
        for part in text.strip().split(","):
            first, dash, last = part.partition("-")
            cpus.update(range(int(first), min(MOST_CPUS, int(last if dash else first) + 1)))
    except ValueError:
        return frozenset()
    return frozenset(cpus)


def _siblings(topology: Path, cpu: int) -> frozenset[int]:
    """Return the hardware threads of the core that `cpu` belongs to; itself where the kernel does not tell."""
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second is the name before Linux 5.3
        cpus = parse_cpu_list(read_text(topology / name) or "")
        if cpu in cpus:
            return cpus
    return frozenset([cpu])


def _quotas(root: Path) -> Iterator[float]:
    """Yield the limits, in cores, of this process's control groups."""
    for folder in cgroup_folders("cpu", root):
        both = read_text(folder / "cpu.max")  # version 2: "max 100000" or "150000 100000"
        if both is None:
            both = f"{read_text(folder / 'cpu.cfs_quota_us')} {read_text(folder / 'cpu.cfs_period_us')}"
        try:
            quota, period = map(int, both.split())
        except ValueError:
            continue
        if quota > 0 and period > 0:  # version 1 writes -1 for "no limit"
            yield quota / period
