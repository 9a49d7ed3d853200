"""The processor cores that this process may use, what others do with them, and the control groups (versions 1 and 2).

Owns the reading of affinity, core topology, quotas, control group mounts and the load by other processes. Knows nothing
of what the cores are used for: the backends choose thread counts from them.
"""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

FAST_CAPACITY = 0.6  # of the fastest kind's: the middle of three kinds is fast, too
MAX_CPUS = 65_536  # of any machine: bounds the cost of a damaged file


class Cores(NamedTuple):
    """Cores that this process may use; both numbers are at least 1."""

    physical: int  # only the fast cores if a processor has two kinds
    logical: int  # hardware threads of all kinds


def usable_cores(root: Path = Path("/")) -> Cores:
    """Return the cores that this process may use, within its affinity and quota."""
    if sys.platform == "darwin":
        return mac_cores(sysctl)
    else:
        return linux_cores(os.sched_getaffinity(0), root)


def linux_cores(allowed: Collection[int], root: Path = Path("/")) -> Cores:
    """Return the cores among the `allowed` processors, within the quotas of all control groups of this process."""
    devices = root / "sys/devices"
    fast = parse_cpu_list(read_text(devices / "cpu_core/cpus") or "").intersection(allowed)  # of Intel's processors
    fast = fast or _capable(allowed, devices)
    siblings = {_siblings(devices / f"system/cpu/cpu{cpu}/topology", cpu) for cpu in fast}
    quota = min(_quotas(root), default=float("inf"))
    # Rounded down: the kernel stops a team of threads that exceeds its quota for the rest of each period, and the
    # front process needs the rest of the quota.
    limit = max(1, int(min(quota, len(allowed))))
    return Cores(physical=min(len(siblings), limit), logical=min(len(allowed), limit))


def _capable(allowed: Collection[int], devices: Path) -> frozenset[int]:
    """Return the fast processors among the `allowed` ones, by what the kernel knows of ARM's two or three kinds."""
    capacities = {cpu: read_text(devices / f"system/cpu/cpu{cpu}/cpu_capacity") or "" for cpu in allowed}
    known = {cpu: int(text) for cpu, text in capacities.items() if text.strip().isdecimal()}
    least = FAST_CAPACITY * max(known.values(), default=0)
    return frozenset(cpu for cpu in allowed if known.get(cpu, least) >= least)


def processor_flags(root: Path = Path("/")) -> frozenset[str]:
    """Return the instruction sets of an x86 processor by the kernel's names; empty: they are unknown."""
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def processor_name(root: Path = Path("/")) -> str:
    """Return the processor's name where Linux knows it, or else its architecture."""
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.machine() or "an unknown processor"


def mac_cores(sysctl: Callable[[str], int | None]) -> Cores:
    """Return macOS's cores; only the performance cores are physical ones if macOS lists them."""
    logical = sysctl("hw.logicalcpu") or os.cpu_count() or 1
    physical = sysctl("hw.perflevel0.physicalcpu") or sysctl("hw.physicalcpu") or logical
    return Cores(physical=physical, logical=max(physical, logical))


def sysctl(name: str) -> int | None:
    """Return an integer of macOS's `sysctl`; None if there is no such name."""
    try:
        return int(sysctl_text(name))
    except ValueError:
        return None


def sysctl_text(name: str) -> str:
    """Return a value of macOS's `sysctl`; empty if there is no such name."""
    command = ["/usr/sbin/sysctl", "-n", name]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse the kernel's list format ("0-3,8"); return the empty set for any other text."""
    cpus: set[int] = set()
    try:
        for part in text.strip().split(","):
            first, dash, last = part.partition("-")
            cpus.update(range(int(first), min(MAX_CPUS, int(last if dash else first) + 1)))
    except ValueError:
        return frozenset()
    return frozenset(cpus)


def _siblings(topology: Path, cpu: int) -> frozenset[int]:
    """Return the hardware threads of the core that `cpu` belongs to; `cpu` alone if the kernel does not list them."""
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second is the name before Linux 5.3
        cpus = parse_cpu_list(read_text(topology / name) or "")
        if cpu in cpus:
            return cpus
    return frozenset([cpu])


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quotas, in cores, of this process's control groups."""
    for folder in cgroup_folders("cpu", root):
        text = read_text(folder / "cpu.max")  # version 2: "max 100000" or "150000 100000"
        if text is None:
            text = f"{read_text(folder / 'cpu.cfs_quota_us')} {read_text(folder / 'cpu.cfs_period_us')}"
        try:
            quota, period = map(int, text.split())
        except ValueError:
            continue
        if quota > 0 and period > 0:  # version 1 writes -1 for "no limit"
            yield quota / period


# -- control groups ----------------------------------------------------------------------------------------------------


def cgroup_folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders of this process's control group and of all its parents, for one controller ("cpu", "memory").

    Both versions are searched because one machine may run both; each caller looks for the file names of its version.
    Some folders may not exist. Nothing is yielded if there are no control groups.
    """
    mounts = list(_cgroup_mounts(root))
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        unified = hierarchy == "0" and not controllers
        if not unified and controller not in controllers.split(","):
            continue
        for fstype, options, mounted_group, mount_point in mounts:
            if (fstype == "cgroup2") if unified else (fstype == "cgroup" and controller in options):
                top = root / mount_point.relative_to("/")
                folder = top / _relative_group(PurePosixPath(group), mounted_group)
                yield folder
                yield from (parent for parent in folder.parents if parent.is_relative_to(top))


def read_text(path: Path) -> str | None:
    """Return a file's text; None if it is absent or unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _cgroup_mounts(root: Path) -> Iterator[tuple[str, list[str], PurePosixPath, PurePosixPath]]:
    """Yield the file system, its options, the mounted group and the mount point of each control group hierarchy."""
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        mount, separator, filesystem = line.partition(" - ")
        before, after = mount.split(), filesystem.split()
        if separator and len(before) >= 5 and len(after) >= 3 and after[0] in ("cgroup", "cgroup2"):
            mounted_group, mount_point = (PurePosixPath(_unescape(before[i])) for i in (3, 4))
            if mount_point.is_absolute():
                yield after[0], after[2].split(","), mounted_group, mount_point


def _relative_group(group: PurePosixPath, mounted_group: PurePosixPath) -> PurePosixPath:
    """Return the path of a group below the mounted group, or "." if it is not below it.

    A container often mounts its own group: `group` is then equal to the mounted group, or outside of it.
    """
    if ".." in group.parts or not group.is_relative_to(mounted_group):
        return PurePosixPath(".")
    return group.relative_to(mounted_group)


def _unescape(path: str) -> str:
    """Replace the kernel's octal escapes of blanks in a path."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


# -- other processes ---------------------------------------------------------------------------------------------------


class OtherLoad:
    """How many cores other processes keep busy, among those that this process may use: since the last question."""

    def __init__(self, root: Path = Path("/"), now: Callable[[], float] = time.monotonic) -> None:
        self._stat = root / "proc/stat"
        self._now = now
        self._allowed = frozenset(os.sched_getaffinity(0)) if sys.platform != "darwin" else frozenset[int]()
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")
        self._last = self._read()

    @property
    def num_cores(self) -> int:
        return len(self._allowed)

    def cores(self) -> float | None:
        """Return the mean since the last call, and begin anew; None where the kernel does not say."""
        last, self._last = self._last, self._read()
        if last is None or self._last is None or self._last.at <= last.at:
            return None
        busy = self._last.busy_s - last.busy_s - (self._last.own_s - last.own_s)
        return max(0.0, busy / (self._last.at - last.at))

    def runnable(self) -> float:
        """Return how many threads want a core at this moment, besides the calling one; infinity: it is not known."""
        for line in reversed((read_text(self._stat) or "").splitlines()):
            name, _, count = line.partition(" ")
            if name == "procs_running" and count.isdecimal():
                return max(int(count) - 1, 0)
        return math.inf

    def _read(self) -> _Used | None:
        busy = 0
        for line in (read_text(self._stat) or "").splitlines():
            name, _, counts = line.partition(" ")
            if not name.startswith("cpu"):
                break  # the rest of the file is long
            if name[3:].isdecimal() and int(name[3:]) in self._allowed:
                try:
                    user, nice, system, _idle, _io_wait, irq, soft_irq, stolen = map(int, counts.split()[:8])
                except ValueError:  # not Linux's own file
                    return None
                busy += user + nice + system + irq + soft_irq + stolen
        return _Used(self._now(), busy * self._tick_s, time.process_time()) if busy else None


class _Used(NamedTuple):
    """Times of the processor at a moment, in seconds."""

    at: float
    busy_s: float  # of all processes
    own_s: float
