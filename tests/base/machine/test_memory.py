"""Available memory is that of the machine, within the limits of its control groups."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from edgelm.base.machine.memory import ARC, available_memory_bytes, linux_memory_bytes, mac_memory_bytes, process_memory

GIB = 2**30
MEMINFO = (
    "MemTotal:  33554432 kB\nMemFree:  1048576 kB\nMemAvailable:  8388608 kB\nCached:  4194304 kB\nHugePages:  0\n"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8 GiB available, no control groups."""
    write(tmp_path / "proc/meminfo", MEMINFO)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def version_2(root: Path, group: str, **files: int | str) -> None:
    write(root / "proc/self/cgroup", "0::/outer/inner\n")
    write(root / "proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    for name, value in files.items():
        write(root / "sys/fs/cgroup" / group / f"memory.{name}", f"{value}\n")


def test_the_machine_alone(root: Path) -> None:
    assert linux_memory_bytes(root) == 8 * GIB


def test_the_cache_of_zfs_counts_as_far_as_it_shrinks(root: Path) -> None:
    lines = ["13 1 0x01 123 33456 1 2", "name type data", f"size 4 {41 * GIB}", f"c_min 4 {1 * GIB}", "c_max 4 9"]
    write(root / ARC, "\n".join(lines) + "\n")
    assert linux_memory_bytes(root) == (8 + 36) * GIB
    write(root / ARC, f"size 4 {GIB}\nc_min 4 {2 * GIB}\n")
    assert linux_memory_bytes(root) == 8 * GIB


def test_an_old_kernel_without_an_estimate(root: Path) -> None:
    write(root / "proc/meminfo", MEMINFO.replace("MemAvailable", "MemSomething"))
    assert linux_memory_bytes(root) == 5 * GIB


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"max": 4 * GIB, "high": "max", "current": 1 * GIB}, 3 * GIB),
        ({"max": 4 * GIB, "high": 2 * GIB, "current": 1 * GIB}, 1 * GIB),
        ({"max": 4 * GIB, "current": 3 * GIB, "stat": f"anon 5\ninactive_file {2 * GIB}\nactive_file 7"}, 3 * GIB + 7),
        ({"max": 4 * GIB, "current": 3 * GIB, "stat": f"inactive_file 5\nactive_file {2 * GIB}"}, 3 * GIB + 5),
        ({"max": 4 * GIB, "current": 1 * GIB, "stat": f"inactive_file {2 * GIB}"}, 4 * GIB),
        ({"max": "max", "high": "max", "current": 1 * GIB}, 8 * GIB),
        ({"max": 64 * GIB, "current": 1 * GIB}, 8 * GIB),
        ({"max": 1 * GIB, "current": 2 * GIB}, 0),
        ({"max": 0, "current": 0}, 0),
        ({"max": 1 * GIB}, 8 * GIB),
    ],
)
def test_version_2(root: Path, files: dict[str, int | str], expected: int) -> None:
    version_2(root, "outer/inner", **files)
    assert linux_memory_bytes(root) == expected


def test_a_parent_that_is_full_counts(root: Path) -> None:
    version_2(root, "outer/inner", max=6 * GIB, current=1 * GIB)
    version_2(root, "outer", max=6 * GIB, current=4 * GIB)
    assert linux_memory_bytes(root) == 2 * GIB


@pytest.mark.parametrize(("limit", "expected"), [(4 * GIB, 3 * GIB), (9223372036854771712, 8 * GIB)])
def test_version_1(root: Path, limit: int, expected: int) -> None:
    write(root / "proc/self/cgroup", "8:memory:/app\n5:cpu:/\n")
    write(root / "proc/self/mountinfo", "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n")
    folder = root / "sys/fs/cgroup/memory/app"
    write(folder / "memory.limit_in_bytes", f"{limit}\n")
    write(folder / "memory.usage_in_bytes", f"{2 * GIB}\n")
    write(folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB}\n")
    assert linux_memory_bytes(root) == expected


def test_random_bytes_in_the_files_do_no_harm(root: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for name in ("proc/meminfo", "sys/fs/cgroup/outer/memory.max", "sys/fs/cgroup/outer/memory.stat"):
        for _ in range(50):
            version_2(root, "outer", max=4 * GIB, current=1 * GIB, stat="inactive_file 3")
            (root / name).write_bytes(bytes(rng.choices(b"0123456789: \nmax\xff-", k=rng.randrange(60))))
            assert linux_memory_bytes(root) >= 0
        write(root / "proc/meminfo", MEMINFO)


def test_without_any_counter_the_installed_memory_is_taken(tmp_path: Path) -> None:
    assert linux_memory_bytes(tmp_path) > 0


def test_macos_counts_free_and_inactive_pages() -> None:
    output = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                               10.\nPages active:                            500.\n"
        "Pages inactive:                           20.\nPages speculative:                         3.\n"
        'Pages wired down:                        900.\n"Translation faults":                        7.\n'
    )
    assert mac_memory_bytes(output) == 33 * 16384
    assert mac_memory_bytes("") == 0


def test_this_machine() -> None:
    assert available_memory_bytes() > 2**24


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_memory_of_a_process_and_of_those_that_it_started() -> None:
    size = 40 * 2**20
    child = f"import sys; data = bytearray(b'x') * {size}; print(flush=True); sys.stdin.read()"
    parent = (
        "import subprocess, sys; data = bytearray(b'x') * "
        f"{size}; child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE, "
        "stdout=subprocess.PIPE); child.stdout.readline(); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        memory = process_memory(process.pid)
        assert memory is not None
        assert 2 * size < memory.held < memory.resident < 2 * size + 60 * 2**20
        process.communicate(timeout=30)
    assert process_memory(process.pid) is None
