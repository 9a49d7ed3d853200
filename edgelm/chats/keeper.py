"""The thread that keeps the chats: the screen hands over what happened and never waits for a disk.

Owns the order of writes, the retries while the file is locked or the disk is full, and the fallback to memory. Knows
nothing of what is written.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from edgelm.chats.store import ChatsError, Store

RETRY_S = 0.5
MAX_BATCH = 1000

T = TypeVar("T")
Write = Callable[[Store], None]


class Keeper:
    """Writes in the order given, many in one transaction; reads between them. A write that fails for a reason that
    passes is tried again until it succeeds, and the ones behind it wait.

    `report` is called on the keeper's thread: with what is wrong, or with None when all is well again.
    """

    def __init__(self, path: Path, report: Callable[[ChatsError | None], None]) -> None:
        self._path = path
        self._report = report
        self._writes: deque[Write] = deque()
        self._reads: deque[tuple[Callable[[Store], Any], Future[Any], int]] = deque()
        self._done = 0  # writes behind us
        self._given = 0
        self._closing = False
        self.in_memory = False  # the file cannot be used: nothing outlives the process
        self.problem: ChatsError | None = None  # why nothing is saved now
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="chats", daemon=True)
        self._thread.start()

    @property
    def unsaved(self) -> int:
        """Return how many writes are still to be done."""
        with self._wake:
            return len(self._writes)

    def write(self, *writes: Write) -> None:
        """Do these after all that was given before."""
        with self._wake:
            assert not self._closing
            self._writes.extend(writes)
            self._given += len(writes)
            self._wake.notify_all()

    def read(self, read: Callable[[Store], T]) -> Future[T]:
        """Return what a call of the store gives after the writes so far, or at once while those cannot be done."""
        future: Future[T] = Future()
        with self._wake:
            if self._closing:
                future.cancel()
                return future
            self._reads.append((read, future, self._given))
            self._wake.notify_all()
        return future

    def close(self, timeout: float) -> int:
        """End the thread when all is written, or after a time; return how many writes are lost."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(timeout)
        return self.unsaved

    def _run(self) -> None:
        store = self._open()
        if store is None:
            return
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._writes or self._reads or self._closing)
                if self._closing and not self._writes:
                    break
                reads = self._take_reads()
                batch = [self._writes[i] for i in range(min(len(self._writes), MAX_BATCH))]
            for read, future in reads:
                _answer(store, read, future)
            if batch and not reads:
                self._save(store, batch)
        store.close()

    def _open(self) -> Store | None:
        """Open the file as soon as it can be, unless we are told to end before; memory where it never will."""
        while True:
            try:
                store = Store(self._path)
            except ChatsError as error:
                if not error.passing:
                    self.in_memory, self.problem = True, error
                    self._report(error)
                    return Store(None)
                self._tell(error)
                with self._wake:
                    if self._wake.wait_for(lambda: self._closing, RETRY_S):
                        return None
            else:
                self._tell(None)
                return store

    def _take_reads(self) -> list[tuple[Callable[[Store], Any], Future[Any]]]:
        ready = [each for each in self._reads if each[2] <= self._done or (self.problem and not self.in_memory)]
        for each in ready:
            self._reads.remove(each)
        return [(read, future) for read, future, _ in ready]

    def _save(self, store: Store, batch: list[Write]) -> bool:
        """Do these writes; say whether they are behind us: done, or given up for a reason that was reported."""
        try:
            with store.transaction():
                for write in batch:
                    write(store)
        except ChatsError as error:
            if error.passing:
                self._tell(error)
                with self._wake:
                    self._wake.wait_for(lambda: self._reads, RETRY_S)
                return False
            if len(batch) > 1:  # find the one that cannot be done
                return all(self._save(store, [write]) for write in batch)
            self._report(error)
        else:
            self._tell(None)
        with self._wake:
            for _ in batch:
                self._writes.popleft()
            self._done += len(batch)
        return True

    def _tell(self, problem: ChatsError | None) -> None:
        if self.in_memory or (problem is None) == (self.problem is None):
            return
        self.problem = problem
        self._report(problem)


def _answer(store: Store, read: Callable[[Store], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(read(store))
    except ChatsError as error:
        future.set_exception(error)
