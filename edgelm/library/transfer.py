"""One file from the hub to the cache: continued where the last run stopped, hashed while it is written.

    blobs/<hash>.part        what has come so far; its length is where the next request begins
    blobs/<hash>.part.etag   what the server that sent it calls this version, for If-Range
    blobs/<hash>.part.path   which file of the repository it is, for `edgelm list`
    blobs/<hash>             the whole file, once its hash is right

Owns the `.part`, and believes no byte of it before the hash of the whole is right. The caller holds the hub's lock for
the file. Knows nothing of repositories and of how a server is asked.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from edgelm.errors import EdgeLMError
from edgelm.library.digest import FileDigest
from edgelm.library.events import Checking, Event, Retrying, Wrong
from edgelm.library.hub import HubFile
from edgelm.library.patience import Backoff
from edgelm.library.source import Answer, CancelledTransferError, InterruptedTransferError, SlownessWatch, Source
from edgelm.library.units import size_text

KEPT = "what came is kept: run it again to continue"
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
WRONG_LIMIT = 2
NOTICED_S = 0.5


class Transfer:
    """The fetching of one file into the folder `blobs`. `done` may be read by any thread."""

    def __init__(self, source: Source, file: HubFile, blobs: Path, tell: Callable[[Event], None]) -> None:
        self.done = 0  # bytes that are in the part
        self.fetched = 0  # bytes that came over the network
        self._source = source
        self._file = file
        self._blobs = blobs
        self._tell = tell
        self._backoff = Backoff(source.hub.patience, source.cancelled)

    def run(self) -> None:
        """Fetch what is missing, check the whole, and put it in its place.

        Raises EdgeLMError where that fails, CancelledTransferError where it is no longer wanted: what came is kept.
        """
        with Part(self._blobs / f"{self._file.blob}.part", self._file) as part:
            for _ in range(WRONG_LIMIT):
                self.done = part.length
                self._complete(part)
                if self._is_right(part):
                    part.publish(self._blobs / self._file.blob)
                    return
                part.cut(0)
                self._tell(Wrong(self._file.path))
            part.remove()
        message = f"what {self._source.hub.host} sends as {self._file.path} is not what it lists (its hash differs)"
        raise EdgeLMError(message, "run it again later, or take another repository")

    def _complete(self, part: Part) -> None:
        """Ask until all bytes are there."""
        while part.length < self._file.size:
            before = part.length
            try:
                self._continue(part)
            except InterruptedTransferError as stop:
                if part.length - before >= self._source.hub.patience.least_bytes:
                    self._backoff.progressed()
                self._pause(stop)

    def _continue(self, part: Part) -> None:
        """Ask once for what is missing, and take what comes."""
        etag = part.etag()
        with self._source.open(self._file, part.length, etag) as answer:
            if answer.start == part.length or etag is None:
                self._take(part, answer)
                return
        # The whole file came, as another version: but which bytes are right, the hash decides. Ask without If-Range.
        part.set_etag(None)
        with self._source.open(self._file, part.length) as answer:
            self._take(part, answer)

    def _take(self, part: Part, answer: Answer) -> None:
        watch = SlownessWatch(self._source.hub.patience)
        part.set_etag(answer.etag)
        at = answer.start
        for piece in answer.pieces:
            self.fetched += len(piece)
            watch.count(len(piece))
            part.put(at, piece)
            at += len(piece)
            self.done = part.length

    def _pause(self, stop: InterruptedTransferError) -> None:
        wait_s = self._backoff.next_wait_s(stop.asked_s)
        if wait_s is None:
            asked = f", and asks to wait {stop.asked_s:.0f} s" if stop.asked_s else ""
            message = f"{self._file.path} does not come from {self._source.hub.host}: {stop.why}{asked}"
            raise EdgeLMError(message, KEPT if self.done else "run it again later")
        self._tell(Retrying(self._file.path, stop.why, wait_s))
        if self._source.cancelled.wait(wait_s):
            raise CancelledTransferError

    def _is_right(self, part: Part) -> bool:
        """Wait for the hash of the whole."""
        if not part.digest.wait(NOTICED_S):
            self._tell(Checking(self._file.path))
            while not part.digest.wait(NOTICED_S):
                if self._source.cancelled.is_set():
                    raise CancelledTransferError
        return part.digest.hexdigest() == self._file.blob


class Part:
    """The file that holds what has come so far, from its first byte on without a gap."""

    def __init__(self, path: Path, file: HubFile) -> None:
        self.path = path
        self._file = file
        self._etag_path = path.with_name(f"{path.name}.etag")
        self._name_path = path.with_name(f"{path.name}.path")
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.length = os.fstat(self._descriptor).st_size
        if self.length > file.size:  # of no use for this file
            os.ftruncate(self._descriptor, 0)
            self.length = 0
        self.digest = FileDigest(self._descriptor, file.blob, file.size, self.length)
        with suppress(OSError):  # a full disk: nobody but `edgelm list` misses it
            self._name_path.write_text(file.path, "utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.digest.stop()
        os.close(self._descriptor)
        if not self.length:
            self.remove()

    def put(self, at: int, piece: bytes) -> None:
        """Write bytes of the file. Those that are there already are compared: from a difference on, the new ones count.

        Raises EdgeLMError where the disk is full; what fitted is kept.
        """
        if at < self.length:
            known = os.pread(self._descriptor, min(len(piece), self.length - at), at)
            if piece.startswith(known):
                piece = piece[len(known) :]
            else:
                self.cut(at)
        view = memoryview(piece)
        while view:
            try:
                # At an offset, not at the end: where locks do not work, two processes write the same bytes twice.
                count = os.pwrite(self._descriptor, view, self.length)
            except OSError as error:
                raise self._full(error) from None
            self.length += count
            self.digest.advance(self.length)
            view = view[count:]

    def cut(self, length: int) -> None:
        """Keep the first `length` bytes."""
        self.digest.stop()
        os.ftruncate(self._descriptor, length)
        self.length = length
        self.digest = FileDigest(self._descriptor, self._file.blob, self._file.size, length)
        if not length:
            self.set_etag(None)

    def etag(self) -> str | None:
        """Return what the sender of these bytes called their version."""
        if not self.length:
            return None
        with suppress(OSError, ValueError):
            text = self._etag_path.read_text("ascii")
            return text if text.isprintable() and text.startswith('"') else None
        return None

    def set_etag(self, etag: str | None) -> None:
        """Remember the version for the next run."""
        if etag is None:
            self._etag_path.unlink(missing_ok=True)
        elif etag != self.etag():
            with suppress(OSError, ValueError):  # without it, the hash alone decides
                self._etag_path.write_text(etag, "ascii")

    def publish(self, blob: Path) -> None:
        """Put the whole file in its place, at once."""
        self._forget()
        with suppress(FileNotFoundError):  # another process did, where locks do not work
            self.path.replace(blob)

    def remove(self) -> None:
        """Forget what came."""
        self._forget()
        self.path.unlink(missing_ok=True)

    def _forget(self) -> None:
        """Remove what is beside the part: before the part goes, so that a kill in between leaves nothing behind."""
        self.set_etag(None)
        self._name_path.unlink(missing_ok=True)

    def _full(self, error: OSError) -> Exception:
        if error.errno not in FULL:
            return EdgeLMError(f"{self.path} cannot be written: {error.strerror}", KEPT)
        kept = f"{size_text(self.length)} of {size_text(self._file.size)} of {self._file.path} are kept"
        return EdgeLMError(f"the disk of {self.path.parent} is full", f"{kept}: free some space and run it again")
