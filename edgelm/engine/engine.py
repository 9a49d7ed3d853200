"""The engine: one thread that steps the scheduler and the executor, and the way in and out of it.

Owns the thread, the open requests and their timings. Knows nothing of text or of a device.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

from edgelm.core import Event, Executor, ExecutorInfo, Matcher, SamplingParams, Sequence, Stats
from edgelm.engine.clock import StepClock
from edgelm.engine.masks import grammar_masks
from edgelm.engine.scheduler import Scheduler
from edgelm.engine.stream import Mailbox, Stream
from edgelm.errors import BusyError, EdgeLMError, EngineError

MAX_REQUESTS = 256  # open at one time, running and waiting

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    """An open request; times are of `perf_counter`, 0 until they come."""

    seq: Sequence
    mailbox: Mailbox
    submitted: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0

    def stats(self) -> Stats:
        seq, first, last = self.seq, self.first or time.perf_counter(), self.last or self.first
        started = self.started or first
        return Stats(
            prompt_tokens=seq.prompt_len,
            cached_tokens=seq.cached or 0,
            completion_tokens=seq.completion_len,
            drafted=seq.drafted,
            accepted=seq.accepted,
            queue_ms=1000 * (started - self.submitted),
            prompt_ms=1000 * (first - started),
            first_token_ms=1000 * (first - self.submitted),
            decode_ms=1000 * max(last - first, 0.0),
        )


class Engine:
    """Runs requests on one executor. Start it, submit to it, close it."""

    def __init__(
        self, executor: Executor, scheduler: Scheduler, clock: StepClock, max_requests: int = MAX_REQUESTS
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._clock = clock
        self._max_requests = max_requests
        self._ids = itertools.count()
        self._lock = threading.Lock()  # of the three below
        self._open: dict[int, _Request] = {}
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    @property
    def num_requests(self) -> int:
        """Requests that are open, running and waiting."""
        return len(self._open)

    # -- for any thread --------------------------------------------------------------------------------------------

    def start(self) -> Engine:
        self._thread.start()
        return self

    def submit(self, tokens: list[int], params: SamplingParams, matcher: Matcher | None = None) -> Stream:
        """Queue a prompt; iterate over the stream, in the running event loop, for its events.

        Raises RequestError for a prompt that can never run, BusyError when too many requests are open, EngineError
        when the engine is closed.
        """
        self._scheduler.check(tokens, params)
        mailbox = Mailbox(asyncio.get_running_loop())
        with self._lock:
            if self._closing:
                raise EngineError("the engine is closed")
            if len(self._open) >= self._max_requests:
                raise BusyError(f"{len(self._open)} requests are open already", "try again later")
            seq = Sequence(next(self._ids), list(tokens), len(tokens), params, matcher=matcher)
            self._open[seq.id] = _Request(seq, mailbox)
            self._inbox.put(lambda: self._scheduler.add(seq))
        return Stream(mailbox, lambda: self._inbox.put(lambda: self._cancel(seq.id)))

    def close(self) -> None:
        """End the thread after its step, fail what is open, and free the executor's memory."""
        with self._lock:
            self._closing = True
        self._inbox.put(lambda: None)
        if self._thread.ident is not None:
            self._thread.join()
        self._fail_open()
        self._executor.close()

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def step(self) -> list[Event] | None:
        """Run one step; return its events. None: there was nothing to do."""
        step = None
        try:
            step = self._scheduler.plan()
            if step is None:
                return None
            began = time.perf_counter()
            for chunk in step.chunks:
                request = self._open[chunk.seq.id]
                request.started = request.started or began
            self._executor.forward(step)
            masks = grammar_masks(step, self.info.num_vocab)
            sampled = self._executor.sample(step, masks)
            self._clock.observe(step, time.perf_counter() - began)
            return self._scheduler.commit(step, sampled)
        except EdgeLMError as error:
            return self._scheduler.fail(step, error)
        except Exception as error:  # the one boundary: a failed step is the failure of its requests
            log.exception("a step failed")
            return self._scheduler.fail(step, EngineError(f"the engine failed: {type(error).__name__}: {error}"))

    def _run(self) -> None:
        idle = False
        try:
            while not self._closing:
                self._take_commands(wait=idle)
                events = self.step()
                idle = events is None
                if events:
                    self._deliver(events)
        finally:  # a bug of ours may end the thread: nobody is to wait for it then
            self._fail_open()

    def _fail_open(self) -> None:
        """Close the door and end all requests that are inside."""
        with self._lock:
            self._closing = True
        error = EngineError("the engine was closed")
        self._deliver([Event(seq_id, finish_reason="error", error=error) for seq_id in list(self._open)])

    def _take_commands(self, wait: bool) -> None:
        try:
            self._inbox.get(block=wait)()
            while True:
                self._inbox.get_nowait()()
        except Empty:
            pass

    def _cancel(self, seq_id: int) -> None:
        event = self._scheduler.abort(seq_id)
        if event:
            self._deliver([event])

    def _deliver(self, events: list[Event]) -> None:
        """Post events to their loops, waking each loop once."""
        now = time.perf_counter()
        posts: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Event]]] = {}
        for event in events:
            request = self._open[event.seq_id]
            if event.sampled:
                request.first = request.first or now
                request.last = now
            if event.finish_reason:
                event = replace(event, stats=request.stats())
                with self._lock:
                    del self._open[event.seq_id]
            posts.setdefault(request.mailbox.loop, []).append((request.mailbox, event))
        for loop, mail in posts.items():
            try:
                loop.call_soon_threadsafe(_post_all, mail)
            except RuntimeError:  # the loop was closed and its requests with it
                for _, event in mail:
                    self._inbox.put(functools.partial(self._cancel, event.seq_id))


def _post_all(mail: list[tuple[Mailbox, Event]]) -> None:
    for mailbox, event in mail:
        mailbox.post(event)
