"""Model files on disk: mapping one into memory, recognizing one that is of another kind, telling two models apart.

Owns opening a file without trusting its name. Knows no format.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from edgelm.base.errors import ModelError

DOWNLOAD = "download it again (edgelm pull --verify MODEL)"

SIGNATURES = (
    (b"PK\x03\x04", "is a zip archive, as PyTorch checkpoints are"),
    (b"\x1f\x8b", "is compressed with gzip"),
    (b"\x80\x02", "looks like a pickled PyTorch checkpoint"),
    (b"version https://git-lfs", "is a git-lfs pointer, not the real file"),
    (b"GGUF", "is a GGUF file"),
    (b"tjgg", "is a GGML file from before GGUF"),
    (b"fmgg", "is a GGML file from before GGUF"),
    (b"lmgg", "is a GGML file from before GGUF"),
)
HEAD_BYTES = 2**20  # metadata and tensor offsets
NUM_SAMPLES, SAMPLE_BYTES = 64, 4096  # of the weights: two models of one family differ in every sample


def map_file(path: Path, expected: str) -> mmap.mmap:
    """Map a whole file for reading. Raises ModelError, and nothing else.

    `expected` ends a hint, such as "a .gguf file".
    """
    name = shown(path.name) or shown(str(path))
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ModelError(f"{name} is a folder", f"name {expected}")
        if not stat.S_ISREG(mode):  # a pipe would block
            raise ModelError(f"{name} is not a regular file", f"name {expected}")
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise ModelError(f"{name} is empty", DOWNLOAD)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError(f"there is no file {shown(str(path), 200)}") from None
    except PermissionError:
        raise ModelError(f"{name} may not be read", "change its permissions") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name, or a file truncated to nothing
        raise cannot_open(name, error) from None


def cannot_open(name: str, error: OSError | ValueError) -> ModelError:
    """Return the error for a path that the system refuses."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ModelError(f"{name} cannot be opened: {reason}")


def looks_like(head: bytes, size: int) -> str:
    """Describe in a few words a file of `size` bytes that begins with `head`."""
    for signature, description in SIGNATURES:
        if head.startswith(signature):
            return description
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
    """Return a string from a file, cut and made safe for one line of an error message."""
    if len(text) <= limit and text.isprintable():
        return text
    clean = "".join(c if c.isprintable() else "?" for c in text[: limit + 1])
    return clean if len(clean) <= limit else clean[:limit] + "..."


def file_identity(files: Sequence[Path]) -> Iterator[bytes]:
    """Yield what distinguishes a model from any other without reading it whole: size, time, head and samples.

    Raises OSError where a file cannot be read.
    """
    for path in files:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            yield f"{status.st_size} {status.st_mtime_ns}".encode()
            yield file.read(HEAD_BYTES)
            for sample in range(NUM_SAMPLES):
                file.seek(status.st_size * sample // NUM_SAMPLES)
                yield file.read(SAMPLE_BYTES)
