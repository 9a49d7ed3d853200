"""How fast this machine reads its memory: what decoding one token after the other is limited by.

Owns the measurement, and its file in the cache folder. Knows nothing of models.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from edgelm.executors.kept import keep_json

MEASURED_BYTES = 128 * 2**20  # larger than the caches, and allocated in a moment
PASSES = 4
PARTS = 8  # for each thread, so that one that is held up does not hold up all
LARGEST_FILE_BYTES = 4096
REASONABLE = (1e8, 1e13)  # bytes a second


def read_bandwidth(path: Path, threads: int, measure: Callable[[int], float] | None = None) -> float:
    """Return the bytes a second that `threads` threads read from memory, as kept in `path` or measured now.

    Takes about 0.4 s at first. A file that cannot be written means measuring again.
    """
    known = _read(path)
    if str(threads) in known:
        return known[str(threads)]
    measured = (measure or measure_bandwidth)(threads)
    keep_json(path, known | {str(threads): measured})
    return measured


def measure_bandwidth(threads: int, nbytes: int = MEASURED_BYTES) -> float:
    """Read an array that no cache holds, some times; return the bytes a second of the fastest pass."""
    array = np.ones(nbytes // 4, np.uint32)
    parts = np.array_split(array, threads * PARTS)
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(PASSES):
            start = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, parts))  # numpy lets other threads run meanwhile
            times.append(time.perf_counter() - start)
    return array.nbytes / min(times)


def _read(path: Path) -> dict[str, float]:
    """Return what was kept for each number of threads; nothing where the file is not one that we wrote."""
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            return {}
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(said, dict):
        return {}
    low, high = REASONABLE
    return {key: float(speed) for key, speed in said.items() if isinstance(speed, int | float) and low < speed < high}
