"""Measures the candidates of kernels, and keeps the fastest configurations in the file of a tuning table.

Owns the rule by which a candidate replaces the default, and the file's content. Knows nothing of models, of clocks and
of how a candidate is launched.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from edgelm.base.atomic import atomic_write
from edgelm.kernels.tuning import UNFINISHED, Config, Table, read_table

LEAST_GAIN = 0.02  # as a part of the default's time; more where two measurements of the default differ by more
MAX_UNFINISHED = 2  # measurements of a key that ended the process: then its default is kept

Times = tuple[float, ...]  # microseconds, by number of rows; infinity: it does not fit the GPU, or is wrong


def tune(table: Table, run: Callable[[], object], time_us: Callable[[Callable[[], object]], float]) -> None:
    """Measure each kernel that `run` launches and that has no measurement, and keep its fastest configuration.

    `time_us` returns the time of one call in microseconds, or infinity if the configuration does not fit the GPU.
    """
    assert not capturing(), "nothing is measured while a graph is captured"
    with table.recording() as launched:
        run()
    for (op, key), candidates in launched.items():
        if not table.is_measured(op, key, candidates):
            fastest = measure(table, op, key, candidates, lambda: (time_us(run),))
            if fastest is not None:
                table.set(op, key, fastest, stored=True)
    write(table)


def capturing() -> bool:
    """Return whether launches are being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def measure(
    table: Table, op: str, key: str, candidates: Sequence[Config], times_us: Callable[[], Times]
) -> Config | None:
    """Return the fastest candidate, perhaps the first one, the default; None if none fits the GPU.

    `times_us` measures the op with the configuration in the table. Afterwards the table has the default.
    """
    times = []
    try:
        for candidate in (*candidates, candidates[0]):
            table.set(op, key, candidate)
            times.append(times_us())
    finally:
        table.set(op, key, candidates[0])
    place = fastest_of(times[:-1], times[-1])
    return None if place is None else candidates[place]


def fastest_of(times: Sequence[Times], default_again: Times) -> int | None:
    """Return the place of the fastest candidate by the mean of its times relative to the default's, the first.

    One that replaces the default is faster by more than the noise, and with no number of rows slower by more than it.
    The noise is the difference between two measurements of the default, and at least LEAST_GAIN.
    """
    default = [min(pair) for pair in zip(times[0], default_again, strict=True)]
    if not all(map(math.isfinite, default)):
        sums = [sum(one) for one in times]
        return sums.index(min(sums)) if math.isfinite(min(sums)) else None
    noise = max(LEAST_GAIN, *(max(pair) / min(pair) - 1 for pair in zip(times[0], default_again, strict=True)))
    best, least = 0, 1 - noise
    for place, one in enumerate(times):
        ratios = [us / of_default for us, of_default in zip(one, default, strict=True)]
        mean = sum(ratios) / len(ratios)
        if place and mean < least and max(ratios) <= 1 + noise:
            best, least = place, mean
    return best


def begin(table: Table, op: str, key: str) -> None:
    """Note in the file that a key is being measured: a kernel that ends the process is not tried at every start."""
    _note(table, op, key, times_begun(table, op, key) + 1)
    write(table)


def settle(table: Table, op: str, key: str, config: Config) -> None:
    """Keep a configuration as the fastest."""
    table.set(op, key, config, stored=True)
    _note(table, op, key, 0)


def withdraw(table: Table, op: str, key: str) -> None:
    """Undo the note of `begin`: no kernel has failed."""
    _note(table, op, key, times_begun(table, op, key) - 1)


def times_begun(table: Table, op: str, key: str) -> int:
    """Return how often a measurement of a key was begun and neither settled nor withdrawn."""
    return table.stored.get(UNFINISHED, {}).get(f"{op} {key}", {}).get("times", 0)


def _note(table: Table, op: str, key: str, times: int) -> None:
    table.stored.setdefault(UNFINISHED, {})[f"{op} {key}"] = {"times": times}


def write(table: Table) -> None:
    """Replace the file by the table, merged with what other processes have written meanwhile."""
    if table.path is None:
        return
    for op, keys in read_table(table.path).items():
        table.stored[op] = keys | table.stored.get(op, {})
    with suppress(OSError):  # the next process measures again
        atomic_write(table.path, json.dumps(table.stored, indent=1, sort_keys=True).encode())
