"""The time of a call on a GPU when none of its inputs is in the cache and Python is not waited for.

Owns the clock. Knows nothing of ops. Calls are captured into a CUDA graph, as models run them, and take inputs in turn,
of which there should be more than the cache can hold; CUDA events time replays of the graph.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")

COLD_FACTOR = 4  # all inputs together are this many times as large as the L2 cache
MIN_CALLS = 20  # of a graph, so that its own launch is a small part of its time
MIN_US = 20_000  # of all replays together
MIN_REPLAYS = 11


def time_us(run: Callable[[T], object], inputs: Sequence[T], min_us: float = MIN_US) -> float:
    """Return the median time of a call in microseconds, over replays that take `min_us` together, or longer."""
    calls = len(inputs) * math.ceil(MIN_CALLS / len(inputs))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for one in inputs[:3]:
            run(one)  # compiles, and initializes libraries
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in range(calls):
            run(inputs[call % len(inputs)])
    times = [_replay_us(graph) for _ in range(3)][1:]
    replays = max(MIN_REPLAYS, math.ceil(min_us / max(times[-1], 1.0)))
    return statistics.median(_replay_us(graph) for _ in range(replays)) / calls


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3
