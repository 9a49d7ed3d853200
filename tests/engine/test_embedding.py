"""The queue of inputs: turns of the clients, the share of the time beside answers, cancelling and failing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from edgelm.base.errors import BusyError, EngineError
from edgelm.engine import embedding
from edgelm.engine import engine as engine_module
from edgelm.engine.core import EmbedderInfo
from edgelm.engine.embedding import BUSY_SHARE, EmbeddingJob, EmbeddingQueue
from tests.engine.test_engine import running_engine

TOKEN_S = 0.001


@dataclass
class Clock:
    """A clock that only work moves."""

    now: float = 100.0

    def perf_counter(self) -> float:
        return self.now


@dataclass
class FakeEmbedder:
    """The vector of an input is its length; a token takes TOKEN_S."""

    clock: Clock
    max_inputs: int = 4
    batches: list[list[int]] = field(default_factory=list)  # the first tokens of their inputs
    fails: bool = False
    freed: threading.Event = field(default_factory=threading.Event)

    @property
    def info(self) -> EmbedderInfo:
        return EmbedderInfo(width=1, context=1000, max_inputs=self.max_inputs)

    def begin(self, inputs: Sequence[Sequence[int]]) -> FakeBatch:
        if self.fails:
            raise EngineError("no memory")
        self.batches.append([tokens[0] for tokens in inputs])
        return FakeBatch(self, inputs)

    def close(self) -> None:
        self.freed.set()


class FakeBatch:
    def __init__(self, embedder: FakeEmbedder, inputs: Sequence[Sequence[int]]) -> None:
        self._embedder = embedder
        self._lengths = [len(tokens) for tokens in inputs]
        self._left = sum(self._lengths)

    def step(self, max_tokens: int) -> int:
        done = min(max_tokens, self._left)
        self._left -= done
        self._embedder.clock.now += done * TOKEN_S
        return done

    def vectors(self) -> NDArray[np.float32]:
        return np.array(self._lengths, np.float32)[:, None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(embedding, "time", clock)
    return clock


def job(inputs: list[list[int]], client: str = "") -> EmbeddingJob:
    loop = asyncio.get_running_loop()
    return EmbeddingJob(inputs, client, loop, loop.create_future())


async def test_clients_take_turns_and_every_vector_goes_to_its_input(clock: Clock) -> None:
    embedder = FakeEmbedder(clock)
    queue = EmbeddingQueue(lambda: embedder)
    many, one = job([[1] * 3] * 6, "many"), job([[2] * 5], "one")
    queue.add(many)
    queue.add(one)
    while queue.work(None):
        pass
    assert embedder.batches[0] == [1, 2]  # before the speed is known, batches are small
    assert (await many.done).tolist() == [[3]] * 6
    assert (await one.done).tolist() == [[5]]


async def test_answers_keep_most_of_the_time(clock: Clock) -> None:
    embedder = FakeEmbedder(clock)
    queue = EmbeddingQueue(lambda: embedder)
    queue.add(job([[1] * 900]))
    step_s, steps_s, longest_s = 0.04, 0.0, 0.0
    while True:
        clock.now += step_s  # a step of the answers
        steps_s += step_s
        before = clock.now
        if not queue.work(step_s):
            break
        longest_s = max(longest_s, clock.now - before)
    share = 900 * TOKEN_S / steps_s
    assert BUSY_SHARE / 2 < share < BUSY_SHARE * 1.2  # neither starved nor in the way
    assert longest_s <= embedding.BUSY_PIECE_S + TOKEN_S


async def test_a_cancelled_job_costs_no_more_work(clock: Clock) -> None:
    embedder = FakeEmbedder(clock)
    queue = EmbeddingQueue(lambda: embedder)
    left, other = job([[1] * 900, [1] * 900], "left"), job([[2] * 10], "other")
    queue.add(left)
    assert queue.work(None)
    queue.cancel(left)
    assert not queue.busy
    queue.add(other)
    while queue.work(None):
        pass
    assert (await other.done).tolist() == [[10]]
    assert [2] in embedder.batches
    assert sum(1 in batch for batch in embedder.batches) == 1  # its second input was not begun
    assert not left.done.done()


async def test_an_unused_embedder_is_freed_and_made_again(clock: Clock) -> None:
    made: list[FakeEmbedder] = []

    def make() -> FakeEmbedder:
        made.append(FakeEmbedder(clock))
        return made[-1]

    queue = EmbeddingQueue(make)
    for count in (1, 2):
        requested = job([[1, 2, 3]])
        queue.add(requested)
        assert queue.num_running == 0
        while queue.work(None):
            assert queue.num_running == 1
        queue.free()
        assert (await requested.done).tolist() == [[3]]
        assert [embedder.freed.is_set() for embedder in made] == [True] * count


async def test_a_client_leaves_room_for_the_vectors_of_others(clock: Clock) -> None:
    begun, gate = threading.Event(), threading.Event()

    class Gated(FakeEmbedder):
        def begin(self, inputs: Sequence[Sequence[int]]) -> FakeBatch:
            begun.set()
            assert gate.wait(60)
            return super().begin(inputs)

    with running_engine(max_requests=8, make_embedder=lambda: Gated(clock)) as (engine, _):
        flood = [asyncio.ensure_future(engine.embed([[1, 2]], "flood")) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="4 requests of this client"):
            await engine.embed([[1, 2]], "flood")
        other = asyncio.ensure_future(engine.embed([[1, 2, 3]], "other"))
        assert await asyncio.to_thread(begun.wait, 60)
        assert engine.num_running >= 1
        gate.set()
        assert (await other).tolist() == [[3]]
        await asyncio.gather(*flood)
        counts = engine.counters.copy()["counts"]
        assert (counts["embedding_inputs_total"], counts["embedding_tokens_total"]) == (5, 11)
        assert engine.num_running == 0


async def test_the_engine_frees_an_unused_embedder(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "FLUSH_IDLE_AFTER_S", 0.01)
    embedder = FakeEmbedder(clock)
    with running_engine(make_embedder=lambda: embedder) as (engine, _):
        await engine.embed([[1, 2]])
        assert await asyncio.to_thread(embedder.freed.wait, 60)


async def test_a_failure_fails_the_jobs_of_its_batch_and_no_other(clock: Clock) -> None:
    embedder = FakeEmbedder(clock, max_inputs=1, fails=True)
    queue = EmbeddingQueue(lambda: embedder)
    first, second = job([[1], [1]], "first"), job([[2]], "second")
    queue.add(first)
    queue.add(second)
    assert queue.work(None)
    embedder.fails = False
    while queue.work(None):
        pass
    with pytest.raises(EngineError, match="no memory"):
        await first.done
    assert (await second.done).tolist() == [[1]]
    queue.close()
    assert embedder.freed.is_set()
