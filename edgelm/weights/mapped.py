"""Files of models mapped into memory, and what a person is told of one that is not what it should be.

Owns opening without believing a name, and saying what a file is by its first bytes. Knows no format.
"""

from __future__ import annotations

import mmap
import stat
from pathlib import Path

from edgelm.errors import ModelError

DOWNLOAD = "download it again"

SIGNS = (
    (b"PK\x03\x04", "is a zip archive, as PyTorch checkpoints are"),
    (b"\x1f\x8b", "is compressed with gzip"),
    (b"\x80\x02", "looks like a pickled PyTorch checkpoint"),
    (b"version https://git-lfs", "is a git-lfs pointer, which stands for the real file"),
    (b"GGUF", "is a GGUF file"),
    (b"tjgg", "is a GGML file from before GGUF"),
    (b"fmgg", "is a GGML file from before GGUF"),
    (b"lmgg", "is a GGML file from before GGUF"),
)


def map_file(path: Path, wanted: str) -> mmap.mmap:
    """Map a whole file for reading. Raises ModelError, and nothing else.

    `wanted` ends a hint, such as "a .gguf file".
    """
    name = shown(path.name) or shown(str(path))
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ModelError(f"{name} is a folder", f"name {wanted}")
        if not stat.S_ISREG(mode):  # a pipe would block
            raise ModelError(f"{name} is not a regular file", f"name {wanted}")
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise ModelError(f"{name} is empty", DOWNLOAD)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError(f"there is no file {shown(str(path), 200)}") from None
    except PermissionError:
        raise ModelError(f"{name} may not be read", "change its permissions") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte, a file that shrank to nothing
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelError(f"{name} cannot be opened: {reason}") from None


def looks_like(head: bytes, size: int) -> str:
    """Say in a few words what a file is that begins with `head` and has `size` bytes."""
    for sign, what in SIGNS:
        if head.startswith(sign):
            return what
    if len(head) > 9 and int.from_bytes(head[:8], "little") <= size - 8 and head[8:9] == b"{":
        return "is a safetensors file"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "is a web page, so the download went wrong"
    if text.startswith((b"{", b"[")):
        return "is JSON text"
    if not head.strip(b"\0"):
        return "begins with zeros, so the download did not finish"
    return f"begins with {head[:4].hex(' ')}"


def shown(text: str, limit: int = 80) -> str:
    """Return a name that a file gave in a form that is safe in a line of an error message."""
    if len(text) <= limit and text.isprintable():
        return text
    clean = "".join(c if c.isprintable() else "?" for c in text[: limit + 1])
    return clean if len(clean) <= limit else clean[:limit] + "..."
