"""The files that an engine has mapped: whether anybody wrote into them, or took them away, since it began.

Owns what counts as a change. A file that is deleted, or replaced by renaming another over it, stays whole for whoever
has it mapped; one that is written into does not, and where it was cut, reading it is SIGBUS.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from edgelm.errors import EngineError

PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<suffix>\.gguf|\.safetensors)", re.DOTALL)
MAX_PARTS = 512


class ModelFiles:
    """The files of a model, as they were when this was made."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._were = {each: found for each in _files(path) if (found := _stat(each)) is not None}

    def rewritten(self) -> bool:
        """Whether somebody wrote into a file that is still in its place."""
        now = ((were, _stat(path)) for path, were in self._were.items())
        return any(found is not None and _same_file(were, found) and _written(were, found) for were, found in now)

    def changed(self) -> bool:
        """Whether a file is not what it was, or not there."""
        now = ((were, _stat(path)) for path, were in self._were.items())
        return any(found is None or not _same_file(were, found) or _written(were, found) for were, found in now)

    def change(self) -> EngineError:
        """Return the error for work on a file that changed."""
        hint = "try again; replace a model that is in use by renaming the new file over it, or delete it first"
        return EngineError(f"{self.name} changed while it was in use", hint)


def _files(path: Path) -> list[Path]:
    if (match := PART.fullmatch(path.name)) is not None and int(match["count"]) <= MAX_PARTS:
        count = int(match["count"])
        names = (f"{match['stem']}-{i + 1:05d}-of-{count:05d}{match['suffix']}" for i in range(count))
        return [path.with_name(name) for name in names]
    try:
        return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    except OSError:
        return [path]


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def _same_file(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def _written(were: os.stat_result, now: os.stat_result) -> bool:
    return (were.st_size, were.st_mtime_ns) != (now.st_size, now.st_mtime_ns)
