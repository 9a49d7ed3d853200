"""Published timings of Triton kernels, for comparing the performance model's predictions with.

Owns what such a point is, the GPUs with their published limits, and the list of all points. The figures are other
people's measurements: each has its source. Nothing here was measured by this project.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.kernels.performance.launch import Launch

Build = Callable[[], list[Launch]]


class Gpu(NamedTuple):
    """A GPU's compute capability and what its vendor publishes as its limits (dense tensor products, boost clock)."""

    capability: int
    bandwidth: float  # GB/s
    limits: dict[str, float]  # 1e12 operations a second of tensor products: "half" sums in fp32, "half sum" in fp16


GPUS = {
    "A100 80GB": Gpu(80, 2039, {"half": 312, "tf32": 156, "fp32": 19.5}),
    "A100 80GB PCIe": Gpu(80, 1935, {"half": 312, "tf32": 156, "fp32": 19.5}),
    "A10G": Gpu(86, 600, {"half": 70, "tf32": 35, "fp32": 35}),
    "RTX 3090": Gpu(86, 936, {"half": 71, "half sum": 142, "tf32": 35.6, "fp32": 35.6}),
    "RTX A4000": Gpu(86, 448, {"half": 76.7, "tf32": 38.3, "fp32": 19.2}),
    "RTX 4090": Gpu(89, 1008, {"half": 165, "half sum": 330, "tf32": 82.6, "fp32": 82.6}),
    "RTX 4060": Gpu(89, 272, {"half": 34, "half sum": 68, "fp32": 16.6}),  # at the 2.7 GHz of the measurements
    "L4": Gpu(89, 300, {"half": 121, "int8": 242, "fp32": 30.3}),
    "H100 SXM": Gpu(90, 3350, {"half": 989, "tf32": 495, "fp8": 1979, "fp32": 67}),
    "H100 PCIe": Gpu(90, 2039, {"half": 756, "fp8": 1513, "fp32": 51}),
    "H200": Gpu(90, 4800, {"half": 989, "fp8": 1979, "fp32": 67}),
    "RTX 5090": Gpu(120, 1792, {"half": 210, "half sum": 419, "fp32": 105}),
}


class Point(NamedTuple):
    """A published time of one call, with the launches that the call makes.

    How it was measured (`timing`) says what the figure has besides the kernel: "events" is Triton's do_bench (a launch
    between two events after the L2 cache was flushed: about 4.5 us even for an empty kernel), "profiler" a kernel's own
    duration at the base clock, "graph" one call of many in a CUDA graph, "replay" a graph of one call that is launched
    again and again (about 4 us even when empty), "loop" calls in a row by the host's clock.
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
    limit: str = "half"  # which of the GPU's limits holds for them
    note: str = ""  # what is uncertain
    others: tuple[Build, ...] = ()  # the source's tuner chose among `build` and these: the fastest counts


def points() -> list[Point]:
    """Return all points."""
    from tests.kernels.performance import published_products, published_quantized, published_rows

    return [*published_rows.points(), *published_products.points(), *published_quantized.points()]
