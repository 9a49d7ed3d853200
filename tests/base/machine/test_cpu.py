"""Usable cores: affinity, siblings, fast cores, quotas."""

import math
import os
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgelm.base.machine import cpu as module
from edgelm.base.machine.cpu import Cores, cgroup_folders, linux_cores, mac_cores, parse_cpu_list, usable_cores

UNIFIED = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
VERSION_1 = "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def topology(root: Path, *cores: str, name: str = "core_cpus_list") -> None:
    """Write a machine whose cores have the given hardware threads."""
    for siblings in cores:
        for cpu in parse_cpu_list(siblings):
            write(root / f"sys/devices/system/cpu/cpu{cpu}/topology/{name}", siblings + "\n")


def groups(root: Path, own: str, mounts: str, files: dict[str, str]) -> None:
    """Write this process's groups, their mounts, and files below "/sys/fs/cgroup"."""
    write(root / "proc/self/cgroup", own)
    write(root / "proc/self/mountinfo", "23 1 8:1 / / rw - ext4 /dev/sda rw\n" + mounts)
    for name, text in files.items():
        write(root / "sys/fs/cgroup" / name, text)


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
@pytest.mark.parametrize(
    ("allowed", "expected"),
    [({0, 1, 2, 3, 4, 5, 6, 7}, Cores(4, 8)), ({0, 4}, Cores(1, 2)), ({0, 1, 2}, Cores(3, 3)), ({6}, Cores(1, 1))],
)
def test_siblings_count_once(tmp_path: Path, name: str, allowed: set[int], expected: Cores) -> None:
    topology(tmp_path, "0,4", "1,5", "2,6", "3,7", name=name)
    assert linux_cores(allowed, tmp_path) == expected


def test_without_topology_every_processor_counts(tmp_path: Path) -> None:
    assert linux_cores({3, 5, 9}, tmp_path) == Cores(3, 3)


def test_fast_cores_are_preferred_where_we_may_use_them(tmp_path: Path) -> None:
    topology(tmp_path, "0-1", "2-3", "4", "5", "6", "7")
    write(tmp_path / "sys/devices/cpu_core/cpus", "0-3\n")
    assert linux_cores(set(range(8)), tmp_path) == Cores(2, 8)
    assert linux_cores({3, 5}, tmp_path) == Cores(1, 2)
    assert linux_cores({4, 5, 6}, tmp_path) == Cores(3, 3)


@pytest.mark.parametrize(
    ("capacities", "physical"),
    [
        ([414] * 4 + [1024] * 4, 4),  # RK3588
        ([405] * 4 + [870] * 3 + [1024], 4),  # three kinds: the middle one is fast
        ([1024] * 8, 8),
        (["?"] * 8, 8),
        ([1024, "", "", "", 300, "", "", ""], 7),
    ],
)
def test_slow_cores_of_arm_do_not_count(tmp_path: Path, capacities: list[object], physical: int) -> None:
    for cpu, capacity in enumerate(capacities):
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", f"{capacity}\n")
    assert linux_cores(set(range(8)), tmp_path) == Cores(physical, 8)
    assert linux_cores({0, 1}, tmp_path).physical == 2, "the slow ones, where no others are ours"


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [
        ("max 100000", Cores(8, 8)),
        ("300000 100000", Cores(3, 3)),
        ("150000 100000", Cores(1, 1)),
        ("290000 100000", Cores(2, 2)),
        ("1000 100000", Cores(1, 1)),
        ("1600000 100000", Cores(8, 8)),
        ("", Cores(8, 8)),
        ("nonsense", Cores(8, 8)),
    ],
)
def test_quota_of_version_2_is_rounded_down(tmp_path: Path, cpu_max: str, expected: Cores) -> None:
    groups(tmp_path, "0::/app\n", UNIFIED, {"app/cpu.max": cpu_max})
    assert linux_cores(set(range(8)), tmp_path) == expected


def test_the_tightest_parent_decides(tmp_path: Path) -> None:
    files = {"a/cpu.max": "200000 100000", "a/b/cpu.max": "500000 100000", "a/b/c/cpu.max": "max 100000"}
    groups(tmp_path, "0::/a/b/c\n", UNIFIED, files)
    assert linux_cores(set(range(8)), tmp_path) == Cores(2, 2)


@pytest.mark.parametrize(("quota", "expected"), [("-1", Cores(8, 8)), ("250000", Cores(5, 5))])
def test_quota_of_version_1(tmp_path: Path, quota: str, expected: Cores) -> None:
    files = {"cpu,cpuacct/x/cpu.cfs_quota_us": quota, "cpu,cpuacct/x/cpu.cfs_period_us": "50000"}
    groups(tmp_path, "4:cpu,cpuacct:/x\n2:memory:/y\n0::/\n", VERSION_1, files)
    assert linux_cores(set(range(8)), tmp_path) == expected


def test_a_container_sees_its_own_group_mounted_as_the_top(tmp_path: Path) -> None:
    mount = "30 23 0:26 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup rw\n"
    for own in ("/docker/abc", "/docker/abc/", "/../outside", "/elsewhere"):
        groups(tmp_path, f"0::{own}\n", mount, {"cpu.max": "200000 100000"})
        assert linux_cores(set(range(8)), tmp_path) == Cores(2, 2), own
    groups(tmp_path, "0::/docker/abc/inner\n", mount, {"inner/cpu.max": "100000 100000"})
    assert linux_cores(set(range(8)), tmp_path) == Cores(1, 1)


def test_a_group_outside_of_the_mount_is_not_looked_for(tmp_path: Path) -> None:
    groups(tmp_path, "0::/../outside\n", UNIFIED, {"cpu.max": "300000 100000", "../outside/cpu.max": "100000 100000"})
    assert linux_cores(set(range(8)), tmp_path) == Cores(3, 3)


def test_escaped_mount_points_and_other_controllers(tmp_path: Path) -> None:
    groups(tmp_path, "7:cpuset:/s\n3:cpu:/c\n", "3 2 0:3 / /sys/my\\040groups rw - cgroup cgroup rw,cpu\n", {})
    assert list(cgroup_folders("cpu", tmp_path)) == [tmp_path / "sys/my groups/c", tmp_path / "sys/my groups"]
    assert list(cgroup_folders("memory", tmp_path)) == []


def test_random_bytes_in_every_file_do_no_harm(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    names = ("proc/self/cgroup", "proc/self/mountinfo", "sys/devices/cpu_core/cpus", "sys/fs/cgroup/cpu.max")
    for name in (*names, "sys/devices/system/cpu/cpu0/topology/core_cpus_list"):
        groups(tmp_path, "0::/\n", UNIFIED, {"cpu.max": "max 100000"})
        topology(tmp_path, "0", "1")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        for _ in range(50):
            (tmp_path / name).write_bytes(bytes(rng.choices(b"0123456789,-:/ \n\xff\\ax", k=rng.randrange(60))))
            physical, logical = linux_cores({0, 1}, tmp_path)
            assert 1 <= physical <= logical <= 2


@given(st.sets(st.integers(0, 300), min_size=1))
def test_cpu_lists_are_read_back(cpus: set[int]) -> None:
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    text = ",".join(f"{first}-{last}" if first != last else str(first) for first, last in ranges)
    assert parse_cpu_list(text + "\n") == cpus


@pytest.mark.parametrize("text", ["", "\n", "a", "1,,2", "0-", "-"])
def test_other_text_is_no_cpu_list(text: str) -> None:
    assert parse_cpu_list(text) == frozenset()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"hw.perflevel0.physicalcpu": 4, "hw.physicalcpu": 8, "hw.logicalcpu": 8}, Cores(4, 8)),
        ({"hw.physicalcpu": 6, "hw.logicalcpu": 12}, Cores(6, 12)),
        ({"hw.logicalcpu": 3}, Cores(3, 3)),
    ],
)
def test_macos_tells_performance_cores_apart(values: dict[str, int], expected: Cores) -> None:
    assert mac_cores(values.get) == expected


def test_this_machine() -> None:
    physical, logical = usable_cores()
    assert 1 <= physical <= logical <= (os.cpu_count() or 1)


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_affinity_of_this_process_is_respected() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores() == Cores(1, 1)
    finally:
        os.sched_setaffinity(0, before)


def test_the_load_by_others_is_that_of_our_cores_without_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc").mkdir()
    stat, own = tmp_path / "proc/stat", iter([0.0, 1.5, 1.5])
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {0, 2})
    monkeypatch.setattr(module.os, "sysconf", lambda _: 100)
    monkeypatch.setattr(module.time, "process_time", lambda: next(own))
    clock = iter([10.0, 12.0, 14.0])

    def write(*busy: int) -> None:
        lines = [f"cpu{index} {ticks} 0 0 999 5 0 0 0 0 0" for index, ticks in enumerate(busy)]
        stat.write_text("\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 1 2 3"]))

    write(1000, 1000, 1000)
    load = module.OtherLoad(tmp_path, lambda: next(clock))
    write(1200, 1200, 1150)  # 3.5 s on our two cores in 2 s, of which we used 1.5; core 1 is not ours
    assert load.cores() == pytest.approx(1.0)
    write(1200, 1400, 1150)
    assert load.cores() == 0


def test_a_system_without_the_file_has_no_load(tmp_path: Path) -> None:
    load = module.OtherLoad(tmp_path)
    assert (load.cores(), load.runnable()) == (None, math.inf)


@pytest.mark.parametrize(
    ("line", "others"), [("procs_running 3", 2), ("procs_running 1", 0), ("procs_running x", math.inf)]
)
def test_threads_that_want_a_core_now_are_counted_without_the_one_that_asks(
    tmp_path: Path, line: str, others: float
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(f"cpu  1 2 3 4 5 6 7 8\ncpu0 1 2 3 4 5 6 7 8\n{line}\nprocs_blocked 0\n")
    assert module.OtherLoad(tmp_path).runnable() == others


@pytest.mark.parametrize("columns", ["", "1 2 3 4", "a b c d e f g h"])
def test_a_system_that_writes_the_file_otherwise_has_no_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {0}, raising=False)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(f"cpu  1 2 3\n\ncpu0 {columns}\nintr 1\n")
    assert module.OtherLoad(tmp_path).cores() is None
