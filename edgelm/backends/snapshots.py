"""SnapshotStore: the saved states of idle sequences, in RAM and on their way to and from files.

Owns the bound on their RAM, and the thread that writes files, so that no step waits for a disk. Knows nothing of the
content of a state, and not which snapshot is worth keeping.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.snapshot_files import SnapshotFolder, new_memory
from edgelm.base.errors import SnapshotError
from edgelm.engine.core import OnSaving, Store, StoredPrefix
from edgelm.engine.prefixes import common_len
from edgelm.engine.save_points import dispensable

State = NDArray[np.uint8]

FLUSH_S = 12.0  # how long the end of a process waits for a disk that writes; SAVING_S of base/workers/wire.py is longer
STALLED_S = 1.5  # how long it waits for a disk that writes nothing
REPORT_S = 0.1  # between two reports of progress

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    """A file to write, and the files that it replaces."""

    op: Store
    state: State
    replaced: list[str]


class SnapshotStore:
    """The `Snapshots` of one executor. All methods run on the engine's thread; files are read and written on others.

    Snapshots take at most `limit_bytes` of RAM. States that were dropped while they wait for the disk, or were read to
    be loaded in a step, come on top: one of each, or as many as fit in a quarter more.
    """

    def __init__(self, limit_bytes: int, folder: SnapshotFolder | None = None) -> None:
        self.keeps_files = folder is not None
        self.num_bytes = 0
        self._limit = limit_bytes
        self._folder = folder
        self.divisible = True  # set by the executor: whether a longer state serves every prefix that a shorter one does
        self._states: dict[int, State] = {}
        self._fetched: dict[int, str] = {}  # key of a state that was read: its file
        self._prefetched: tuple[str, Future[State]] | None = None  # a file that another thread reads, or has read
        self._changed = threading.Condition()  # guards the next three
        self._jobs: dict[int, _Job] = {}  # by key, in the order in which they are written
        self._writing: int | None = None  # the key of the one that is being written
        self._stopping = False
        self._writer: threading.Thread | None = None

    # -- for the executor ------------------------------------------------------------------------------------------

    def new_state(self, nbytes: int) -> State | None:
        """Return memory for a state, which `put` keeps; None if there is no room."""
        if self.num_bytes + nbytes > self._limit:
            log.info("there is no room for a snapshot of %d bytes", nbytes)
            return None
        try:
            return new_memory(nbytes)
        except MemoryError:
            log.warning("there is no memory for a snapshot of %d bytes", nbytes)
            return None

    def put(self, key: int, state: State) -> None:
        """Keep a state that `new_state` returned."""
        assert self.num_bytes + state.size <= self._limit
        self._states[key] = state
        self.num_bytes += state.size

    def get(self, key: int) -> State:
        """Return a state. Raises SnapshotError."""
        state = self._states.get(key)
        if state is None:
            raise SnapshotError("a snapshot was not saved: memory is short")
        return state

    def drop(self, key: int) -> None:
        """Forget a snapshot, which may not exist. One that waits for the disk is still written if memory allows it."""
        state = self._states.pop(key, None)
        if state is not None and self._fetched.pop(key, None) is None:
            self.num_bytes -= state.size
            self._bound_dropped(key)

    def refuse(self, key: int) -> None:
        """Forget a snapshot that the executor rejects, and delete its file."""
        name = self._fetched.get(key)
        self.drop(key)
        if name and self._folder:
            self._folder.delete(name, "it does not fit this KV cache")

    def store(self, op: Store) -> None:
        """Queue a snapshot for writing, unless it was not saved."""
        state = self._states.get(op.key)
        if state is None or self._folder is None:
            return
        job = _Job(op, state, self._replaced_by(op))
        with self._changed:
            self._jobs.setdefault(op.key, job)
            self._changed.notify_all()
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="snapshots", daemon=True)
            self._writer.start()

    def close(self) -> None:
        """Drop everything. Snapshots that are not written yet are lost."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._states.clear()
        self._fetched.clear()
        self._prefetched = None
        self.num_bytes = 0

    # -- for the bookkeeper ----------------------------------------------------------------------------------------

    def nbytes(self, key: int) -> int | None:
        state = self._states.get(key)
        return None if state is None else state.size

    def files(self) -> tuple[StoredPrefix, ...]:
        return self._folder.files() if self._folder else ()

    def prefetch(self, name: str) -> bool:
        assert self._folder
        if self._prefetched is None or self._prefetched[0] != name:
            loaded: Future[State] = Future()
            self._prefetched = name, loaded
            threading.Thread(target=self._folder.load, args=(name, loaded), name="snapshot", daemon=True).start()
        return self._prefetched[1].done()

    def drop_prefetched(self) -> None:
        self._prefetched = None

    def fetch(self, name: str, key: int) -> bool:
        loaded = None
        if self._prefetched and self._prefetched[0] == name:
            (_, loaded), self._prefetched = self._prefetched, None
        state = self._folder.read(name, loaded) if self._folder else None
        if state is None:
            return False
        self._states[key] = state
        self._fetched[key] = name
        return True

    def flush(self, on_saving: OnSaving = lambda _: None) -> None:
        if self._folder is None:
            return
        began = moved = time.monotonic()
        before = (self._folder.num_pieces, len(self._jobs))
        with self._changed:
            while self._jobs and (now := time.monotonic()) - began < FLUSH_S and now - moved < STALLED_S:
                self._changed.wait(REPORT_S)
                progress = (self._folder.num_pieces, len(self._jobs))
                if progress != before:
                    before, moved = progress, time.monotonic()
                    on_saving(len(self._jobs))
            if self._jobs:
                log.info("%d conversations were not saved: the disk is too slow", len(self._jobs))

    # -- the writer's thread ---------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        assert self._folder
        self._folder.prune()
        while (job := self._next_job()) is not None:
            op = job.op
            self._folder.write(op.tokens, op.cache_namespace, job.state, op.shared, job.replaced)
            with self._changed:
                del self._jobs[op.key]
                self._writing = None
                self._changed.notify_all()
            del job, op  # frees the state before the wait for the next job

    def _next_job(self) -> _Job | None:
        """Wait for a state to write; None: the store is closed."""
        with self._changed:
            while not self._jobs and not self._stopping:
                self._changed.wait()
            if self._stopping:
                return None
            self._writing = next(iter(self._jobs))
            return self._jobs[self._writing]

    def _bound_dropped(self, key: int) -> None:
        """Give up writing a snapshot that was dropped, if too much memory would wait for the disk."""
        with self._changed:
            if key not in self._jobs or key == self._writing:
                return
            dropped = [job.state.size for other, job in self._jobs.items() if other not in self._states]
            if len(dropped) > 1 and 4 * (self.num_bytes + sum(dropped)) > 5 * self._limit:
                del self._jobs[key]

    def _replaced_by(self, op: Store) -> list[str]:
        """Return the files that are not needed beside the new one: those of its prefixes, as far as it serves them.

        Shared prefixes stay: they are to outlive the conversations that begin with them.
        """
        files = [file for file in self.files() if file.cache_namespace == op.cache_namespace and not file.shared]
        lengths = [(len(file.tokens), common_len(file.tokens, op.tokens)) for file in files]
        if self.divisible:
            indexes = [index for index, (length, common) in enumerate(lengths) if common == length < len(op.tokens)]
        else:
            indexes = dispensable(len(op.tokens), lengths)
        return [files[index].name for index in indexes]
