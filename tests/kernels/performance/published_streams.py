"""Published bandwidths of a stream with few bytes in flight: gpu-stream of Erlangen's gpu-benches, column "read".

Owns the figures. The kernel there is CUDA C++: each thread reads one number of 8 bytes, two CTAs fit a multiprocessor.
Ours is the same in Triton. A CTA of 32 threads has 256 bytes on the way, one of 1,024 threads 8 KB.
"""

from __future__ import annotations

from functools import partial

import torch

from tests.kernels.performance import published_builds as builds
from tests.kernels.performance.launch import Launch
from tests.kernels.performance.published import Point
from tests.kernels.performance.published_gpus import GPUS

SOURCE = "https://github.com/te42kyfo/gpu-benches/blob/master/gpu-stream"
NUMBERS = 128 * 1024 * 1024
RATES = {  # GB/s by threads of a CTA
    ("H200", "h200.txt"): {32: 123, 64: 244, 128: 485, 256: 935, 512: 1707, 1024: 2756},
    ("A100 40GB", "a100_40.txt"): {32: 81, 64: 158, 128: 304, 256: 579, 512: 1042, 1024: 1490},
    ("L40", "l40.txt"): {32: 163, 64: 320, 128: 615, 256: 844},
}


def stream(capability: int, threads: int) -> list[Launch]:
    """Read all numbers, one a thread."""
    args: dict[str, object] = {name: torch.empty(NUMBERS, dtype=torch.float64) for name in ("x", "out")}
    kernel, warps = builds.plain("stream_read"), threads // 32
    launch = builds.launch(kernel, capability, (NUMBERS // threads,), args, {"BLOCK": threads}, num_warps=warps)
    return [launch._replace(resident=2)]


def points() -> list[Point]:
    """Return the points."""
    return [
        Point(
            f"stream of 8 bytes a thread, 2 x {threads} threads", gpu, 8 * NUMBERS / rate / 1e3, f"{SOURCE}/{file}",
            partial(stream, GPUS[gpu].capability, threads), "loop", f"{rate} GB/s", 8 * NUMBERS,
        )
        for (gpu, file), rates in RATES.items()
        for threads, rate in rates.items()
    ]  # fmt: skip
