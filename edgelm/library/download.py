"""The download of one file to the cache: resumed where the last run stopped, and hashed while it is written.

    blobs/<hash>.part        the bytes so far
    blobs/<hash>.part.map    with gaps between them: how many bytes of each segment are there
    blobs/<hash>.part.etag   the server's name for this version, for If-Range
    blobs/<hash>.part.path   the note: the file's path in the repository, and the name pulled, for `edgelm list`
    blobs/<hash>             the whole file, after its checksum was found right

Owns the `.part` file, and trusts no byte of it before the checksum of the whole file is right. The caller holds the
hub's lock of the file. Knows nothing of repositories and of HTTP.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import struct
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from edgelm.base.atomic import atomic_write
from edgelm.base.disk import DISK_FULL, TOO_LARGE
from edgelm.base.errors import EdgeLMError
from edgelm.library.http_range import (
    CancelledTransferError,
    InterruptedTransferError,
    RangeClient,
    RangeResponse,
    SlownessWatch,
)
from edgelm.library.hub import Backoff, HubFile, RefusedError
from edgelm.library.hub_cache import read_map
from edgelm.library.progress import Checking, Event, Retrying, Wrong, size_text
from edgelm.library.runnable import HEAD_BYTES

KEPT = "the downloaded part is kept: run it again to resume"
MAX_CHECKSUM_FAILURES = 2
POLL_S = 0.5
READ_BYTES = 2**18  # fits a core's cache
SHA1_LEN = 40
SEGMENT_BYTES = 2**25  # that one connection fetches at a time: some servers limit each connection
JOIN_S = 0.05  # between looks at the segments that other threads fetch

Check = Callable[[bytes], None]


class Download:
    """Downloads one file into the folder `blobs`. Any thread may read `done`, and help."""

    def __init__(
        self,
        client: RangeClient,
        file: HubFile,
        blobs: Path,
        note: str,
        report: Callable[[Event], None],
        check: Check | None = None,
    ) -> None:
        self.done = 0  # bytes in the partial file
        self._client = client
        self._file = file
        self._blobs = blobs
        self._note = note
        self._report = report
        self._check = check
        self._part: PartialFile | None = None
        self._backoff = Backoff(client.hub.retry, client.cancelled)
        self._help_backoff = Backoff(client.hub.retry, client.cancelled)
        self._fetched: Counter[int] = Counter()  # by thread

    @property
    def fetched(self) -> int:
        """The bytes that came over the network."""
        return sum(list(self._fetched.values()))

    def run(self) -> None:
        """Fetch the missing bytes, check the whole file, and publish it.

        Raises EdgeLMError on failure and CancelledTransferError when cancelled; the bytes so far are kept.
        """
        with PartialFile(self._blobs / f"{self._file.blob}.part", self._file, self._note) as part:
            self._inspect(part)
            self._part = part
            for _ in range(MAX_CHECKSUM_FAILURES):
                self.done = part.num_done
                self._fetch_all(part)
                if self._is_right(part):
                    part.publish(self._blobs / self._file.blob)
                    return
                part.truncate(0)
                self._report(Wrong(self._file.path))
            part.remove()
        message = f"{self._file.path} from {self._client.hub.host} has the wrong checksum"
        raise EdgeLMError(message, "run it again later, or choose another repository")

    def help(self) -> bool:
        """Fetch one segment over this thread's connection; return False if there is nothing to do.

        A failure here is no failure of the download: a server may allow fewer connections.
        """
        part = self._part
        if part is None or self._check is not None or (segment := part.claim(helper=True)) is None:
            return False
        before = segment.num_done
        try:
            self._fetch(part, segment)
        except InterruptedTransferError as error:
            if segment.num_done > before:
                self._help_backoff.reset()
            wait_s = self._help_backoff.next_wait_s(error.retry_after_s)
            if wait_s is None:
                part.helpers_end = True
            elif self._client.cancelled.wait(wait_s):
                raise CancelledTransferError from None
        except RefusedError:
            part.helpers_end = True
        finally:
            part.release(segment)
        return True

    def _fetch_all(self, part: PartialFile) -> None:
        """Send requests until all bytes are there."""
        while not part.is_whole:
            segment = part.claim()
            if segment is None:  # other threads fetch the last ones
                if self._client.cancelled.wait(JOIN_S):
                    raise CancelledTransferError
                continue
            before = segment.num_done
            try:
                self._fetch(part, segment)
            except InterruptedTransferError as error:
                if segment.num_done - before >= self._client.hub.retry.min_bytes:
                    self._backoff.reset()
                self._wait(error)
            finally:
                part.release(segment)

    def _fetch(self, part: PartialFile, segment: Segment) -> None:
        """Request the missing bytes of a segment once, and write those that come."""
        etag = part.etag()
        start = segment.start + segment.num_done
        with self._client.open(self._file, start, etag, segment.end) as response:
            if response.start == start and response.end <= segment.end:
                self._write(part, segment, response)
                return
            if etag is None:
                self._write_whole(part, segment, response)
                return
        # The server sends the whole file, as another version. The checksum decides which bytes are right, so retry
        # without If-Range.
        part.set_etag(None)
        with self._client.open(self._file, start, end=segment.end) as response:
            if response.start == start and response.end <= segment.end:
                self._write(part, segment, response)
            else:
                self._write_whole(part, segment, response)

    def _write(self, part: PartialFile, segment: Segment, response: RangeResponse) -> None:
        part.set_etag(response.etag)
        for piece in self._counted(response):
            part.write(segment, piece)
            self.done = part.num_done
            self._inspect(part)

    def _write_whole(self, part: PartialFile, segment: Segment, response: RangeResponse) -> None:
        """Write the answer of a server without ranges, which sends the file from its first byte on."""
        part.helpers_end = True
        if segment.is_helper:
            return
        while part.num_claims > 1:
            if self._client.cancelled.wait(JOIN_S):
                raise CancelledTransferError
        part.drop_gaps()
        part.set_etag(response.etag)
        at = response.start
        for piece in self._counted(response):
            part.write_over(at, piece)
            at += len(piece)
            self.done = part.num_done
            self._inspect(part)

    def _counted(self, response: RangeResponse) -> Iterator[bytes]:
        watch = SlownessWatch(self._client.hub.retry)
        thread = threading.get_ident()
        for piece in response.pieces:
            self._fetched[thread] += len(piece)
            watch.count(len(piece))
            yield piece

    def _inspect(self, part: PartialFile) -> None:
        """Show the first bytes to `check`, once. Its error ends the download, of which nothing stays."""
        if self._check is None or part.length < min(HEAD_BYTES, self._file.size):
            return
        try:
            self._check(part.head(HEAD_BYTES))
        except EdgeLMError:
            part.truncate(0)
            raise
        self._check = None

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


class Segment:
    """A piece of a file that one connection fetches, from its first byte on. Claimed from a PartialFile."""

    def __init__(self, index: int, start: int, end: int, num_done: int) -> None:
        self.index = index
        self.start = start
        self.end = end
        self.num_done = num_done
        self.is_helper = False
        self.descriptor = -1  # of its own: the part may be closed before a slow helper notices


class PartialFile:
    """The bytes so far: segments, each without a gap. Threads may write to the segments that they claimed."""

    def __init__(self, path: Path, file: HubFile, note: str = "") -> None:
        self.path = path
        self.helpers_end = False
        self.num_claims = 0
        self._file = file
        self._etag_path = path.with_name(f"{path.name}.etag")
        self._name_path = path.with_name(f"{path.name}.path")
        self._map_path = path.with_name(f"{path.name}.map")
        self._map: mmap.mmap | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._descriptor).st_size
        if size > file.size:  # not of this file
            os.ftruncate(self._descriptor, 0)
            size = 0
        self._segment_bytes, counts = read_map(path)
        starts = range(0, file.size, self._segment_bytes) if self._segment_bytes else range(0)
        if (
            counts
            and len(starts) == len(counts)
            and all(not count or start + count <= size for start, count in zip(starts, counts, strict=True))
        ):
            self._segments = self._split(counts)
        else:
            self._segment_bytes = SEGMENT_BYTES
            self._segments = self._split_at(size)
        if self._num_beyond():
            self._make_map()
        self.hasher = FileHasher(self._descriptor, file.blob, file.size, self.length)
        with suppress(OSError):  # on a full disk; only `edgelm list` reads it
            self._name_path.write_text(note or file.path, "utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hasher.stop()
        with self._lock:
            self._is_closed = True
            self._close_map()
            os.close(self._descriptor)
        if not self.num_done:
            self.remove()

    @property
    def length(self) -> int:
        """The bytes from the first one on without a gap."""
        for segment in self._segments:
            if segment.start + segment.num_done < segment.end:
                return segment.start + segment.num_done
        return self._file.size

    @property
    def num_done(self) -> int:
        return sum(segment.num_done for segment in self._segments)

    @property
    def is_whole(self) -> bool:
        return self.num_done == self._file.size

    def head(self, count: int) -> bytes:
        """Return the first bytes."""
        return os.pread(self._descriptor, min(count, self.length), 0)

    def claim(self, *, helper: bool = False) -> Segment | None:
        """Return the first segment with missing bytes that no thread fetches; None: there is none."""
        with self._lock:
            if self._is_closed or (helper and self.helpers_end):
                return None
            for segment in self._segments:
                if segment.descriptor < 0 and segment.num_done < segment.end - segment.start:
                    segment.descriptor, segment.is_helper = os.dup(self._descriptor), helper
                    self.num_claims += 1
                    return segment
        return None

    def release(self, segment: Segment) -> None:
        """Give a segment back, whole or not."""
        with self._lock:
            os.close(segment.descriptor)
            segment.descriptor = -1
            self.num_claims -= 1

    def write(self, segment: Segment, piece: bytes) -> None:
        """Write the next bytes of a claimed segment.

        Raises EdgeLMError if the disk is full; the bytes that fit are kept. Raises CancelledTransferError if the part
        was closed, and InterruptedTransferError if a helper must end.
        """
        if segment.is_helper and self.helpers_end:
            raise InterruptedTransferError("the server sends no ranges")
        view = memoryview(piece)
        while view:
            with self._lock:
                if self._is_closed:
                    raise CancelledTransferError
                if self._map is None and self.length < segment.start:
                    self._make_map()
            # At an offset, not appended: without working locks, two processes write the same bytes twice.
            try:
                count = os.pwrite(segment.descriptor, view, segment.start + segment.num_done)
            except OSError as error:
                raise self._write_error(error) from None
            with self._lock:
                if self._is_closed:
                    raise CancelledTransferError
                self._set_done(segment, segment.num_done + count)
                self.hasher.advance(self.length)
            view = view[count:]

    def write_over(self, at: int, piece: bytes) -> None:
        """Write bytes of the file, of which there are no gaps and no other writer.

        Bytes that exist already are compared; from the first difference on, new ones win.
        """
        if at < self.length:
            old = os.pread(self._descriptor, min(len(piece), self.length - at), at)
            if piece.startswith(old):
                piece = piece[len(old) :]
            else:
                self.truncate(at)
        while piece:
            segment = self._segments[self.length // self._segment_bytes]
            room = segment.end - segment.start - segment.num_done
            is_ours = segment.descriptor < 0
            if is_ours:
                segment.descriptor = self._descriptor
            try:
                self.write(segment, piece[:room])
            finally:
                if is_ours:
                    segment.descriptor = -1
            piece = piece[room:]

    def drop_gaps(self) -> None:
        """Keep the bytes before the first gap only."""
        if self._num_beyond():
            self.truncate(self.length)

    def truncate(self, length: int) -> None:
        """Keep the first `length` bytes."""
        self.hasher.stop()
        os.ftruncate(self._descriptor, length)
        with self._lock:
            for segment in self._segments:
                segment.num_done = max(0, min(segment.end, length) - segment.start)
            self._close_map()
            self._map_path.unlink(missing_ok=True)
        self.hasher = FileHasher(self._descriptor, self._file.blob, self._file.size, length)
        if not length:
            self.set_etag(None)

    def etag(self) -> str | None:
        """Return the server's name for the version of these bytes."""
        if not self.num_done:
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
        self._map_path.unlink(missing_ok=True)

    # -- segments ------------------------------------------------------------------------------------------------------

    def _split(self, counts: list[int]) -> list[Segment]:
        starts = range(0, self._file.size, self._segment_bytes)
        ends = [min(start + self._segment_bytes, self._file.size) for start in starts]
        rows = zip(starts, ends, counts, strict=True)
        return [Segment(i, start, end, min(count, end - start)) for i, (start, end, count) in enumerate(rows)]

    def _split_at(self, length: int) -> list[Segment]:
        starts = range(0, self._file.size, self._segment_bytes)
        return self._split([max(0, min(self._segment_bytes, length - start)) for start in starts])

    def _num_beyond(self) -> int:
        """Return the number of bytes behind the first gap."""
        return self.num_done - self.length

    def _set_done(self, segment: Segment, count: int) -> None:
        """Note bytes that are written; in shared memory, so that a killed process loses none of them."""
        segment.num_done = count
        if self._map is not None:
            struct.pack_into("=Q", self._map, 8 * (1 + segment.index), count)

    def _make_map(self) -> None:
        numbers = array("Q", [self._segment_bytes, *(segment.num_done for segment in self._segments)])
        try:
            atomic_write(self._map_path, numbers.tobytes(), mode=0o666)
            with self._map_path.open("r+b") as opened:
                self._map = mmap.mmap(opened.fileno(), 0)
        except OSError as error:
            raise self._write_error(error) from None

    def _close_map(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None

    def _write_error(self, error: OSError) -> EdgeLMError:
        if error.errno == errno.EFBIG:
            message = f"{self.path.parent} takes no file of {size_text(self._file.size)}: {TOO_LARGE}"
            return EdgeLMError(message, "choose another folder: set HF_HUB_CACHE")
        if error.errno not in DISK_FULL:
            return EdgeLMError(f"{self.path} cannot be written: {error.strerror}", KEPT)
        kept = f"{size_text(self.num_done)} of {size_text(self._file.size)} of {self._file.path} are kept"
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
