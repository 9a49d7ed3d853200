"""The tools that may always run without a question, in a file of the user's own.

Owns the file. A consent is bound to the `mark` of a tool: another command, description or schema needs a new one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

from edgelm.base.atomic import atomic_write, read_json
from edgelm.base.errors import EdgeLMError

MAX_BYTES = 4 * 2**20


def tool_of(mark: str) -> str:
    """Return `SERVER/TOOL` of a mark."""
    return mark.rpartition(":")[0]


def has_changed(mark: str, allowed: Iterable[str]) -> bool:
    """Tell whether another version of the same tool was allowed, and this one was not."""
    marks = [other for other in allowed if tool_of(other) == tool_of(mark)]
    return bool(marks) and mark not in marks


class Consents:
    """The marks of tools that may always run. Each method reads the file: another chat may have changed it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def marks(self) -> tuple[str, ...]:
        """Return all marks."""
        document = read_json(self._path, MAX_BYTES)
        items = document.get("allowed") if isinstance(document, dict) else None
        return tuple(item for item in items if isinstance(item, str)) if isinstance(items, list) else ()

    def allow(self, mark: str) -> None:
        """Add a mark in place of those of other versions of the tool. Raises EdgeLMError."""
        with self._lock:
            self._write([*(other for other in self.marks() if tool_of(other) != tool_of(mark)), mark])

    def forget(self, server: str) -> int:
        """Remove the marks of a server's tools; return how many there were. Raises EdgeLMError."""
        with self._lock:
            marks = self.marks()
            kept = [mark for mark in marks if not mark.startswith(f"{server}/")]
            if len(kept) < len(marks):
                self._write(kept)
            return len(marks) - len(kept)

    def _write(self, marks: list[str]) -> None:
        import json

        try:
            atomic_write(self._path, json.dumps({"allowed": marks}, indent=1).encode())
        except OSError as error:
            raise EdgeLMError(f"{self._path} cannot be written: {error.strerror}") from None
