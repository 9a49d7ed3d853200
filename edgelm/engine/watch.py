"""Records of an engine's steps and of its KV cache, for those who watch it.

Owns the records and their way from the engine's thread to the event loops of the watchers. A watcher that reads slowly
loses the oldest records; the engine never waits for a watcher, and makes no records without one. Knows nothing of text
and of HTTP.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass

from edgelm.engine.core import Event, FinishReason, KVRegion, Sampled, Step

KEPT = 512  # records that a watcher may lag behind
KV_EVERY_S = 0.25  # between two records of the KV cache: it has thousands of regions


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """The part of a step that belongs to one sequence."""

    seq_id: int
    request_id: str
    cache_namespace: str
    prompt_len: int
    cached: int  # prompt tokens that were found in the prefix cache
    start: int  # the position of its first token
    num_tokens: int  # computed tokens, draft included
    drafted: int  # with the tokens that a grammar forced
    forced: int  # leading tokens of the draft
    accepted: int  # leading tokens of the draft
    drafted_by: str  # who drafted the tokens that were not forced: ngram, mtp or model; empty: there are none
    sampled: tuple[Sampled, ...]  # the accepted tokens, and the one behind them
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step of the engine."""

    number: int
    at_s: float  # when it ended, of `time.time`
    step_s: float  # how long it took
    num_waiting: int  # sequences that are not admitted yet
    num_running: int
    chunks: tuple[ChunkRecord, ...]


@dataclass(frozen=True, slots=True)
class KVRecord:
    """The KV cache between two steps."""

    at_s: float
    usage: float  # the share that running sequences hold
    regions: tuple[KVRegion, ...]


Record = StepRecord | KVRecord


class Watcher:
    """The records for one reader. Use it in one event loop, and close it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_close: Callable[[Watcher], None]) -> None:
        self._loop = loop
        self._on_close = on_close
        self._lock = threading.Lock()  # for the next three
        self._records: deque[Record] = deque(maxlen=KEPT)
        self._num_lost = 0
        self._is_woken = False
        self._arrived = asyncio.Event()

    async def take(self) -> tuple[int, list[Record]]:
        """Wait for records; return how many were lost before them, and the records."""
        await self._arrived.wait()
        self._arrived.clear()
        with self._lock:
            num_lost, self._num_lost = self._num_lost, 0
            records = list(self._records)
            self._records.clear()
            self._is_woken = False
        return num_lost, records

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._on_close(self)

    def put(self, record: Record) -> None:
        """Hand over a record. Called by the engine's thread."""
        with self._lock:
            self._num_lost += len(self._records) == KEPT
            self._records.append(record)
            wakes, self._is_woken = not self._is_woken, True
        if wakes:
            with suppress(RuntimeError):  # the loop is closed, and with it the reader
                self._loop.call_soon_threadsafe(self._arrived.set)


class Watch:
    """The watchers of one engine. `regions` returns those of its KV cache."""

    def __init__(self, regions: Callable[[], tuple[KVRegion, ...]]) -> None:
        self._regions = regions
        self._watchers: tuple[Watcher, ...] = ()  # replaced as a whole: the engine's thread reads it without a lock
        self._lock = threading.Lock()
        self._num_steps = 0
        self._kv_at = 0.0
        self._kv: tuple[float, tuple[KVRegion, ...]] | None = None  # as sent last

    @property
    def is_on(self) -> bool:
        """Whether somebody watches."""
        return bool(self._watchers)

    def open(self) -> Watcher:
        """Return a watcher for the running event loop."""
        watcher = Watcher(asyncio.get_running_loop(), self._remove)
        with self._lock:
            self._watchers = (*self._watchers, watcher)
            self._kv = None  # it is sent again, to the new one
        return watcher

    def _remove(self, watcher: Watcher) -> None:
        with self._lock:
            self._watchers = tuple(other for other in self._watchers if other is not watcher)

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def forced(self, step: Step) -> list[int]:
        """Return how many leading tokens of each chunk's draft a grammar forced. Call it before the commit."""
        return [min(chunk.seq.num_forced, len(chunk.draft)) for chunk in step.chunks]

    def add_step(
        self,
        step: Step,
        forced: Seq[int],
        events: Seq[Event],
        *,
        step_s: float,
        num_waiting: int,
        num_running: int,
        request_id: Callable[[int], str],
    ) -> None:
        """Record a step that was committed. `request_id` returns that of a sequence."""
        self._num_steps += 1
        by_seq = {event.seq_id: event for event in events}
        nothing = Event(-1)
        chunks = []
        for chunk, num_forced in zip(step.chunks, forced, strict=True):
            seq, event = chunk.seq, by_seq.get(chunk.seq.id, nothing)
            chunks.append(
                ChunkRecord(
                    seq.id,
                    request_id(seq.id),
                    seq.cache_namespace,
                    seq.prompt_len,
                    seq.cached or 0,
                    chunk.start,
                    len(chunk.tokens),
                    len(chunk.draft),
                    num_forced,
                    event.accepted,
                    seq.drafted_by if len(chunk.draft) > num_forced else "",
                    event.sampled,
                    event.finish_reason,
                )
            )
        self._put(StepRecord(self._num_steps, time.time(), step_s, num_waiting, num_running, tuple(chunks)))

    def add_kv(self, usage: float, *, now: bool = False) -> None:
        """Record the KV cache, if it changed and the last record is old enough, or `now`."""
        time_s = time.monotonic()
        if not now and time_s < self._kv_at + KV_EVERY_S:
            return
        self._kv_at = time_s
        kv = usage, self._regions()
        if kv != self._kv:
            self._kv = kv
            self._put(KVRecord(time.time(), *kv))

    def _put(self, record: Record) -> None:
        for watcher in self._watchers:
            watcher.put(record)
