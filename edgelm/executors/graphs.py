"""CUDA graphs of a model's forward pass, for each number of tokens up to 16: a step without a gap between kernels.

Each number has two: for steps that decode a token of each sequence, and for those that verify several of one.

Owns capture and replay. A graph reads a step from the step buffers and writes logits into memory of its own: nothing
is allocated and nothing waits. Knows nothing of what is in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from edgelm.core import Step
from edgelm.executors.batch import Bucket, StepBuffers, StepTensors

SIZES = 1, 2, 4, 8, 16  # tokens of a step
WARM_UPS = 2  # runs before a capture: kernels are compiled and libraries start there

T = TypeVar("T")
Forward = Callable[[StepTensors], tuple[Tensor, Tensor]]  # hidden [rows, width] and logits [rows, vocabulary]


class Captured(NamedTuple):
    """One graph, and the memory that it writes to."""

    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    logits: Tensor


class Graphs:
    """The graphs of one executor, whose steps have at most so many sequences and tokens."""

    def __init__(self, max_sequences: int, max_tokens: int) -> None:
        sizes = [size for size in SIZES if size <= max_tokens]
        self._buckets: list[Bucket] = []  # the smallest first, of two of one size the one that computes less
        for size in sizes:
            if size < 2 * max_sequences:
                self._buckets.append(Bucket(size, min(size, max_sequences), size, 1))
            if size > 1:
                self._buckets.append(Bucket(size, min(size, max_sequences), size, size))
        self._captured: dict[Bucket, Captured] = {}
        self._pool: Any = None

    def bucket(self, size: Bucket) -> Bucket | None:
        """Return the smallest bucket that holds a step of that size; None: it is run without a graph."""
        return next((each for each in self._captured_smallest_first if each.holds(size)), None)

    def capture(self, forward: Forward, buffers: StepBuffers) -> None:
        """Capture all sizes, the largest first, so that the smaller ones use its memory again."""
        for bucket in reversed(self._buckets):
            buffers.fill(Step(()), bucket)
            graph, (hidden, logits) = self.record(partial(forward, buffers.views(bucket)))
            self._captured[bucket] = Captured(graph, hidden, logits)

    def record(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture some work on the device, which allocates nothing that outlives it but its results."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            results = work()
        self._pool = self._pool or graph.pool()
        return graph, results

    @property
    def logits(self) -> list[Tensor]:
        """What each graph writes its logits to."""
        return [captured.logits for captured in self._captured.values()]

    def replay(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Run a graph over what the step buffers hold; its results are valid until the next replay."""
        captured = self._captured[bucket]
        captured.graph.replay()
        return captured.hidden, captured.logits

    @property
    def _captured_smallest_first(self) -> Iterator[Bucket]:
        return reversed(self._captured)
