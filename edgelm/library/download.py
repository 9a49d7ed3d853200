"""The download of one file to the cache: resumed where the last run stopped, and hashed while it is written.

    blobs/<hash>.part        the bytes so far; the next request begins at its length
    blobs/<hash>.part.etag   the server's name for this version, for If-Range
    blobs/<hash>.part.path   the note: the file's path in the repository, and the name pulled, for `edgelm list`
    blobs/<hash>             the whole file, after its checksum was found right

Owns the `.part` file, and trusts no byte of it before the checksum of the whole file is right. The caller holds the
hub's lock of the file. Knows nothing of repositories and of HTTP.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from edgelm.errors import EdgeLMError
from edgelm.library.http_range import (
    CancelledTransferError,
    InterruptedTransferError,
    RangeClient,
    RangeResponse,
    SlownessWatch,
)
from edgelm.library.hub import Backoff, HubFile
from edgelm.library.progress import Checking, Event, Retrying, Wrong, size_text

KEPT = "the downloaded part is kept: run it again to resume"
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
MAX_CHECKSUM_FAILURES = 2
POLL_S = 0.5
READ_BYTES = 2**18  # fits a core's cache
SHA1_LEN = 40


class Download:
    """Downloads one file into the folder `blobs`. Any thread may read `done`."""

    def __init__(
        self, client: RangeClient, file: HubFile, blobs: Path, note: str, report: Callable[[Event], None]
    ) -> None:
        self.done = 0  # bytes in the partial file
        self.fetched = 0  # bytes that came over the network
        self._client = client
        self._file = file
        self._blobs = blobs
        self._note = note
        self._report = report
        self._backoff = Backoff(client.hub.retry, client.cancelled)

    def run(self) -> None:
        """Fetch the missing bytes, check the whole file, and publish it.

        Raises EdgeLMError on failure and CancelledTransferError when cancelled; the bytes so far are kept.
        """
        with PartialFile(self._blobs / f"{self._file.blob}.part", self._file, self._note) as part:
            for _ in range(MAX_CHECKSUM_FAILURES):
                self.done = part.length
                self._fetch_all(part)
                if self._is_right(part):
                    part.publish(self._blobs / self._file.blob)
                    return
                part.truncate(0)
                self._report(Wrong(self._file.path))
            part.remove()
        message = f"{self._file.path} from {self._client.hub.host} has the wrong checksum"
        raise EdgeLMError(message, "run it again later, or choose another repository")

    def _fetch_all(self, part: PartialFile) -> None:
        """Send requests until all bytes are there."""
        while part.length < self._file.size:
            before = part.length
            try:
                self._fetch(part)
            except InterruptedTransferError as error:
                if part.length - before >= self._client.hub.retry.min_bytes:
                    self._backoff.reset()
                self._wait(error)

    def _fetch(self, part: PartialFile) -> None:
        """Request the missing bytes once, and write those that come."""
        etag = part.etag()
        with self._client.open(self._file, part.length, etag) as response:
            if response.start == part.length or etag is None:
                self._write(part, response)
                return
        # The server sends the whole file, as another version. The checksum decides which bytes are right, so retry
        # without If-Range.
        part.set_etag(None)
        with self._client.open(self._file, part.length) as response:
            self._write(part, response)

    def _write(self, part: PartialFile, response: RangeResponse) -> None:
        watch = SlownessWatch(self._client.hub.retry)
        part.set_etag(response.etag)
        at = response.start
        for piece in response.pieces:
            self.fetched += len(piece)
            watch.count(len(piece))
            part.write(at, piece)
            at += len(piece)
            self.done = part.length

    def _wait(self, error: InterruptedTransferError) -> None:
        wait_s = self._backoff.next_wait_s(error.retry_after_s)
        if wait_s is None:
            wish = f", and asks for a wait of {error.retry_after_s:.0f} s" if error.retry_after_s else ""
            message = f"{self._file.path} cannot be downloaded from {self._client.hub.host}: {error.reason}{wish}"
            raise EdgeLMError(message, KEPT if self.done else "run it again later")
        self._report(Retrying(self._file.path, error.reason, wait_s))
        if self._client.cancelled.wait(wait_s):
            raise CancelledTransferError

    def _is_right(self, part: PartialFile) -> bool:
        """Wait for the checksum of the whole file."""
        if not part.hasher.wait(POLL_S):
            self._report(Checking(self._file.path))
            while not part.hasher.wait(POLL_S):
                if self._client.cancelled.is_set():
                    raise CancelledTransferError
        return part.hasher.hexdigest() == self._file.blob


class PartialFile:
    """The bytes so far, from the first one on without a gap."""

    def __init__(self, path: Path, file: HubFile, note: str = "") -> None:
        self.path = path
        self._file = file
        self._etag_path = path.with_name(f"{path.name}.etag")
        self._name_path = path.with_name(f"{path.name}.path")
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.length = os.fstat(self._descriptor).st_size
        if self.length > file.size:  # not of this file
            os.ftruncate(self._descriptor, 0)
            self.length = 0
        self.hasher = FileHasher(self._descriptor, file.blob, file.size, self.length)
        with suppress(OSError):  # on a full disk; only `edgelm list` reads it
            self._name_path.write_text(note or file.path, "utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hasher.stop()
        os.close(self._descriptor)
        if not self.length:
            self.remove()

    def write(self, at: int, piece: bytes) -> None:
        """Write bytes of the file. Bytes that exist already are compared; from the first difference on, new ones win.

        Raises EdgeLMError if the disk is full; the bytes that fit are kept.
        """
        if at < self.length:
            old = os.pread(self._descriptor, min(len(piece), self.length - at), at)
            if piece.startswith(old):
                piece = piece[len(old) :]
            else:
                self.truncate(at)
        view = memoryview(piece)
        while view:
            try:
                # At an offset, not appended: without working locks, two processes write the same bytes twice.
                count = os.pwrite(self._descriptor, view, self.length)
            except OSError as error:
                raise self._write_error(error) from None
            self.length += count
            self.hasher.advance(self.length)
            view = view[count:]

    def truncate(self, length: int) -> None:
        """Keep the first `length` bytes."""
        self.hasher.stop()
        os.ftruncate(self._descriptor, length)
        self.length = length
        self.hasher = FileHasher(self._descriptor, self._file.blob, self._file.size, length)
        if not length:
            self.set_etag(None)

    def etag(self) -> str | None:
        """Return the server's name for the version of these bytes."""
        if not self.length:
            return None
        with suppress(OSError, ValueError):
            text = self._etag_path.read_text("ascii")
            return text if text.isprintable() and text.startswith('"') else None
        return None

    def set_etag(self, etag: str | None) -> None:
        """Store the version for the next run."""
        if etag is None:
            self._etag_path.unlink(missing_ok=True)
        elif etag != self.etag():
            with suppress(OSError, ValueError):  # without it, the checksum alone decides
                self._etag_path.write_text(etag, "ascii")

    def publish(self, blob: Path) -> None:
        """Rename the whole file to its final name."""
        self._remove_notes()
        with suppress(FileNotFoundError):  # without working locks, another process may have renamed it
            self.path.replace(blob)

    def remove(self) -> None:
        """Delete the partial file."""
        self._remove_notes()
        self.path.unlink(missing_ok=True)

    def _remove_notes(self) -> None:
        """Delete the files beside the part, before the part itself: a kill in between leaves none of them."""
        self.set_etag(None)
        self._name_path.unlink(missing_ok=True)

    def _write_error(self, error: OSError) -> EdgeLMError:
        if error.errno not in DISK_FULL:
            return EdgeLMError(f"{self.path} cannot be written: {error.strerror}", KEPT)
        kept = f"{size_text(self.length)} of {size_text(self._file.size)} of {self._file.path} are kept"
        return EdgeLMError(f"the disk of {self.path.parent} is full", f"{kept}: free some space and run it again")


class FileHasher:
    """Hashes the first `size` bytes of an open file while it is still being written, on its own thread.

    written so far   |=========================|
    hashed           |==================|           read back from the file, which the system still caches
    """

    def __init__(self, descriptor: int, blob: str, size: int, written: int) -> None:
        self.hashed = 0
        self._descriptor = descriptor
        self._size = size
        self._hash = new_hash(blob, size)
        self._written = written
        self._changed = threading.Condition()
        self._stopped = False
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="hasher", daemon=True)
        self._thread.start()

    def advance(self, written: int) -> None:
        """Allow the thread to hash the first `written` bytes."""
        with self._changed:
            self._written = written
            self._changed.notify()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; return whether all bytes are hashed. Raises OSError if the file could not be read."""
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def hexdigest(self) -> str:
        """Return the hash of the whole file, after `wait`."""
        assert self.hashed == self._size, "not all bytes are hashed"
        return self._hash.hexdigest()

    def stop(self) -> None:
        """End the thread; the file may be closed afterwards."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        # Reading the file back was measured no slower than a queue from the writer, and is simpler.
        buffer = memoryview(bytearray(READ_BYTES))
        try:
            while self.hashed < self._size and (end := self._next_end()):
                count = os.preadv(self._descriptor, [buffer[: end - self.hashed]], self.hashed)
                if not count:
                    raise OSError(f"the file is shorter than what was written to it: {self.hashed:,} bytes")
                self._hash.update(buffer[:count])
                self.hashed += count
        except OSError as error:
            self._error = error

    def _next_end(self) -> int:
        """Wait for bytes to hash; return their end, or 0 after `stop`."""
        with self._changed:
            self._changed.wait_for(lambda: self._written > self.hashed or self._stopped)
            return 0 if self._stopped else self._written


def new_hash(blob: str, size: int) -> hashlib._Hash:
    """Return the hash that names a blob: git's SHA-1 for a small file, SHA-256 for one in large file storage."""
    if len(blob) == SHA1_LEN:
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    return hashlib.sha256()
