"""Why the worker of an engine ended, as one line, for every module that starts one.

Owns the files that the engine has mapped, and what counts as a change of them. A file that is deleted, or replaced by
renaming another over it, stays whole for the process that has it mapped, which goes on with the old content. One that
is written into does not: reading past its new end raises SIGBUS.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path

from edgelm.base.errors import EngineError
from edgelm.base.macos_files import is_macos_file
from edgelm.base.workers.parent import Exit

PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<suffix>\.gguf|\.safetensors)", re.DOTALL)
MAX_PARTS = 512


class ModelFiles:
    """The files of a model, and of others in the same process, as they were when this object was made."""

    def __init__(self, *paths: Path) -> None:
        self.name = " or ".join(path.name for path in paths)
        self._paths = paths
        self._before = _stats(paths)

    def rewritten(self) -> bool:
        """Return whether a file that is still in its place was written into."""
        now = _stats(self._paths)
        return any(part in now and _written(before, now[part]) for part, before in self._before.items())

    def replaced(self) -> bool:
        """Return whether a file in one of the places is another one, or new there. One that is gone does not count."""
        return any(_differs(self._before.get(part), stat) for part, stat in _stats(self._paths).items())

    def changed(self) -> bool:
        """Return whether a file is different or gone."""
        now = _stats(self._paths)
        return any(_differs(before, now.get(part)) for part, before in self._before.items())

    def change(self) -> EngineError:
        """Return the error for work on a file that changed."""
        hint = "try again; replace a model that is in use by renaming the new file over it, or delete it first"
        return EngineError(f"{self.name} changed while it was in use", hint)


def exit_reason(end: Exit, files: ModelFiles) -> EngineError:
    """Return the error for an engine process that ended."""
    if files.rewritten() or (end.code == -signal.SIGBUS and files.changed()):
        return files.change()
    if end.code == -signal.SIGBUS:
        hint = "check the disk that holds it"
        return EngineError(f"the engine process was killed by SIGBUS: a part of {files.name} could not be read", hint)
    if end.code == -signal.SIGKILL:
        hint = "memory may have run out: lower --ctx or close other programs"
        return EngineError("the engine process was killed by SIGKILL", hint)
    if end.error:
        return EngineError(end.error)
    last = f" ({end.last_line})" if end.last_line else ""
    return EngineError(f"the engine process {end.how}{last}", "run it again with -v to see llama.cpp's log")


def _files(path: Path) -> list[Path]:
    if (match := PART.fullmatch(path.name)) is not None and int(match["count"]) <= MAX_PARTS:
        count = int(match["count"])
        names = (f"{match['stem']}-{i + 1:05d}-of-{count:05d}{match['suffix']}" for i in range(count))
        return [path.with_name(name) for name in names]
    try:
        if not path.is_dir():
            return [path]
        return sorted(part for part in path.glob("*.safetensors") if not is_macos_file(part.name))
    except OSError:
        return [path]


def _stats(paths: Iterable[Path]) -> dict[Path, os.stat_result]:
    """Return the parts of models that exist."""
    return {part: stat for path in paths for part in _files(path) if (stat := _stat(part)) is not None}


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def _written(before: os.stat_result, now: os.stat_result) -> bool:
    """Return whether this is the same file with another content."""
    return _file(before) == _file(now) and _content(before) != _content(now)


def _differs(before: os.stat_result | None, now: os.stat_result | None) -> bool:
    if before is None or now is None:
        return before is not now
    return (_file(before), _content(before)) != (_file(now), _content(now))


def _file(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _content(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns
