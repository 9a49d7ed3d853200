"""Published timings of Triton kernels, for comparing the performance model's predictions with.

Owns what such a point is and the list of all points. The figures are other
people's measurements: each has its source. Nothing here was measured by this project.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.kernels.performance.launch import Launch

Build = Callable[[], list[Launch]]


class Point(NamedTuple):
    """A published time of one call, with the launches that the call makes.

    How it was measured (`timing`) says what the figure has besides the kernel:
    "events" is Triton's do_bench: a launch between two events, about 4.5 us even for an empty kernel on an H100 and 5
    to 7 us for a short one on other GPUs. Before it the L2 cache is overwritten, so it is full of lines that must be
    written to DRAM before others take their place: what a kernel writes costs bandwidth even where it would fit.
    "profiler" is a kernel's own duration, at the base clock unless `clock_ghz` says otherwise.
    "graph" is one call of many in a CUDA graph, "replay" a graph of one call, launched again and again (about 4 us even
    when empty), "loop" calls in a row by the host's clock.
    """

    name: str
    gpu: str
    published_us: float
    source: str  # an address
    build: Build
    timing: str
    printed: str  # the figure as the source has it; where it is not in us, published_us is derived from it
    bytes: float  # that the call cannot do without: its operands and results once; 0: they may stay in the L2 cache
    operations: float = 0  # of matrix products: two for each multiplication with an addition
    kind: str = "half"  # which of the GPU's peaks holds for them
    note: str = ""  # what is uncertain
    clock_ghz: float | None = None  # of the multiprocessors, where the source has it or its method sets it
    others: tuple[Build, ...] = ()  # the source's tuner chose among `build` and these: the fastest counts


def points() -> list[Point]:
    """Return all points."""
    from tests.kernels.performance import published_products, published_quantized, published_rows, published_streams

    return [
        *published_streams.points(),
        *published_rows.points(),
        *published_products.points(),
        *published_quantized.points(),
    ]
