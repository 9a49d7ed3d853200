"""What was read of model files, each by its version.

Owns how long it holds: a description as long as its file, an error for a while. Reads no file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

RETRY_S = 60.0  # after the first error of a file; twice as long after each further one
MOST_RETRY_S = 3600.0


class Stamp(NamedTuple):
    """The version of a file: a new size or time means new content."""

    path: Path
    nbytes: int
    mtime_ns: int


class _Retry(NamedTuple):
    at: float
    pause_s: float


class Documents:
    """The documents of files.

    The cause of an error may pass: the reader was killed for want of memory, or a drive took too long to wake.
    A file that is damaged fails again, and is read more and more seldom.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._documents: dict[Stamp, dict[str, Any]] = {}
        self._retries: dict[Stamp, _Retry] = {}

    def get(self, stamp: Stamp) -> dict[str, Any]:
        """Return the document of a version; an empty one before it is read."""
        return self._documents.get(stamp, {})

    def is_due(self, stamp: Stamp) -> bool:
        """Return whether a version is to be read: for the first time, or again some time after an error."""
        if stamp not in self._documents:
            return True
        return stamp in self._retries and self._now() >= self._retries[stamp].at

    def due(self, stamps: Iterable[Stamp]) -> list[Stamp]:
        """Return the versions to read; those that failed come last, since they may take long again."""
        return sorted(filter(self.is_due, stamps), key=lambda stamp: stamp in self._retries)

    def keep(self, stamp: Stamp, document: dict[str, Any]) -> None:
        """Keep what was read of a version: `{"error": …}` if it failed."""
        self._documents[stamp] = document
        failed = self._retries.pop(stamp, None)
        if "error" in document:
            pause_s = RETRY_S if failed is None else min(2 * failed.pause_s, MOST_RETRY_S)
            self._retries[stamp] = _Retry(self._now() + pause_s, pause_s)
