"""GGUFs of BERTs whose folder is named instead, kept in the cache for the next process.

Owns that folder of the cache, whose names stand for their content.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack, suppress
from pathlib import Path

KEPT = 4  # files, the last used ones
GGUF = ".gguf"


def with_gguf(model: Path, cache: Path) -> Path:
    """Return the GGUF for the folder of a BERT, and any other model as it is. Raises EdgeLMError."""
    if not model.is_dir():
        return model
    from edgelm.checkpoints.encoder import is_encoder_folder  # most models are GGUFs

    if not is_encoder_folder(model):
        return model
    from edgelm.making.conversion.convert import content_key, convert_folder, open_source
    from edgelm.making.conversion.gguf_file import disk_errors

    with ExitStack() as resources:
        key = content_key(open_source(model, "source", resources), "source")
    file = cache / "converted" / f"{key[:32]}{GGUF}"
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (file.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process that wants the same file waits for it
            if not file.exists():
                convert_folder(model, file)
                _remove_oldest(file.parent)
            os.utime(file)
    return file


def _remove_oldest(folder: Path) -> None:
    """Remove the files that were not used for the longest time."""
    with suppress(OSError):
        files = sorted(folder.glob(f"*{GGUF}"), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in files[KEPT:]:
            file.unlink()
