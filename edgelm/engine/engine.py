"""The engine: one thread that runs steps, and the way for requests in and out of it.

Owns the thread, the open requests and their timings. Knows nothing of text or devices.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from edgelm.base.errors import BusyError, DeviceError, EdgeLMError, EngineError, LostStepError, RequestError
from edgelm.base.sampling import SamplingParams
from edgelm.engine.clock import StepClock
from edgelm.engine.core import (
    Embedder,
    Event,
    Executor,
    ExecutorInfo,
    FinishReason,
    Matcher,
    OnSaving,
    Op,
    PictureSpan,
    Save,
    Sequence,
    Stats,
    Step,
    Store,
)
from edgelm.engine.counters import Counters
from edgelm.engine.embedding import EmbeddingJob, EmbeddingQueue
from edgelm.engine.pipeline import StepPipeline
from edgelm.engine.scheduler import Scheduler
from edgelm.engine.stream import Mailbox, Stream
from edgelm.engine.usage import Usage
from edgelm.engine.watch import Watch, Watcher
from edgelm.engine.watchdog import Watchdog

MAX_REQUESTS = 512  # open at the same time, running and waiting; a client alone may have half of them
WORK_SHARE = 0.02  # of a step's time, for the background work of the drafter
MAX_WORK_S = 0.005  # of that work after one step
FLUSH_IDLE_AFTER_S = 30.0  # without a request: then idle prefixes are stored

_CLOSED = EngineError("the engine was closed")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    """An open request; times are of `perf_counter`, 0 until they are known."""

    seq: Sequence
    mailbox: Mailbox
    submitted: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0
    request_id: str = ""  # for logs
    limit_s: float | None = None  # for the answer, from its first token on
    scoring: bool = False  # its tokens behind the first are those of a prompt
    counted: bool = True  # by the counters of the engine
    drafted: int = 0  # of `seq`, as counted
    accepted: int = 0

    def is_late(self, now: float) -> bool:
        """Tell whether the time for the answer is over."""
        return self.limit_s is not None and self.first > 0 and now - self.first >= self.limit_s

    def stats(self) -> Stats:
        seq, first, last = self.seq, self.first or time.perf_counter(), self.last or self.first
        started = self.started or first
        if self.scoring and self.last:
            first = self.last
        return Stats(
            prompt_tokens=len(seq.tokens) if self.scoring else seq.prompt_len,
            cached_tokens=seq.cached or 0,
            completion_tokens=0 if self.scoring else seq.completion_len,
            drafted=seq.drafted,
            accepted=seq.accepted,
            forced=seq.forced,
            queue_ms=1000 * (started - self.submitted),
            prompt_ms=1000 * (first - started),
            first_token_ms=1000 * (first - self.submitted),
            decode_ms=1000 * max(last - first, 0.0),
        )


class Engine:
    """Runs requests on one executor. Start it, submit to it, close it.

    `make_embedder` is called on the engine's thread when the first vectors are to be computed.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        clock: StepClock,
        max_requests: int = MAX_REQUESTS,
        make_embedder: Callable[[], Embedder] | None = None,
    ) -> None:
        self.counters = Counters()
        self.when_lost: Callable[[DeviceError], None] = lambda _: None  # it may end the process; on any thread
        self._executor = executor
        self._scheduler = scheduler
        self._watch = Watch(scheduler.kv_regions)
        self._pipeline = StepPipeline(executor, scheduler, clock)
        self._embeddings = EmbeddingQueue(make_embedder, self.counters.embedded)
        self._max_requests = max_requests
        self._ids = itertools.count()
        self._lock = threading.Lock()  # for the next five
        self._open: dict[int, _Request] = {}
        self._jobs: set[EmbeddingJob] = set()  # open requests for vectors
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._closing = False
        self._on_saving: OnSaving = lambda _: None
        self._end_lock = threading.Lock()  # for the next one
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._watchdog = Watchdog(executor.info, self._lose)

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    @property
    def num_requests(self) -> int:
        """The number of open requests, running and waiting."""
        return len(self._open) + len(self._jobs)

    @property
    def num_running(self) -> int:
        """The number of requests that are computed now."""
        return len(self._scheduler.running) + self._embeddings.num_running

    @property
    def kv_usage(self) -> float:
        """The share of the KV cache that running sequences hold, 0 to 1."""
        return self._scheduler.kv_usage

    # -- for any thread --------------------------------------------------------------------------------------------

    def start(self) -> Engine:
        self._thread.start()
        return self

    def submit(
        self,
        tokens: list[int],
        params: SamplingParams,
        matcher: Matcher | None = None,
        *,
        past: Seq[int] = (),
        cache_namespace: str = "",
        client: str = "",
        interactive: bool = False,
        limit_s: float | None = None,
        usage: Usage | None = None,
        pictures: tuple[PictureSpan, ...] = (),
        scoring: bool = False,
    ) -> Stream:
        """Queue a prompt; iterate over the returned stream, in the running event loop, for its events.

        `past` is the part of the conversation that is no longer in the prompt. Namespaces share no cached prefixes and
        no learnt drafts. Clients take turns, and an `interactive` request overtakes others (`AdmissionQueue`). An
        answer ends with the reason "length" `limit_s` after its first token. `usage` is notified at start and end.
        In a `scoring` request the matcher forces the rest of a prompt. It counts as a prompt without an answer; without
        `usage` it does not count: an answer to the same prompt follows.
        Raises RequestError for a prompt that can never run, BusyError when too many requests are open, of this client
        or of all, EngineError when the engine is closed.
        """
        self._scheduler.check(tokens, params, pictures)
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._closing:
                raise EngineError("the engine is closed")
            self._check_room(client, [request.seq.client for request in self._open.values()])
            seq = Sequence(next(self._ids), list(tokens), len(tokens), params, matcher=matcher, past=past)
            seq.cache_namespace, seq.client, seq.interactive = cache_namespace, client, interactive
            seq.pictures = pictures
            mailbox = Mailbox(loop, usage.begin(counts_prompt=params.choice == 0) if usage else None)
            self._open[seq.id] = request = _Request(seq, mailbox, limit_s=limit_s, scoring=scoring)
            request.request_id, request.counted = usage.request_id if usage else "", bool(usage) or not scoring
            self._inbox.put(lambda: self._scheduler.add(seq))
        return Stream(mailbox, lambda reason: self._inbox.put(lambda: self._cancel(seq.id, reason)))

    async def embed(self, inputs: Seq[Seq[int]], client: str = "") -> NDArray[np.float32]:
        """Compute the vectors of some inputs, behind the answers: [inputs, width]. Cancelling the call stops the work.

        Raises BusyError when too many requests are open, EngineError when the engine fails or has not enough memory,
        RequestError when it has no embedder.
        """
        if not self._embeddings.available:
            raise RequestError("this engine computes no embeddings", "use --engine llama")
        loop = asyncio.get_running_loop()
        job = EmbeddingJob(inputs, client, loop, loop.create_future())
        with self._lock:
            if self._closing:
                raise EngineError("the engine is closed")
            self._check_room(client, [job.client for job in self._jobs])
            self._jobs.add(job)
            self._inbox.put(lambda: self._embeddings.add(job))
        try:
            return await job.done
        finally:
            with self._lock:
                self._jobs.discard(job)
            self._inbox.put(lambda: self._embeddings.cancel(job))

    def watch(self) -> Watcher:
        """Return a watcher for the running event loop, which gets a record of each step and of the KV cache."""
        watcher = self._watch.open()
        self._inbox.put(lambda: None)  # an idle engine reports its cache, too
        return watcher

    def _check_room(self, client: str, clients: Seq[str]) -> None:
        """Raise BusyError unless there is room for one more request of a client, besides those of `clients`.

        No client may have more requests than there are free places: however many clients flood the queue, one more
        still gets in.
        """
        free = self._max_requests - len(clients)
        if free <= 0:
            raise BusyError(f"{len(clients)} requests are open already", "try again later")
        num_own = clients.count(client)
        if num_own >= free:
            raise BusyError(f"{num_own} requests of this client are open already", "wait until some are answered")

    def close(self) -> None:
        """Stop, and free the executor's memory."""
        self.stop()
        self._embeddings.close()
        self._executor.close()

    def stop(self, on_saving: OnSaving = lambda _: None) -> None:
        """End the thread after its step, fail open requests, and save state for the next process. Idempotent.

        `on_saving` is called, by any thread, whenever the saving makes progress.
        """
        with self._lock:
            self._closing, self._on_saving = True, on_saving
        self._inbox.put(lambda: None)
        if self._thread.ident is not None:
            self._thread.join()
        self._fail_open()
        with self._end_lock:
            if not self._ended:
                self._ended = True
                self._scheduler.close(on_saving)

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def step(self) -> list[Event] | None:
        """Run one step and return its events; None: there is nothing to do. Raises DeviceError: no other can run."""
        step = self._pipeline.launched
        try:
            step = step or self._plan()
            if step is None:
                self._pipeline.reset()
                return None
            self._watchdog.work = step
            sampled = self._pipeline.run(step)
            forced = self._watch.forced(step) if self._watch.is_on else None
            events = self._scheduler.commit(step, sampled)
            if forced is not None:
                self._record(step, forced, events)
            self.counters.preempted(self._scheduler.num_preemptions)
            self._scheduler.work(min(WORK_SHARE * self._pipeline.step_s, MAX_WORK_S))
            return events
        except LostStepError as error:
            return self._recompute(error)
        except DeviceError:
            raise
        except EdgeLMError as error:
            return self._fail(step, error)
        except Exception as error:  # the one boundary: a failed step is the failure of its requests
            log.exception("a step failed")
            return self._fail(step, EngineError(f"the engine failed: {type(error).__name__}: {error}"))

    def _record(self, step: Step, forced: list[int], events: list[Event]) -> None:
        """Report a committed step to the watchers."""
        self._watch.add_step(
            step,
            forced,
            events,
            step_s=self._pipeline.step_s,
            num_waiting=len(self._scheduler.waiting),
            num_running=len(self._scheduler.running),
            request_id=lambda seq_id: request.request_id if (request := self._open.get(seq_id)) else "",
        )
        self._watch.add_kv(self._scheduler.kv_usage)

    def _plan(self) -> Step | None:
        began = time.perf_counter()
        step = self._scheduler.plan()
        for chunk in step.chunks if step else ():
            request = self._open[chunk.seq.id]
            if not request.started:
                request.started = began
                if not request.scoring:
                    self.counters.admitted(chunk.seq)
        return step

    def _recompute(self, error: LostStepError) -> list[Event]:
        log.warning("%s; all running requests are computed again", error.message)
        self._pipeline.reset()
        self._scheduler.recompute()
        return []

    def _fail(self, step: Step | None, error: EdgeLMError) -> list[Event]:
        """Return the events that end the sequences of a failed step, but for requests that are closed already."""
        self._pipeline.reset()
        events = [event for event in self._scheduler.fail(step, error) if event.seq_id in self._open]
        ids = dict.fromkeys(self._open[event.seq_id].request_id for event in events)
        log.warning("requests %s failed: %s", ", ".join(ids), error)
        return events

    def _run(self) -> None:
        idle, flushed = False, True
        self._watchdog.start()
        try:
            while not self._closing:
                if idle:
                    self._watchdog.work = None
                if not self._take_commands(wait=idle, limit_s=None if flushed else FLUSH_IDLE_AFTER_S) and idle:
                    self._flush_idle(ends=False)
                    self._embeddings.free()
                    flushed = True
                self._watchdog.begin()
                events = self.step()
                embeds = self._embeddings.work(None if events is None else self._pipeline.step_s)
                flushed = flushed and events is None and not embeds
                idle = events is None and not embeds and not self._scheduler.work(MAX_WORK_S)
                if idle and self._watch.is_on:
                    self._watch.add_kv(self._scheduler.kv_usage, now=True)
                if events:
                    self._deliver(events)
            for seq in [*self._scheduler.running, *self._scheduler.waiting]:
                self._scheduler.abort(seq.id)
            self._pipeline.reset()
            self._flush_idle(ends=True, on_saving=self._on_saving)
        except DeviceError as error:
            self._lose(error)
        finally:  # even if a bug ends the thread, no client may wait for it
            self._watchdog.close()
            self._fail_open()

    def _lose(self, error: DeviceError) -> None:
        """End all requests: nothing can be computed any more. For the engine's thread and, if that hangs, another."""
        log.error("%s", error)
        self.when_lost(error)
        self._fail_open(error)

    def _fail_open(self, error: EngineError = _CLOSED) -> None:
        """Accept no more requests, and fail the open ones."""
        with self._lock:
            self._closing = True
        self._deliver([Event(seq_id, finish_reason="error", error=error) for seq_id in list(self._open)])
        for job in list(self._jobs):
            job.finish(error)

    def _flush_idle(self, *, ends: bool, on_saving: OnSaving = lambda _: None) -> None:
        """Store idle prefixes, so that they outlive the process; an error costs these prefixes and nothing else."""
        try:
            step = self._scheduler.flush_idle(ends)
            ops = step.ops if step else ()
            num_stored = sum(isinstance(op, Store) for op in ops)
            for part in _by_save(ops):  # to copy a state may take a second, and each copy is progress
                self._watchdog.begin()
                self._executor.forward(Step((), part))
                on_saving(num_stored)
        except DeviceError:
            raise
        except EdgeLMError as error:
            log.warning("idle prefixes are not stored: %s", error)
            self._scheduler.recompute()

    def _take_commands(self, wait: bool, limit_s: float | None = None) -> bool:
        """Run the commands of other threads; False: there was none, or none within the limit."""
        taken = False
        try:
            self._inbox.get(block=wait, timeout=limit_s)()
            taken = True
            while True:
                self._inbox.get_nowait()()
        except Empty:
            return taken

    def _cancel(self, seq_id: int, reason: FinishReason) -> None:
        event = self._scheduler.abort(seq_id)
        if event:
            self._deliver([replace(event, finish_reason=reason)])

    def _deliver(self, events: list[Event]) -> None:
        """Post events to their readers, and wake each event loop once, if a reader may be woken now."""
        now = time.perf_counter()
        posts: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Event]]] = {}
        for event in events:
            request = self._open.get(event.seq_id)
            if request is None:
                continue  # the watchdog has ended it
            if event.sampled:
                self._count_tokens(request, len(event.sampled), now)
            if request.is_late(now) and not event.finish_reason and self._scheduler.abort(event.seq_id):
                event = replace(event, finish_reason="length")
            if event.finish_reason:
                stats = request.stats()
                reason = event.finish_reason
                if request.scoring and reason == "stop":  # the end of the prompt is no end of an answer
                    reason = "length"
                if request.counted:
                    self.counters.ended(reason, stats, scored=request.scoring)
                event = replace(event, finish_reason=reason, stats=stats)
                with self._lock:
                    del self._open[event.seq_id]
            if request.mailbox.post(event):
                posts.setdefault(request.mailbox.loop, []).append((request.mailbox, event))
        for loop, mail in posts.items():
            try:
                loop.call_soon_threadsafe(_notice_all, mail)
            except RuntimeError:  # the loop is closed, and with it the clients of its requests
                for _, event in mail:
                    self._inbox.put(functools.partial(self._cancel, event.seq_id, "abort"))

    def _count_tokens(self, request: _Request, num_tokens: int, now: float) -> None:
        """Note the time of new tokens, and count them with the draft that they come from."""
        seq = request.seq
        if request.scoring:
            request.first = request.first or now
        elif request.first:
            self.counters.more_tokens(num_tokens, now - request.last)
        else:
            request.first = now
            self.counters.first_tokens(seq, num_tokens, now - request.submitted)
        request.last = now
        if seq.drafted > request.drafted:
            self.counters.draft(seq.drafted_by, seq.drafted - request.drafted, seq.accepted - request.accepted)
            request.drafted, request.accepted = seq.drafted, seq.accepted


def _by_save(ops: Seq[Op]) -> Iterator[tuple[Op, ...]]:
    """Yield the ops in parts; a part has at most one Save, as its first op."""
    starts = [index for index, op in enumerate(ops) if index == 0 or isinstance(op, Save)]
    for start, end in itertools.pairwise([*starts, len(ops)]):
        yield tuple(ops[start:end])


def _notice_all(mail: list[tuple[Mailbox, Event]]) -> None:
    for mailbox, event in mail:
        mailbox.notice(event)
