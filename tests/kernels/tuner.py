"""Measures the candidates of kernels, and keeps the fastest configurations in the file of a tuning table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from edgelm.atomic import atomic_write
from edgelm.kernels.tuning import Config, Table, read_table


def tune(table: Table, run: Callable[[], object], time_us: Callable[[Callable[[], object]], float]) -> None:
    """Measure each kernel that `run` launches and that has no measurement, and keep its fastest configuration.

    `time_us` returns the time of one call in microseconds, or infinity if the configuration does not fit the GPU.
    """
    assert not capturing(), "nothing is measured while a graph is captured"
    with table.recording() as launched:
        run()
    for (op, key), candidates in launched.items():
        if table.best(op, key, lambda candidates=candidates: candidates)._asdict() != table.stored.get(op, {}).get(key):
            _measure(table, op, key, candidates, lambda: time_us(run))
    _write(table)


def capturing() -> bool:
    """Return whether launches are being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _measure(table: Table, op: str, key: str, candidates: Sequence[Config], time_us: Callable[[], float]) -> None:
    times = []
    try:
        for candidate in candidates:
            table.set(op, key, candidate)
            times.append(time_us())
    finally:
        table.set(op, key, candidates[0])
    fastest = min(times)
    if math.isfinite(fastest):
        table.set(op, key, candidates[times.index(fastest)], stored=True)


def _write(table: Table) -> None:
    """Replace the file by the table, merged with what other processes have written meanwhile."""
    if table.path is None:
        return
    for op, keys in read_table(table.path).items():
        table.stored[op] = keys | table.stored.get(op, {})
    with suppress(OSError):  # the next process measures again
        atomic_write(table.path, json.dumps(table.stored, indent=1, sort_keys=True).encode())
