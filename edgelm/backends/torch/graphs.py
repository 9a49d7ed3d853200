"""CUDA graphs of a model's forward pass, for steps of up to 16 tokens: no gaps between kernels.

There are two for each size: one for steps that decode a token of each sequence, one for steps that verify several
tokens of a sequence.

Owns capture and replay. A graph reads a step from the step buffers and writes logits into memory of its own: nothing is
allocated, and nothing waits. Knows nothing of the content of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from edgelm.backends.torch.batch import Bucket, StepBuffers, StepTensors
from edgelm.core import Step

SIZES = 1, 2, 4, 8, 16  # tokens of a step
WARM_UPS = 2  # runs before a capture, which compile kernels and start libraries

T = TypeVar("T")
Forward = Callable[[StepTensors], tuple[Tensor, Tensor]]  # hidden [rows, hidden_size] and logits [rows, vocab_size]


class Captured(NamedTuple):
    """One graph, and the tensors that it writes to."""

    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    logits: Tensor


class Graphs:
    """The graphs of one executor, for steps of at most so many sequences and tokens."""

    def __init__(self, max_sequences: int, max_tokens: int) -> None:
        sizes = [size for size in SIZES if size <= max_tokens]
        self._buckets: list[Bucket] = []  # the smallest first; of two with one size, the cheaper one first
        for size in sizes:
            if size < 2 * max_sequences:
                self._buckets.append(Bucket(size, min(size, max_sequences), size, 1))
            if size > 1:
                self._buckets.append(Bucket(size, min(size, max_sequences), size, size))
        self._captured: dict[Bucket, Captured] = {}
        self._pool: Any = None

    def bucket(self, size: Bucket) -> Bucket | None:
        """Return the smallest bucket that holds a step of that size; None: the step runs without a graph."""
        return next((bucket for bucket in self._captured_smallest_first if bucket.holds(size)), None)

    def capture(self, forward: Forward, buffers: StepBuffers) -> None:
        """Capture all sizes, the largest first, so that the smaller ones reuse its memory."""
        for bucket in reversed(self._buckets):
            buffers.fill(Step(()), bucket)
            graph, (hidden, logits) = self.record(partial(forward, buffers.views(bucket)))
            self._captured[bucket] = Captured(graph, hidden, logits)

    def record(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture work on the device; of the memory that it allocates, only the results stay in use."""
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
        """The tensors that the graphs write logits to."""
        return [captured.logits for captured in self._captured.values()]

    def replay(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Run a graph on the step in the step buffers; the results are valid until the next replay."""
        captured = self._captured[bucket]
        captured.graph.replay()
        return captured.hidden, captured.logits

    @property
    def _captured_smallest_first(self) -> Iterator[Bucket]:
        return reversed(self._captured)
