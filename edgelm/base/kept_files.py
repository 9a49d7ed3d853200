"""Files of a cache folder that go: those that are too old, or too many. A disk that refuses is ignored."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path


def delete_older(folder: Path, age_s: float, *patterns: str) -> None:
    """Delete the files with these names that were not changed for so long."""
    with suppress(OSError):
        for path in [path for pattern in patterns for path in folder.glob(pattern)]:
            if path.stat().st_mtime < time.time() - age_s:
                path.unlink(missing_ok=True)


def keep_newest(folder: Path, count: int, pattern: str = "*") -> None:
    """Delete all files with such names but the last changed ones."""
    with suppress(OSError):
        for path in sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)[count:]:
            path.unlink(missing_ok=True)
