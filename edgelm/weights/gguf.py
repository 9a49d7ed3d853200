"""GGUF files, mapped and read lazily: one file, or the parts of a split model as one.

Owns opening, splits, and saying what a file is that is no GGUF. The format itself is in gguf_parse.py; what the keys
mean for llama.cpp is in checks.py. A file that is cut while it is mapped kills the process that reads it (SIGBUS).
"""

from __future__ import annotations

import mmap
import re
import stat
import struct
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from edgelm.errors import ModelError
from edgelm.weights.gguf_parse import DOWNLOAD, Array, Header, Metadata, Scalar, Tensor, parse_header, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
HEADER_BYTES = 24
MAX_PARTS = 512
PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
T = TypeVar("T")


class GGUF:
    """An open GGUF model. Arrays, long strings and tensors are read from the mapped file on access."""

    def __init__(self, parts: list[_Part]) -> None:
        first = parts[0]
        self.path = first.path  # of the first part: what llama.cpp opens
        self.paths = tuple(part.path for part in parts)
        self.version = first.header.version
        self.metadata: Metadata = first.header.metadata
        self.size = sum(len(part.data) for part in parts)  # bytes
        self.tensors: dict[str, Tensor] = {}
        for part in parts:
            self.tensors |= part.header.tensors
        self._parts = {part.path: part for part in parts}

    @property
    def name(self) -> str:
        """The name of the (first) file, for messages."""
        return shown(self.path.name)

    @property
    def architecture(self) -> str:
        """Return `general.architecture`. Raises ModelError where there is none."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not re.fullmatch(r"[\w.-]{1,64}", value):
            raise ModelError(f"{self.name} does not say which architecture it has", DOWNLOAD)
        return value

    def get(self, suffix: str, default: T | None = None) -> Scalar | Array | T | None:
        """Return the value of a key that has the architecture before it, such as `block_count`."""
        return self.metadata.get(f"{self.architecture}.{suffix}", default)

    def tensor_bytes(self, name: str) -> memoryview:
        """Return the bytes of a tensor, a view of the mapped file."""
        tensor = self.tensors[name]
        return self._parts[tensor.path].data[tensor.offset : tensor.offset + tensor.nbytes]

    def close(self) -> None:
        """Unmap the files. A view that is still in use stays valid, and its file mapped until the view is gone."""
        for part in self._parts.values():
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_gguf(path: Path) -> GGUF:
    """Open a GGUF; any part of a split model opens all of it. Raises ModelError, and nothing else."""
    with ExitStack() as opened:
        part = _Part(path)
        opened.callback(part.close)
        part.parse()
        parts = _all_parts(part, opened)
        gguf = GGUF(parts)
        opened.pop_all()
        return gguf


class _Part:
    """One mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map_file(path)
        self.data = memoryview(self._map)
        self.header: Header

    def parse(self) -> None:
        _require_gguf(self.data, shown(self.path.name))
        self.header = parse_header(self.data, self.path)

    def close(self) -> None:
        with suppress(BufferError):  # a view lives: the mapping goes with the last one
            self.data.release()
            self._map.close()

    def number(self, key: str) -> int:
        """Return an integer of the split keys, 0 where it is missing."""
        value = self.header.metadata.get(key, 0)
        if not isinstance(value, int) or value < 0:
            raise ModelError(f"{shown(self.path.name)} is damaged: {key} is no number of parts", DOWNLOAD)
        return value


def _all_parts(part: _Part, opened: ExitStack) -> list[_Part]:
    """Open the other parts of a split model, and check that they belong together."""
    count = part.number("split.count")
    if count <= 1:
        return [part]
    name = shown(part.path.name)
    mine = f"{name} is part {part.number('split.no') + 1:,} of {count:,}"
    match = PART_NAME.fullmatch(part.path.name)
    if match is None or (int(match["number"]), int(match["count"])) != (part.number("split.no") + 1, count):
        raise ModelError(f"{mine}, but is not named so", "give each part the name that it was downloaded with")
    if count > MAX_PARTS:
        raise ModelError(f"{mine}, and at most {MAX_PARTS} can be read", "merge them with llama-gguf-split")
    parts = []
    for number in range(1, count + 1):
        path = part.path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf")
        if path == part.path:
            parts.append(part)
            continue
        if not path.exists():
            raise ModelError(f"{shown(path.name)} is missing, and {mine}", "download all parts into one folder")
        other = _Part(path)
        opened.callback(other.close)
        other.parse()
        if (other.number("split.no") + 1, other.number("split.count")) != (number, count):
            raise ModelError(f"{shown(path.name)} does not belong to {name}", "download both again")
        parts.append(other)
    _require_disjoint(parts, name)
    return parts


def _require_disjoint(parts: list[_Part], name: str) -> None:
    seen: set[str] = set()
    for part in parts:
        for tensor in part.header.tensors:
            if tensor in seen:
                raise ModelError(f"{shown(part.path.name)}: tensor {shown(tensor)} is in another part too", DOWNLOAD)
            seen.add(tensor)
    said = parts[0].number("split.tensors.count")
    if said and said != len(seen):
        message = f"the parts of {name} hold {len(seen):,} tensors, and {said:,} are announced"
        raise ModelError(message, "download them again")


def _map_file(path: Path) -> mmap.mmap:
    name = shown(path.name) or shown(str(path))
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ModelError(f"{name} is a folder", "name a .gguf file")
        if not stat.S_ISREG(mode):  # a pipe would block
            raise ModelError(f"{name} is not a regular file", "name a .gguf file")
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


def _require_gguf(data: memoryview, name: str) -> None:
    """Refuse what is no GGUF, or one of a version or byte order that is not read."""
    head = bytes(data[:512])
    if head[:4] != MAGIC and not MAGIC.startswith(head):
        raise ModelError(
            f"{name} is not a GGUF file: it {looks_like(head, len(data))}", "name or download a .gguf file"
        )
    if len(data) < HEADER_BYTES:
        raise ModelError(f"{name} is cut short: it has {len(data):,} bytes", DOWNLOAD)
    (version,) = struct.unpack_from("<I", head, 4)
    (swapped,) = struct.unpack_from(">I", head, 4)
    if version == 1:
        raise ModelError(f"{name} is GGUF version 1, which is no longer read", "convert it, or download a newer file")
    if version & 0xFFFF == 0 and 0 < swapped < 100:
        raise ModelError(f"{name} is a big-endian GGUF, made for another kind of processor", "download a common one")
    if version not in VERSIONS:
        if max(VERSIONS) < version < 100:
            raise ModelError(f"{name} is GGUF version {version}, newer than what edgelm reads", "update edgelm")
        raise ModelError(f"{name} is damaged: its version is {version:,}", DOWNLOAD)


SIGNS = (
    (b"PK\x03\x04", "is a zip archive, as PyTorch checkpoints are"),
    (b"\x1f\x8b", "is compressed with gzip"),
    (b"\x80\x02", "looks like a pickled PyTorch checkpoint"),
    (b"version https://git-lfs", "is a git-lfs pointer, which stands for the real file"),
    (b"tjgg", "is a GGML file from before GGUF"),
    (b"fmgg", "is a GGML file from before GGUF"),
    (b"lmgg", "is a GGML file from before GGUF"),
)


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
