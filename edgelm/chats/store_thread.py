"""The thread that owns the store: callers queue writes and reads, and never wait for a disk.

Owns the order of writes, how long streamed text waits for more, the retries while the file is locked or the disk is
full, and the fallback to memory. Knows nothing of the content of other writes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from edgelm.chats.store import ChatsError, Store

RETRY_S = 0.5
MAX_BATCH = 1000
GATHER_S = 0.9  # a write costs a page of the file, however short: streamed text waits, and a killed process loses it

T = TypeVar("T")
Write = Callable[[Store], object]


class Writes(Protocol):
    """Takes writes in their order."""

    def write(self, *writes: Write) -> None:
        """Queue writes after all earlier ones."""

    def append(self, message_id: int, text: str, reasoning: str) -> None:
        """Queue a part of a streaming answer, which may wait for more of it."""


@dataclass(slots=True)
class _Part:
    """Streamed text of a message."""

    message_id: int
    text: str
    reasoning: str

    def __call__(self, store: Store) -> None:
        store.append(self.message_id, self.text, self.reasoning)


class _Read(NamedTuple):
    read: Callable[[Store], Any]
    future: Future[Any]
    num_before: int  # writes that were queued before it


class StoreThread:
    """Does writes in their order, many in one transaction, with reads between them. A write that fails for a
    temporary reason is retried until it succeeds; the writes after it wait.

    `report` is called on this thread with each problem, and with None when a temporary one has passed.
    """

    def __init__(self, path: Path, report: Callable[[ChatsError | None], None]) -> None:
        self._path = path
        self._report = report
        self._writes: deque[Write] = deque()
        self._reads: deque[_Read] = deque()
        self._num_taken = 0  # of the queued writes: they are being done
        self._due: float | None = None  # when the queued writes must be done; None: at once
        self._num_done = 0  # writes
        self._num_queued = 0  # writes, those that are done included
        self._closing = False
        self.is_open = False  # reads are answered; until then they wait
        self.in_memory = False  # the file cannot be used: the chats are lost with the process
        self.problem: ChatsError | None = None  # why nothing is saved now
        self._refusal = ""  # why the last write can never be done; empty: it was done
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="chats", daemon=True)
        self._thread.start()

    @property
    def num_unsaved(self) -> int:
        """Return the number of queued writes."""
        with self._wake:
            return len(self._writes)

    def write(self, *writes: Write) -> None:
        """Queue writes after all earlier ones."""
        with self._wake:
            assert not self._closing
            self._writes.extend(writes)
            self._num_queued += len(writes)
            self._due = None
            self._wake.notify_all()

    def append(self, message_id: int, text: str, reasoning: str) -> None:
        """Queue a part of a streaming answer: it is done with what follows within GATHER_S."""
        with self._wake:
            assert not self._closing
            last = self._writes[-1] if len(self._writes) > self._num_taken else None
            if isinstance(last, _Part) and last.message_id == message_id:
                last.text += text
                last.reasoning += reasoning
                return
            if len(self._writes) == self._num_taken:
                self._due = time.monotonic() + GATHER_S
            self._writes.append(_Part(message_id, text, reasoning))
            self._num_queued += 1
            self._wake.notify_all()

    def read(self, read: Callable[[Store], T]) -> Future[T]:
        """Read after the writes queued so far, or at once while the file cannot be written."""
        future: Future[T] = Future()
        with self._wake:
            if self._closing:
                future.cancel()
                return future
            self._reads.append(_Read(read, future, self._num_queued))
            self._wake.notify_all()
        return future

    def close(self, timeout: float) -> int:
        """End the thread when all is written, or after a timeout in seconds; return the number of lost writes."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(timeout)
        return self.num_unsaved

    def _run(self) -> None:
        store = self._open()
        if store is None:
            return
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._writes or self._reads or self._closing)
                while self._due is not None and not (self._reads or self._closing):
                    if (left := self._due - time.monotonic()) <= 0:
                        break
                    self._wake.wait(left)
                self._due = None
                if self._closing and not self._writes:
                    break
                reads = self._take_reads()
                batch = [self._writes[i] for i in range(min(len(self._writes), MAX_BATCH))]
                self._num_taken = 0 if reads else len(batch)
            for request in reads:
                _answer(store, request)
            if batch and not reads:
                self._save(store, batch)
        store.close()

    def _open(self) -> Store | None:
        """Open the file, with retries; a store in memory if it can never be opened, None if the thread ends first."""
        while True:
            try:
                store = Store(self._path)
            except ChatsError as error:
                if not error.temporary:
                    self.is_open, self.in_memory, self.problem = True, True, error
                    self._report(error)
                    return Store(None)
                self._set_problem(error)
                with self._wake:
                    if self._wake.wait_for(lambda: self._closing, RETRY_S):
                        return None
            else:
                self.is_open = True
                self._set_problem(None)
                return store

    def _take_reads(self) -> list[_Read]:
        """Remove and return the reads whose earlier writes are done; all reads while writes cannot be done."""
        blocked = self.problem and not self.in_memory
        ready = [request for request in self._reads if request.num_before <= self._num_done or blocked]
        for request in ready:
            self._reads.remove(request)
        return ready

    def _save(self, store: Store, batch: list[Write]) -> bool:
        """Do these writes; return False where they must be retried. A write that can never be done is reported."""
        try:
            with store.transaction():
                for write in batch:
                    write(store)
        except ChatsError as error:
            if error.temporary:
                self._set_problem(error)
                with self._wake:
                    self._wake.wait_for(lambda: self._reads, RETRY_S)
                return False
            if len(batch) > 1:  # do them one by one, to find the one that fails
                return all(self._save(store, [write]) for write in batch)
            if str(error) != self._refusal:  # an answer to a chat that is gone is a write for each token
                self._report(error)
            self._refusal = str(error)
        else:
            self._refusal = ""
            self._set_problem(None)
        with self._wake:
            for _ in batch:
                self._writes.popleft()
            self._num_done += len(batch)
            self._num_taken -= len(batch)
        return True

    def _set_problem(self, problem: ChatsError | None) -> None:
        if self.in_memory or str(problem) == str(self.problem):
            return
        self.problem = problem
        self._report(problem)


def _answer(store: Store, request: _Read) -> None:
    if not request.future.set_running_or_notify_cancel():
        return
    try:
        request.future.set_result(request.read(store))
    except ChatsError as error:
        request.future.set_exception(error)
