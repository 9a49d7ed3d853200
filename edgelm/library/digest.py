"""The hash of a file that is still being written, on a thread of its own.

    written so far   |=========================|
    hashed           |==================|           read from the file, which the system still has in memory

Owns that thread. Knows nothing of where the bytes come from.
"""

from __future__ import annotations

import hashlib
import os
import threading

READ_BYTES = 2**18  # stays in a core's cache
SHA1_LEN = 40


def new_hash(blob: str, size: int) -> hashlib._Hash:
    """Return the hash whose result a blob's name is: git's of a small file, SHA-256 of one in large file storage."""
    if len(blob) == SHA1_LEN:
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    return hashlib.sha256()


class FileDigest:
    """Hashes the first `size` bytes of an open file, as far as `written` says that they are there."""

    def __init__(self, descriptor: int, blob: str, size: int, written: int) -> None:
        self.hashed = 0
        self._descriptor = descriptor
        self._size = size
        self._hash = new_hash(blob, size)
        self._written = written
        self._changed = threading.Condition()
        self._stopped = False
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="digest", daemon=True)
        self._thread.start()

    def advance(self, written: int) -> None:
        """Go on to the first `written` bytes."""
        with self._changed:
            self._written = written
            self._changed.notify()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all is hashed; return whether it is. Raises OSError where the file could not be read."""
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def hexdigest(self) -> str:
        """Return the hash of the whole, after `wait`."""
        assert self.hashed == self._size, "not all is hashed"
        return self._hash.hexdigest()

    def stop(self) -> None:
        """End the thread; the file may be closed afterwards."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        # Read again rather than handed over by the writer: measured, that was no slower, and it needs no queue.
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
        """Wait for bytes that are not hashed; return where they end, 0 if there is to be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._written > self.hashed or self._stopped)
            return 0 if self._stopped else self._written
