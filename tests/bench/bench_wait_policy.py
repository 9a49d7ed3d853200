"""How OpenMP's threads should wait: the time of a token under each policy, quiet and beside busy processes.

    python tests/bench/bench_wait_policy.py [--rounds 4]

Each number is a process of its own, since OpenMP reads its policy once. Policies alternate. "others" is how many
cores were busy before each measurement, by `/proc/stat`: where it differs from "busy", foreign jobs shared the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from gguf import GGMLQuantizationType as Quant

from edgelm.executors.cores import usable_cores
from edgelm.executors.machine import CANARY_COMMAND, POLICIES, WaitPolicy, time_token
from edgelm.executors.random_gguf import write_random_gguf


class Shape(NamedTuple):
    """A model to time; its matrices have the sizes of a real one's."""

    name: str
    layers: int
    width: int
    ffn: int
    kv_heads: int


SHAPES = (
    Shape("135M, all layers", 30, 512, 1536, 4),
    Shape("1B, one layer (what the first use measures)", 1, 2048, 8192, 8),
    Shape("1B, eight layers", 8, 2048, 8192, 8),
)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep that many cores busy. The loops end with this process, however it ends."""
    loop = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(1000))"
    processes = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    cores = usable_cores()
    print(f"{cores.physical} threads; median ms a token (spread: largest less smallest, of the median)\n")
    print(f"| model | busy | others | {' | '.join(POLICIES)} |\n|---|---|---|{'---|' * len(POLICIES)}")
    for shape in SHAPES:
        with tempfile.TemporaryDirectory(prefix="edgelm-bench-") as folder:
            write_random_gguf(
                Path(folder, "speed.gguf"),
                layers=shape.layers,
                width=shape.width,
                ffn=shape.ffn,
                kv_heads=shape.kv_heads,
                quants=[Quant.Q4_0],
            )
            for busy in (0, 1, 2):
                times, others = measure(folder, cores.physical, busy, rounds)
                cells = " | ".join(map(cell, times.values()))
                print(f"| {shape.name} | {busy} | {statistics.mean(others):.1f} | {cells} |", flush=True)


def measure(folder: str, threads: int, busy: int, rounds: int) -> tuple[dict[WaitPolicy, list[float]], list[float]]:
    """Time each policy once a round, in alternating order; also how many cores were busy before each."""
    times: dict[WaitPolicy, list[float]] = {policy: [] for policy in POLICIES}
    others: list[float] = []
    arguments = [folder, "--threads", str(threads)]
    order = list(POLICIES)
    with busy_processes(busy):
        for _ in range(rounds):
            for policy in order:
                others.append(busy_cores(0.1))
                times[policy].append(time_token([*CANARY_COMMAND], arguments, policy))
            order.reverse()
    return times, others


def busy_cores(seconds: float) -> float:
    """Return how many cores of the machine are busy just now."""

    def busy_ticks() -> int:
        user, nice, system = map(int, Path("/proc/stat").read_text(encoding="ascii").split()[1:4])
        return user + nice + system

    before, start = busy_ticks(), time.perf_counter()
    time.sleep(seconds)
    return (busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.perf_counter() - start)


def cell(times: list[float]) -> str:
    """Show a median and its spread."""
    median = statistics.median(times)
    return f"{median:.2f} ({100 * (max(times) - min(times)) / median:.0f} %)"


if __name__ == "__main__":
    main()
