"""The memory bandwidth of this machine, which limits the decoding of a single sequence.

Owns the measurement and its file in the cache folder. Knows nothing of models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from edgelm.atomic import atomic_json, read_json

MEASURED_BYTES = 128 * 2**20  # larger than the caches, and allocated in a moment
NUM_PASSES = 4
PARTS_PER_THREAD = 8  # so that one delayed thread does not delay the pass
MAX_FILE_BYTES = 4096
PLAUSIBLE = (1e8, 1e13)  # bytes per second


def read_bandwidth(path: Path, threads: int, measure: Callable[[int], float] | None = None) -> float:
    """Return the bytes per second that `threads` threads read from memory: from the file at `path`, or measured now.

    A measurement takes about 0.4 s. If the file cannot be written, the next call measures again.
    """
    speeds = _read(path)
    if str(threads) not in speeds:
        speeds[str(threads)] = (measure or measure_bandwidth)(threads)
        atomic_json(path, speeds)
    return speeds[str(threads)]


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


def _read(path: Path) -> dict[str, float]:
    """Return the measured speeds by the number of threads; none if the file is not ours."""
    document = read_json(path, MAX_FILE_BYTES)
    if not isinstance(document, dict):
        return {}
    low, high = PLAUSIBLE
    return {
        threads: float(speed)
        for threads, speed in document.items()
        if isinstance(speed, int | float) and low < speed < high
    }
