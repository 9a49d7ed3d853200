"""Large files that are written bit by bit: the name of the unfinished file, and the space on its disk.

Knows nothing of the content. Small files that are replaced in one step are in atomic.py.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from edgelm.base.errors import EdgeLMError

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
TOO_LARGE = "the file system, or a limit (ulimit -f), does not allow files so large"  # EFBIG
SPARE_BYTES = 2**26  # that stay free


def unfinished(path: Path) -> Path:
    """Return where a file is written until it is whole: hidden, in its folder, so that renaming it takes one step."""
    return path.with_name(f".{path.name}.part")


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet. Raises OSError."""
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def require_space(folder: Path, num_bytes: int, file: str) -> None:
    """Raise EdgeLMError if a file of this size does not fit on the disk of a folder, or the disk cannot be asked."""
    try:
        free = free_bytes(folder)
    except OSError as error:
        raise EdgeLMError(f"{folder} cannot be used: {error.strerror}", "choose another folder") from None
    if num_bytes + SPARE_BYTES > free:
        raise EdgeLMError(
            f"{file} will take {_size(num_bytes)}, and {folder} has {_size(free)} free",
            "free some space, or choose a folder on another disk",
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
