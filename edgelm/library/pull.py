"""A model from the hub to this disk, whole: what is missing, room for it, several files at a time, and how far it is.

    hub.list_files -> select_files -> (what is here?) -> disk space -> transfers -> links -> refs

Owns that order, the threads and what they tell. A file is fetched under the hub's lock by transfer.py. Prints nothing.
"""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgelm.errors import EdgeLMError
from edgelm.library.events import Event, Fetched, Listed, Progress, Pulled, Retrying, Waiting, Wanted
from edgelm.library.hub import Hub, HubFile, Listing
from edgelm.library.names import HubReference, is_revision, shown
from edgelm.library.publish import CachedRepository
from edgelm.library.selection import Selection, select_files
from edgelm.library.source import CancelledTransferError, Source
from edgelm.library.transfer import Transfer
from edgelm.library.units import size_text

CONNECTIONS = 4
TOLD_S = 0.2  # between two reports of progress
RATE_S = 10.0  # the rate is that of so many seconds
ROOM_BYTES = 2**26  # of the disk: left for others
POLL_S = 0.25  # of a file that another process fetches
STOP_S = 1.0  # for threads to stop; whatever they still hold up, what they wrote is kept

Tell = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a pull would do: the files of the model, and what is here of them."""

    listing: Listing
    selection: Selection
    files: tuple[HubFile, ...]
    repository: CachedRepository

    @property
    def path(self) -> Path:
        """What is run: a GGUF, or the folder."""
        return self.repository.snapshot / self.selection.main

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

    def here(self, file: HubFile) -> int:
        """Return how many bytes of a file are on this disk."""
        if self.repository.is_here(file) or self.repository.has_blob(file):
            return file.size
        return self.repository.part_len(file)

    def missing(self) -> int:
        """Return how many bytes are to be fetched."""
        return sum(file.size - self.here(file) for file in self.files)

    def listed(self) -> Listed:
        wanted = tuple(Wanted(file.path, file.size, self.here(file)) for file in self.files)
        return Listed(self.listing.repository, self.listing.commit, wanted)


def prepare(
    reference: HubReference, hub: Hub, tell: Tell | None = None, cancelled: threading.Event | None = None
) -> Prepared:
    """Ask the hub once, and choose the files. Raises EdgeLMError where there is no such model or no hub."""

    def on_wait(reason: str, wait_s: float) -> None:
        if tell is not None:
            tell(Retrying(reference.repository, reason, wait_s))

    if reference.revision is not None and not is_revision(reference.revision):
        raise EdgeLMError(f"{shown(reference.revision)} is no revision", "give a branch, a tag or a commit")
    listing = hub.list_files(reference.repository, reference.revision, cancelled or threading.Event(), on_wait)
    selection = select_files(reference, {file.path: file.size for file in listing.files})
    chosen = frozenset(selection.files)
    files = tuple(file for file in listing.files if file.path in chosen)
    return Prepared(listing, selection, files, CachedRepository(hub.cache, listing))


def pull(
    reference: HubReference,
    hub: Hub,
    tell: Tell,
    *,
    cancelled: threading.Event | None = None,
    connections: int = CONNECTIONS,
) -> Pulled:
    """Fetch what is missing of a model; `tell` is called in this thread.

    Raises EdgeLMError where it fails and CancelledTransferError where it was cancelled; either way, what came is kept.
    """
    begun = time.monotonic()
    cancelled = threading.Event() if cancelled is None else cancelled
    prepared = prepare(reference, hub, tell, cancelled)
    tell(prepared.listed())
    fetched = 0
    if not all(prepared.repository.is_here(file) for file in prepared.files):
        require_room(prepared)
        fetched = _Crew(prepared, hub, cancelled, connections).work(tell)
    _write(prepared.repository.set_ref, prepared)
    pulled = Pulled(prepared.path, prepared.nbytes, fetched, time.monotonic() - begun)
    tell(pulled)
    return pulled


def require_room(prepared: Prepared) -> None:
    """Raise EdgeLMError where the disk has no room for what is missing."""
    folder = prepared.repository.folder
    free = free_bytes(folder)
    missing = prepared.missing()
    if not has_room(missing, free):
        needed = f"{size_text(missing)} more, with {size_text(ROOM_BYTES)} to spare"
        message = f"{prepared.listing.repository} needs {needed}, and {folder.parent} has {size_text(free)} free"
        raise EdgeLMError(message, "free some space, or set HF_HUB_CACHE to a folder on another disk")


def has_room(missing: int, free: int) -> bool:
    """Tell whether a disk with so many free bytes takes those that are missing."""
    return not missing or missing + ROOM_BYTES <= free


def free_bytes(folder: Path) -> int:
    """Return what the disk of a folder, which need not be there yet, has free. Raises EdgeLMError."""
    try:
        return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free
    except OSError as error:
        message = f"{folder} cannot be used: {error.strerror}"
        raise EdgeLMError(message, "correct its permissions, or set HF_HUB_CACHE to another folder") from None


def _write(step: Callable[[], None], prepared: Prepared) -> None:
    try:
        step()
    except OSError as error:
        message = f"{prepared.repository.folder} cannot be written: {error.strerror}"
        raise EdgeLMError(message, "make it writable, or set HF_HUB_CACHE to another folder") from None


class _Work:
    """A file that is to be fetched, and how far it is."""

    def __init__(self, file: HubFile, here: int) -> None:
        self.file = file
        self.here = here
        self.transfer: Transfer | None = None
        self.waited = False
        self.finished = False

    def done(self) -> int:
        return self.transfer.done if self.transfer is not None else self.here

    def fetched(self) -> int:
        return self.transfer.fetched if self.transfer is not None else 0


class _Crew:
    """The threads that fetch the files of one model."""

    def __init__(self, prepared: Prepared, hub: Hub, cancelled: threading.Event, connections: int) -> None:
        self._prepared = prepared
        self._repository = prepared.repository
        self._cancelled = cancelled  # by the caller, or by us: one file failed, so the others stop
        self._works = [_Work(file, prepared.here(file)) for file in prepared.files]
        # The largest first: the model is here when the last file is.
        self._waiting = deque(sorted(self._works, key=lambda work: -work.file.size))
        self._told: queue.SimpleQueue[Event | Exception] = queue.SimpleQueue()
        self._source = Source(hub, prepared.listing, cancelled)
        self._threads = [
            threading.Thread(target=self._run, name=f"pull-{number}", daemon=True)
            for number in range(min(connections, len(self._works)))
        ]
        self._rate = _Rate()

    def work(self, tell: Tell) -> int:
        """Fetch everything; return the bytes that came over the network."""
        _write(self._repository.make, self._prepared)
        for thread in self._threads:
            thread.start()
        try:
            self._listen(tell)
        finally:  # also when the caller is interrupted
            self._cancelled.set()
            deadline = time.monotonic() + STOP_S
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        return sum(work.fetched() for work in self._works)

    def _listen(self, tell: Tell) -> None:
        """Pass on what the threads tell, until all files are there. Raises the first thing that went wrong."""
        next_report, fetched = 0.0, 0
        while fetched < len(self._works):
            if time.monotonic() >= next_report:
                tell(self._progress())
                next_report = time.monotonic() + TOLD_S
            try:
                told = self._told.get(timeout=TOLD_S)
            except queue.Empty:
                continue
            if isinstance(told, Exception):
                raise told
            fetched += isinstance(told, Fetched)
            tell(told)
        tell(self._progress())

    def _progress(self) -> Progress:
        done = sum(work.done() for work in self._works)
        finished = sum(work.finished for work in self._works)
        rate = self._rate.of(sum(work.fetched() for work in self._works))
        left = self._prepared.nbytes - done
        return Progress(
            done, self._prepared.nbytes, finished, len(self._works), rate, left / rate if rate and left else None
        )

    def _run(self) -> None:
        try:
            while not self._cancelled.is_set():
                try:
                    work = self._waiting.popleft()
                except IndexError:
                    return
                if not self._bring(work):
                    self._waiting.append(work)
                    self._cancelled.wait(POLL_S)
            raise CancelledTransferError
        except (EdgeLMError, CancelledTransferError) as error:
            self._told.put(error)
        except OSError as error:
            self._told.put(EdgeLMError(f"{self._repository.folder} cannot be used: {error.strerror or error}"))
        except Exception as error:  # noqa: BLE001 - a bug of ours: raised again in the caller's thread
            self._told.put(error)

    def _bring(self, work: _Work) -> bool:
        """Bring one file into the snapshot; return False where another process is at it."""
        file = work.file
        if not self._repository.is_here(file):
            with self._repository.lock(file) as is_ours:
                if not is_ours:
                    self._wait_for(work)
                    return False
                if not self._repository.has_blob(file) and not self._repository.is_here(file):
                    work.transfer = Transfer(self._source, file, self._repository.blobs, self._told.put)
                    work.transfer.run()
                if not self._repository.is_here(file):
                    self._repository.link(file)
        work.here = file.size
        work.finished = True
        self._told.put(Fetched(file.path))
        return True

    def _wait_for(self, work: _Work) -> None:
        work.here = self._repository.part_len(work.file)
        if not work.waited:
            work.waited = True
            self._told.put(Waiting(work.file.path))


class _Rate:
    """Bytes a second, of the last seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def of(self, nbytes: int) -> float:
        """Take what came so far, and return the rate."""
        now = time.monotonic()
        self._seen.append((now, nbytes))
        while now - self._seen[0][0] > RATE_S:
            self._seen.popleft()
        then, before = self._seen[0]
        return (nbytes - before) / (now - then) if now > then else 0.0
