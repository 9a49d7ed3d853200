"""When each model was used last: a file's times do not say it, since many disks keep no access times.

Owns a folder with one small file for each model, whose own time is that of the last use: nothing to lose, nothing to
lock. Knows nothing of models but their paths.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

FOLDER = "used"


def note_use(data: Path, model: Path) -> None:
    """Note that a model is used now. A folder that cannot be written costs only the note."""
    with suppress(OSError):
        file = _file(data, model)
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as out:
            out.write(os.fsencode(os.path.realpath(model)) + b"\n")  # for a person who wonders what this is
        os.utime(file)


def last_use(data: Path, model: Path) -> float | None:
    """Return when a model was used last, in seconds since 1970; None: never, as far as is known."""
    try:
        return _file(data, model).stat().st_mtime
    except OSError:
        return None


def forget_use(data: Path, model: Path) -> None:
    """Remove the note of a model. Call it while the file is there: its real path is the key."""
    with suppress(OSError):
        _file(data, model).unlink()


def _file(data: Path, model: Path) -> Path:
    key = hashlib.sha256(os.fsencode(os.path.realpath(model))).hexdigest()
    return data / FOLDER / key[:32]
