"""Files that are replaced in one step: another process sees the old content or the new one, never a part.

Owns the temporary file and the permissions. Knows nothing of the content.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

PRIVATE = 0o600  # readable by the user alone
FOLDER_ATTEMPTS = 10


def atomic_write(
    path: Path, *parts: bytes | memoryview, mode: int = PRIVATE, on_part: Callable[[], None] = lambda: None
) -> None:
    """Replace a file by these parts, one after the other; `on_part` is called after each. Raises OSError.

    Missing folders are created, the last one private. The umask applies to `mode`. After a crash, a temporary file
    `.NAME.*.tmp` may remain in the folder.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with os.fdopen(_create(temporary, mode), "wb") as file:
            for part in parts:
                file.write(part)
                on_part()
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def atomic_json(path: Path, document: object) -> None:
    """Replace a file by a JSON document. A disk that cannot be written is ignored: the document is computed again."""
    with suppress(OSError):
        atomic_write(path, json.dumps(document).encode())


def read_json(path: Path, max_bytes: int) -> Any:
    """Return a file's JSON document; None if there is no file, or not one that we wrote."""
    try:
        if not path.is_file() or path.stat().st_size > max_bytes:
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _create(path: Path, mode: int) -> int:
    """Create a new file and return its descriptor."""
    for attempt in range(FOLDER_ATTEMPTS):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except FileNotFoundError:  # another process removed the empty folder to make room
            if attempt == FOLDER_ATTEMPTS - 1:
                raise
    raise AssertionError


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some systems refuse it for folders
            raise
    finally:
        os.close(descriptor)
