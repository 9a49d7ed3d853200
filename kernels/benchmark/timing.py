"""How long a call takes on a GPU when nothing it reads is in the cache, and when nobody waits for Python.

Owns the clock. Knows nothing of ops. Calls are captured into a CUDA graph, as models run them, over as many copies of
the inputs as do not fit into the cache together; CUDA events time replays of the graph.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

from edgelm.kernels.bandwidth import BLOCK_LEN, read
from edgelm.kernels.benchmark import cloned, nbytes_of
from edgelm.kernels.target import target_of

COLD_FACTOR = 4  # all copies of the inputs are so many times as large as the second-level cache
MAX_COPIES = 256
MIN_CALLS = 20  # in a graph: its own launch is then a small part
MIN_US = 20_000  # that all replays take together
REPLAYS = 11  # at least; their median counts
PROBE_BYTES = 1 << 30


def copies_of(inputs: Any, device: torch.device) -> list[Any]:
    """Return the inputs and copies of them, more than the cache holds."""
    cold = COLD_FACTOR * target_of(device).l2_bytes
    count = min(max(math.ceil(cold / max(nbytes_of(inputs), 1)), 1), MAX_COPIES)
    return [inputs] + [cloned(inputs) for _ in range(count - 1)]


def time_us(run: Callable[[Any], object], copies: list[Any], min_calls: int = MIN_CALLS) -> float:
    """Return the median time of a call in microseconds; the calls take the copies in turn."""
    calls = len(copies) * math.ceil(min_calls / len(copies))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for inputs in copies[:3]:
            run(inputs)  # compiles, and lets libraries set themselves up
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in range(calls):
            run(copies[call % len(copies)])
    times = [_replay_us(graph) for _ in range(3)][1:]
    replays = max(REPLAYS, math.ceil(MIN_US / max(times[-1], 1.0)))
    return statistics.median(_replay_us(graph) for _ in range(replays)) / calls


def time_us_or_inf(run: Callable[[Any], object], copies: list[Any], min_calls: int = MIN_CALLS) -> float:
    """Return the time of a call, or infinity where it needs more of a GPU than there is."""
    from triton.runtime.errors import OutOfResources

    try:
        return time_us(run, copies, min_calls)
    except OutOfResources:
        return math.inf


def step_us_or_inf(run: Callable[[], object]) -> float:
    """Return the time of a call that reads far more than the cache holds, such as a step of a whole model."""
    return time_us_or_inf(lambda _: run(), [None], min_calls=1)


def read_gbps(device: torch.device) -> float:
    """Return how many gigabytes (1e9) a second the GPU reads when it does nothing else."""
    words = torch.randint(-(2**31), 2**31, (PROBE_BYTES // 4,), dtype=torch.int32, device=device)
    assert words.numel() % BLOCK_LEN == 0
    return nbytes_of(words) / time_us(lambda each: read(each, implementation="triton"), [words]) / 1e3


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3
