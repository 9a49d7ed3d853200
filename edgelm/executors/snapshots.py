"""SnapshotStore: the bytes of idle sequences, in RAM and on their way to and from files.

Owns the bound on what they take in RAM and the thread that writes files, so that no step waits for a disk. Knows
nothing of llama.cpp or of which snapshot is worth keeping.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgelm.core import Store, StoredPrefix
from edgelm.errors import SnapshotError
from edgelm.executors.snapshot_files import SnapshotFolder

State = NDArray[np.uint8]

FLUSH_S = 1.5  # what the end of a process waits for the disk: a parent gives it 2 s

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    """A file to write, and those that it replaces."""

    op: Store
    state: State
    replaced: list[str]


class SnapshotStore:
    """The `Snapshots` of one executor. All but the writing happens on the engine's thread.

    In RAM, snapshots take at most `limit_bytes`. What is being written, or was read to be loaded in the same step,
    comes on top: one of each, or as many as fit a quarter of the limit.
    """

    def __init__(self, limit_bytes: int, folder: SnapshotFolder | None = None) -> None:
        self.keeps_files = folder is not None
        self.num_bytes = 0
        self._limit = limit_bytes
        self._folder = folder
        self.divisible = True  # the executor knows: whether a longer state serves all that a shorter one would
        self._states: dict[int, State] = {}
        self._fetched: dict[int, str] = {}  # keys of what was read: its file
        self._lock = threading.Lock()  # of the next two
        self._leaving: dict[int, int] = {}  # keys of what is being written: bytes
        self._stopping = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None

    # -- for the executor ------------------------------------------------------------------------------------------

    def has_room(self, nbytes: int) -> bool:
        return self.num_bytes + nbytes <= self._limit

    def put(self, key: int, state: State) -> None:
        """Keep a state for which there is room."""
        assert self.has_room(state.size)
        self._states[key] = state
        self.num_bytes += state.size

    def get(self, key: int) -> State:
        """Return a state. Raises SnapshotError."""
        state = self._states.get(key)
        if state is None:
            raise SnapshotError("a snapshot was not saved: memory is short")
        return state

    def drop(self, key: int) -> None:
        """Forget a snapshot, which may not exist; what is being written is written all the same."""
        state = self._states.pop(key, None)
        if state is not None and self._fetched.pop(key, None) is None:
            self.num_bytes -= state.size

    def refuse(self, key: int) -> None:
        """Forget a snapshot that cannot be brought back, and its file."""
        name = self._fetched.get(key)
        self.drop(key)
        if name and self._folder:
            self._folder.delete(name, "llama.cpp does not take it")

    def store(self, op: Store) -> None:
        """Have a snapshot written, unless it was not saved or too much is being written already."""
        state = self._states.get(op.key)
        if state is None or self._folder is None:
            return
        with self._lock:
            leaving = sum(self._leaving.values())
            if op.key in self._leaving or (leaving and 4 * (leaving + state.size) > self._limit):
                return
            self._leaving[op.key] = state.size
        self._jobs.put(_Job(op, state, self._replaced_by(op)))
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="snapshots", daemon=True)
            self._writer.start()

    def close(self) -> None:
        """Let go of everything; what is not written by then is lost."""
        self._stopping = True
        self._jobs.put(None)
        self._states.clear()
        self._fetched.clear()
        self.num_bytes = 0

    # -- for the bookkeeper ----------------------------------------------------------------------------------------

    def nbytes(self, key: int) -> int | None:
        state = self._states.get(key)
        return None if state is None else state.size

    def files(self) -> tuple[StoredPrefix, ...]:
        return self._folder.files() if self._folder else ()

    def fetch(self, name: str, key: int) -> bool:
        state = self._folder.read(name) if self._folder else None
        if state is None:
            return False
        self._states[key] = state
        self._fetched[key] = name
        return True

    def flush(self) -> None:
        until = time.monotonic() + FLUSH_S
        while self._leaving and time.monotonic() < until:
            time.sleep(0.005)

    # -- the writer's thread ---------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        assert self._folder
        self._folder.prune()
        while (job := self._jobs.get()) is not None:
            if not self._stopping and self._folder.write(job.op.tokens, job.op.owner, job.state):
                self._folder.remove(job.replaced)
            with self._lock:
                del self._leaving[job.op.key]
            del job

    def _replaced_by(self, op: Store) -> list[str]:
        """Return the files that hold a beginning of what is about to be written."""
        if not self.divisible:
            return []
        return [
            each.name
            for each in self.files()
            if each.owner == op.owner
            and len(each.tokens) < len(op.tokens)
            and np.array_equal(each.tokens, op.tokens[: len(each.tokens)])
        ]
