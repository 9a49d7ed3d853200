"""CUDA graphs of a model's forward pass, for steps of up to 64 tokens: no gaps between kernels.

There are two for a size: one for steps that decode a token of each sequence, one for steps that verify several tokens
of a sequence.

Owns capture and replay. A graph reads a step from the step buffers and writes its logits where all graphs write them:
nothing is allocated, and nothing waits. Only one graph runs at a time, so all of them share the memory of the largest.
Knows nothing of the content of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgelm.backends.torch.batch import Bucket, StepBuffers, StepTensors
from edgelm.backends.torch.graph_sizes import graph_sizes
from edgelm.engine.core import Step

Forward = Callable[[StepTensors, Tensor], object]  # writes the logits to a tensor, [rows, vocab_size]


class Graphs:
    """The graphs of one executor, for steps of at most so many sequences and tokens."""

    def __init__(self, max_sequences: int, max_tokens: int) -> None:
        self._buckets = [  # the smallest first; of two with one size, the cheaper one first
            Bucket(tokens, min(tokens, max_sequences), tokens, query_len)
            for tokens, query_len in graph_sizes(max_sequences, max_tokens)
        ]
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        self._logits: Tensor | None = None
        self._pool: Any = None
        self._stream = torch.cuda.Stream()  # one for all: the allocator reuses memory on the stream it was taken on

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows that graphs have, the largest first."""
        return sorted({bucket.rows for bucket in self._buckets}, reverse=True)

    @property
    def num_steps(self) -> int:
        """The number of graphs of steps; of some rows there are two."""
        return len(self._buckets)

    def bucket(self, size: Bucket) -> Bucket | None:
        """Return the smallest bucket that holds a step of that size; None: the step runs without a graph."""
        return next((bucket for bucket in self._buckets if bucket.holds(size)), None)

    def capture(
        self, forward: Forward, buffers: StepBuffers, logits: Tensor, alive: Callable[[], None] = lambda: None
    ) -> None:
        """Capture all sizes, the largest first; they write to the first rows of `logits`, [rows, vocab_size].

        `alive` is called after each.
        """

        def work(bucket: Bucket) -> None:
            forward(buffers.views(bucket), logits[: bucket.rows])

        self._logits = logits
        for bucket in reversed(self._buckets):
            buffers.fill(Step(()), bucket)
            self._graphs[bucket] = self.record(partial(work, bucket))
            alive()

    def record(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Capture work on the device; the memory that it allocates is used again by the other graphs."""
        work()  # compiles kernels, which a capture must not do
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        self._pool = self._pool or graph.pool()
        return graph

    def replay(self, bucket: Bucket) -> Tensor:
        """Run a graph on the step in the step buffers; the logits are valid until the next replay."""
        assert self._logits is not None
        self._graphs[bucket].replay()
        return self._logits[: bucket.rows]
