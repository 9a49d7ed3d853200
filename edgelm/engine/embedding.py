"""The queue of inputs whose vectors are to be computed, behind the answers of the same engine.

Owns the order of the inputs and their share of the time. Used on the engine's thread.
While answers are decoded, the inputs get a small share of the time, in small pieces.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgelm.base.errors import DeviceError, EdgeLMError, EngineError
from edgelm.engine.core import Embedder, EmbeddingBatch

BUSY_SHARE = 0.25  # of the time of the steps, while answers are decoded
BUSY_PIECE_S = 0.03  # a step waits at most this long for a piece of this work
IDLE_PIECE_S = 0.2  # a new request waits at most this long
MIN_PIECE = 8  # tokens, as before the speed is known; they cost little more than one
MAX_PIECE = 512  # tokens; a batch has more only if one input has

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class EmbeddingJob:
    """The inputs of one request."""

    inputs: Sequence[Sequence[int]]
    client: str
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[NDArray[np.float32]]
    vectors: list[NDArray[np.float32] | None] = field(default_factory=list)
    num_taken: int = 0  # inputs that a batch has, or had
    num_left: int = 0  # inputs without a vector
    open: bool = True

    def __post_init__(self) -> None:
        self.vectors = [None] * len(self.inputs)
        self.num_left = len(self.inputs)

    def finish(self, error: EdgeLMError | None = None) -> None:
        """Give the vectors, or the error, to the event loop that waits for them."""

        def resolve() -> None:
            if self.done.done():  # cancelled
                return
            if error is not None:
                self.done.set_exception(error)
            else:
                self.done.set_result(np.stack([vector for vector in self.vectors if vector is not None]))

        self.open = False
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the client
            self.loop.call_soon_threadsafe(resolve)


class EmbeddingQueue:
    """The waiting inputs of all clients, who take turns. The embedder is made for the first one.

    `count` is called with the inputs of a complete job.
    """

    def __init__(
        self, make: Callable[[], Embedder] | None, count: Callable[[Sequence[Sequence[int]]], None] = lambda _: None
    ) -> None:
        self._make = make
        self._count = count
        self._embedder: Embedder | None = None
        self._clients: dict[str, deque[EmbeddingJob]] = {}  # in the order of their turns
        self._batch: EmbeddingBatch | None = None
        self._members: list[tuple[EmbeddingJob, int]] = []  # of the batch: a job and the number of its input
        self._tokens_per_s = 0.0
        self._credit_s = 0.0

    @property
    def available(self) -> bool:
        """Whether there is, or can be, an embedder. For any thread."""
        return self._make is not None

    @property
    def busy(self) -> bool:
        """Whether there is work."""
        return self._batch is not None or bool(self._clients)

    @property
    def num_running(self) -> int:
        """The number of requests that the batch computes. For any thread."""
        return len({job for job, _ in self._members.copy() if job.open})

    def add(self, job: EmbeddingJob) -> None:
        self._clients.setdefault(job.client, deque()).append(job)

    def cancel(self, job: EmbeddingJob) -> None:
        """Forget a job. A batch that has no other inputs ends after its piece."""
        job.open = False
        self._drop(job)
        if self._batch and not any(member.open for member, _ in self._members):
            self._batch, self._members = None, []

    def work(self, step_s: float | None) -> bool:
        """Compute a piece, if it is time; return whether there is more.

        `step_s` is the time of the step before, None if there was no step to run.
        """
        if not self.busy:
            self._credit_s = 0.0
            return False
        if step_s is not None:
            self._credit_s = min(self._credit_s + BUSY_SHARE * step_s, BUSY_PIECE_S)
            if self._credit_s <= 0:
                return True
        began = time.perf_counter()
        try:
            self._advance(IDLE_PIECE_S if step_s is None else BUSY_PIECE_S)
        except DeviceError:
            raise
        except EdgeLMError as error:
            self._fail(error)
        except Exception as error:  # the one boundary: a failed batch is the failure of its requests
            log.exception("an embedding failed")
            self._fail(EngineError(f"the engine failed: {type(error).__name__}: {error}"))
        self._credit_s = 0.0 if step_s is None else self._credit_s - (time.perf_counter() - began)
        return self.busy

    def close(self) -> None:
        """Free the embedder's memory; the jobs are lost."""
        self._clients, self._batch, self._members = {}, None, []
        self.free()

    def free(self) -> None:
        """Free the embedder's memory, if there is no work; the next input makes another."""
        if self.busy:
            return
        if self._embedder is not None:
            self._embedder.close()
            self._embedder = None

    def _advance(self, piece_s: float) -> None:
        piece = min(max(int(self._tokens_per_s * piece_s), MIN_PIECE), MAX_PIECE)
        if self._batch is None:
            self._members = [self._next()]  # so that an embedder that cannot be made fails this job
            if self._embedder is None:
                assert self._make is not None
                self._embedder = self._make()
            self._fill(self._embedder.info.max_inputs, piece)
            self._batch = self._embedder.begin([job.inputs[index] for job, index in self._members])
        began = time.perf_counter()
        num_tokens = self._batch.step(piece)
        elapsed = max(time.perf_counter() - began, 1e-6)
        if num_tokens:
            speed = num_tokens / elapsed
            self._tokens_per_s = 0.7 * self._tokens_per_s + 0.3 * speed if self._tokens_per_s else speed
            return
        vectors = self._batch.vectors()
        members, self._batch, self._members = self._members, None, []
        for (job, index), vector in zip(members, vectors, strict=True):
            job.vectors[index] = vector
            job.num_left -= 1
            if not job.num_left:
                self._count(job.inputs)
                job.finish()

    def _fill(self, max_inputs: int, max_tokens: int) -> None:
        """Add inputs to the batch, one of each client in turn."""
        job, index = self._members[0]
        num_tokens = len(job.inputs[index])
        while self._clients and len(self._members) < max_inputs:
            job = next(iter(self._clients.values()))[0]
            num_tokens += len(job.inputs[job.num_taken])
            if num_tokens > max_tokens:
                return
            self._members.append(self._next())

    def _next(self) -> tuple[EmbeddingJob, int]:
        """Take the next input of the client whose turn it is."""
        client = next(iter(self._clients))
        jobs = self._clients.pop(client)
        job, index = jobs[0], jobs[0].num_taken
        job.num_taken += 1
        if job.num_taken == len(job.inputs):
            jobs.popleft()
        if jobs:
            self._clients[client] = jobs  # behind the others
        return job, index

    def _fail(self, error: EdgeLMError) -> None:
        """Fail the jobs of the batch."""
        failed, self._batch, self._members = {job for job, _ in self._members}, None, []
        for job in failed:
            self._drop(job)
            job.finish(error)

    def _drop(self, job: EmbeddingJob) -> None:
        """Take a job out of the queue."""
        jobs = self._clients.get(job.client, deque())
        if job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._clients[job.client]
