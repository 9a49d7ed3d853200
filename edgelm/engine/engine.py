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
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import NamedTuple

from edgelm.core import Event, Executor, ExecutorInfo, Matcher, Samples, SamplingParams, Sequence, Stats, Step
from edgelm.engine.clock import StepClock
from edgelm.engine.masks import grammar_masks
from edgelm.engine.scheduler import Scheduler
from edgelm.engine.stream import Mailbox, Stream
from edgelm.errors import BusyError, EdgeLMError, EngineError, SnapshotError

MAX_REQUESTS = 256  # open at one time, running and waiting
WORK_SHARE = 0.02  # of a step's time goes to what the drafter put off
MAX_WORK_S = 0.005
REST_AFTER_S = 30.0  # without a request, before idle prefixes are stored

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


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that the device works on."""

    step: Step
    samples: Samples
    launched: float  # of perf_counter, as all times here
    running: float  # from then on the device has work


class _Unseen(NamedTuple):
    """Prefill that was launched and not waited for."""

    since: float = 0.0
    tokens: int = 0


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
        self._end_lock = threading.Lock()  # of the next
        self._ended = False
        self._ahead: _Flight | None = None  # launched before the step before it was read
        self._read_at = 0.0  # when the last step was read; 0: nothing ran before the next
        self._unseen = _Unseen()
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

    def submit(
        self,
        tokens: list[int],
        params: SamplingParams,
        matcher: Matcher | None = None,
        *,
        past: Seq[int] = (),
        owner: str = "",
    ) -> Stream:
        """Queue a prompt; iterate over the stream, in the running event loop, for its events.

        `past` is what of the conversation is no longer in the prompt, `owner` whose it is: nothing that one owner
        wrote serves another.
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
            seq = Sequence(next(self._ids), list(tokens), len(tokens), params, matcher=matcher, past=past, owner=owner)
            self._open[seq.id] = _Request(seq, mailbox)
            self._inbox.put(lambda: self._scheduler.add(seq))
        return Stream(mailbox, lambda: self._inbox.put(lambda: self._cancel(seq.id)))

    def close(self) -> None:
        """End as `stop` does, and free the executor's memory."""
        self.stop()
        self._executor.close()

    def stop(self) -> None:
        """End the thread after its step, fail what is open, and save what outlives the process. May be called twice."""
        with self._lock:
            self._closing = True
        self._inbox.put(lambda: None)
        if self._thread.ident is not None:
            self._thread.join()
        self._fail_open()
        with self._end_lock:
            if not self._ended:
                self._ended = True
                self._scheduler.close()

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def step(self) -> list[Event] | None:
        """Run one step, and launch the next where that is allowed; return the events. None: there was nothing to do."""
        flight, self._ahead = self._ahead, None
        step = flight.step if flight else None
        try:
            if flight is None:
                step = self._plan()
                if step is None:
                    self._read_at, self._unseen = 0.0, _Unseen()
                    return None
                flight = self._launch(step)
                if self._read_at and step.num_tokens == step.num_rows:
                    self._clock.observe_gap(flight.running - self._read_at)
            return self._finish(flight)
        except SnapshotError as error:
            log.warning("%s; it is computed again", error)
            self._read_at = 0.0
            self._scheduler.recompute()
            return []
        except EdgeLMError as error:
            return self._fail(step, error)
        except Exception as error:  # the one boundary: a failed step is the failure of its requests
            log.exception("a step failed")
            return self._fail(step, EngineError(f"the engine failed: {type(error).__name__}: {error}"))

    def _plan(self) -> Step | None:
        began = time.perf_counter()
        step = self._scheduler.plan()
        for chunk in step.chunks if step else ():
            request = self._open[chunk.seq.id]
            request.started = request.started or began
        return step

    def _launch(self, step: Step) -> _Flight:
        launched = time.perf_counter()  # drafting came before: it is no part of what a row costs
        self._executor.forward(step)
        running = time.perf_counter()
        masks = grammar_masks(step, self.info.num_vocab)
        return _Flight(step, self._executor.sample(step, masks), launched, running)

    def _finish(self, flight: _Flight) -> list[Event]:
        """Launch what can follow a step already, then take what the step sampled."""
        ahead = self._scheduler.plan_ahead(flight.step)
        launched = self._launch_ahead(ahead) if ahead else None
        sampled = flight.samples.read()
        seconds = self._time(flight)
        events = self._scheduler.commit(flight.step, sampled)
        self._ahead = launched
        self._scheduler.work(min(WORK_SHARE * seconds, MAX_WORK_S))
        return events

    def _launch_ahead(self, step: Step) -> _Flight | None:
        try:
            return self._launch(step)
        except EdgeLMError as error:  # the step before it is not concerned; if the reason stays, the next says so
            log.warning("a step could not be launched ahead: %s", error)
            return None

    def _time(self, flight: _Flight) -> float:
        """Return the seconds of a step that was read, and let the clock learn from them.

        Where the device runs by itself, nobody waited for a step that samples nothing: its time is in that of the next.
        """
        began = self._unseen.since or max(flight.launched, self._read_at)
        now = time.perf_counter()
        if self.info.runs_ahead and not flight.step.num_rows:
            self._unseen = _Unseen(began, self._unseen.tokens + flight.step.num_tokens)
        else:
            self._clock.observe(flight.step, now - began, self._unseen.tokens)
            self._read_at, self._unseen = now, _Unseen()
        return now - began

    def _fail(self, step: Step | None, error: EdgeLMError) -> list[Event]:
        """End what a failed step concerns; a request that ended while the step was on its way has its event."""
        self._read_at, self._unseen = 0.0, _Unseen()
        return [event for event in self._scheduler.fail(step, error) if event.seq_id in self._open]

    def _run(self) -> None:
        idle, rested = False, True
        try:
            while not self._closing:
                if not self._take_commands(wait=idle, limit_s=None if rested else REST_AFTER_S) and idle:
                    self._rest()
                    rested = True
                events = self.step()
                rested = rested and events is None
                idle = events is None and not self._scheduler.work(MAX_WORK_S)
                if events:
                    self._deliver(events)
            for seq in [*self._scheduler.running, *self._scheduler.waiting]:
                self._scheduler.abort(seq.id)
            self._ahead = None
            self._rest()
        finally:  # a bug of ours may end the thread: nobody is to wait for it then
            self._fail_open()

    def _fail_open(self) -> None:
        """Close the door and end all requests that are inside."""
        with self._lock:
            self._closing = True
        error = EngineError("the engine was closed")
        self._deliver([Event(seq_id, finish_reason="error", error=error) for seq_id in list(self._open)])

    def _rest(self) -> None:
        """Let idle prefixes outlive the process; what goes wrong then costs them and nothing else."""
        try:
            step = self._scheduler.rest()
            if step:
                self._executor.forward(step)
        except EdgeLMError as error:
            log.warning("idle prefixes are not stored: %s", error)
            self._scheduler.recompute()

    def _take_commands(self, wait: bool, limit_s: float | None = None) -> bool:
        """Do what other threads ask for; False: there was nothing, within the limit if it waits."""
        taken = False
        try:
            self._inbox.get(block=wait, timeout=limit_s)()
            taken = True
            while True:
                self._inbox.get_nowait()()
        except Empty:
            return taken

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
