"""Where a running front is found: `front.json` in the runtime folder.

Owns that file. A front that died leaves one behind, which is ignored and overwritten.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

FILE = "front.json"
MAX_BYTES = 4096


class FrontRecord(NamedTuple):
    """A front that says it runs."""

    pid: int
    address: str


def find_front(runtime: Path) -> FrontRecord | None:
    """Return the front whose process lives; whether it answers is for the caller to see."""
    try:
        with (runtime / FILE).open("rb") as file:
            data = json.loads(file.read(MAX_BYTES))
        record = FrontRecord(int(data["pid"]), str(data["address"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return record if is_alive(record.pid) else None


@contextmanager
def announced(runtime: Path, record: FrontRecord) -> Iterator[None]:
    """Let others find this front while the block runs, unless they find another already."""
    if find_front(runtime) is None:
        _write(runtime / FILE, record)
    try:
        yield
    finally:
        if find_front(runtime) == record:
            with suppress(OSError):
                (runtime / FILE).unlink(missing_ok=True)


def is_alive(pid: int) -> bool:
    """Return whether there is a process with that id."""
    if pid <= 0:  # these would name groups of processes
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _write(path: Path, record: FrontRecord) -> None:
    """Write the file at once, readable for the user alone; a folder that is full costs only the being found."""
    with suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # mode 0600
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(record._asdict(), file)
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
