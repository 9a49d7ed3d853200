"""The time of a call on a GPU when none of its inputs is in the cache and Python is not waited for.

Owns the clock. Knows nothing of ops. Calls are captured into a CUDA graph, as models run them, over so many copies of
the inputs that the cache cannot hold them all; CUDA events time replays of the graph.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

from edgelm.kernels.gpu_target import target_of
from tests.kernels.bandwidth import BLOCK_LEN, read
from tests.kernels.benchmark import cloned, nbytes_of

COLD_FACTOR = 4  # all copies of the inputs together are this many times as large as the L2 cache
MAX_COPIES = 256
MIN_CALLS = 20  # of a graph, so that its own launch is a small part of its time
MIN_US = 20_000  # of all replays together
MIN_REPLAYS = 11
PROBE_BYTES = 1 << 30


def copies_of(inputs: Any, device: torch.device) -> list[Any]:
    """Return the inputs and copies of them, more than the cache can hold."""
    cold = COLD_FACTOR * target_of(device).l2_bytes
    count = min(max(math.ceil(cold / max(nbytes_of(inputs), 1)), 1), MAX_COPIES)
    return [inputs] + [cloned(inputs) for _ in range(count - 1)]


def time_us(run: Callable[[Any], object], copies: list[Any]) -> float:
    """Return the median time of a call in microseconds; the calls take the copies in turn."""
    calls = len(copies) * math.ceil(MIN_CALLS / len(copies))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for inputs in copies[:3]:
            run(inputs)  # compiles, and initializes libraries
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in range(calls):
            run(copies[call % len(copies)])
    times = [_replay_us(graph) for _ in range(3)][1:]
    replays = max(MIN_REPLAYS, math.ceil(MIN_US / max(times[-1], 1.0)))
    return statistics.median(_replay_us(graph) for _ in range(replays)) / calls


def time_us_or_inf(run: Callable[[Any], object], copies: list[Any]) -> float:
    """Return the time of a call, or infinity if it needs more of a GPU than there is."""
    from triton.runtime.errors import OutOfResources

    try:
        return time_us(run, copies)
    except OutOfResources:
        return math.inf


def read_gbps(device: torch.device) -> float:
    """Return how many gigabytes (1e9 bytes) a second the GPU reads when it does nothing else."""
    words = torch.randint(-(2**31), 2**31, (PROBE_BYTES // 4,), dtype=torch.int32, device=device)
    assert words.numel() % BLOCK_LEN == 0
    return nbytes_of(words) / time_us(lambda inputs: read(inputs, implementation="triton"), [words]) / 1e3


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3
