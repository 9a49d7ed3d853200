"""The memory bandwidth of this machine, which limits the decoding of a single sequence.

Owns the measurement and its file in the cache folder. Knows nothing of models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgelm.base.atomic import atomic_json, read_json
from edgelm.base.machine.cpu import OtherLoad

MEASURED_BYTES = 128 * 2**20  # larger than the caches, and allocated in a moment
NUM_PASSES = 4
PARTS_PER_THREAD = 8  # so that one delayed thread does not delay the pass
MAX_FILE_BYTES = 4096
PLAUSIBLE = (1e8, 1e13)  # bytes per second
OTHERS = "others"  # in the file: the cores that others kept busy, by the number of threads


class Bandwidth(NamedTuple):
    """A memory bandwidth, and how busy the machine was when it was measured."""

    bytes_per_s: float
    others: float | None = None  # cores that other processes kept busy meanwhile; None: not known


def read_bandwidth(path: Path, threads: int, measure: Callable[[int], float] | None = None) -> Bandwidth:
    """Return the bandwidth that `threads` threads have: from the file at `path`, or measured now.

    A measurement takes about 0.4 s. If the file cannot be written, the next call measures again.
    """
    speeds, others = _read(path)
    if str(threads) not in speeds:
        load = OtherLoad()
        speeds[str(threads)] = (measure or measure_bandwidth)(threads)
        others[str(threads)] = load.cores()
        atomic_json(path, speeds | {OTHERS: others})
    return Bandwidth(speeds[str(threads)], others.get(str(threads)))


def measure_bandwidth(threads: int, nbytes: int = MEASURED_BYTES) -> float:
    """Read an array that no cache can hold several times; return the bytes per second of the fastest pass."""
    array = np.ones(nbytes // 4, np.uint32)
    parts = np.array_split(array, threads * PARTS_PER_THREAD)
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(NUM_PASSES):
            start = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, parts))  # numpy releases the GIL
            times.append(time.perf_counter() - start)
    return array.nbytes / min(times)


def _read(path: Path) -> tuple[dict[str, float], dict[str, float | None]]:
    """Return the measured speeds and the load by others, by the number of threads; none if the file is not ours."""
    document = read_json(path, MAX_FILE_BYTES)
    if not isinstance(document, dict):
        return {}, {}
    low, high = PLAUSIBLE
    speeds = {
        threads: float(speed)
        for threads, speed in document.items()
        if isinstance(speed, int | float) and low < speed < high
    }
    others = document.get(OTHERS)  # a file of 0.5 has none
    kept = others.items() if isinstance(others, dict) else ()
    return speeds, {threads: float(load) for threads, load in kept if isinstance(load, int | float)}
