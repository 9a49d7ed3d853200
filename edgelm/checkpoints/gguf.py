"""GGUF files, mapped and read lazily: one file, or the parts of a split model as one.

Owns opening, splits, and refusing files of other kinds. The format itself is in gguf_parse.py; the meaning of the keys
for llama.cpp is in llama_checks.py. Truncating a mapped file kills the process that reads it (SIGBUS).
"""

from __future__ import annotations

import re
import struct
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from edgelm.base.errors import ModelError
from edgelm.checkpoints.files import DOWNLOAD, looks_like, map_file, shown
from edgelm.checkpoints.gguf_parse import Header, Metadata, Tensor, parse_header
from edgelm.checkpoints.values import Values

MAGIC = b"GGUF"
VERSIONS = (2, 3)
HEADER_BYTES = 24
MAX_PARTS = 512
PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
NUMPY_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1"}


class GGUF:
    """An open GGUF model. Arrays, long strings and tensors are read from the mapped file on access."""

    def __init__(self, parts: list[_Part]) -> None:
        first = parts[0]
        self.path = first.path  # llama.cpp opens the first part
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

    @property
    def values(self) -> Values:
        """The keys of the architecture, without its name: `block_count`."""
        return Values(self.metadata, self.name, prefix=f"{self.architecture}.")

    def tensor_bytes(self, name: str) -> memoryview:
        """Return the bytes of a tensor, a view of the mapped file."""
        tensor = self.tensors[name]
        return self._parts[tensor.path].data[tensor.offset : tensor.offset + tensor.nbytes]

    def array(self, name: str) -> NDArray[np.generic]:
        """Return a tensor as the gguf library does: a read-only view of the mapped file, the columns last.

        For a type that numpy does not have, the last dimension is the bytes of a row's blocks.
        """
        tensor = self.tensors[name]
        raw = np.frombuffer(self.tensor_bytes(name), np.uint8)
        numpy_type = NUMPY_TYPES.get(tensor.type.name)
        if numpy_type is None:
            return raw.reshape(*reversed(tensor.shape[1:]), -1)
        return raw.view(numpy_type).reshape(tensor.shape[::-1])

    def dequantized(self, name: str) -> NDArray[np.float32]:
        """Return a tensor as float32, a view if it is F32. Raises ModelError for a type unknown to the gguf library."""
        kind = self.tensors[name].type
        try:
            with np.errstate(all="ignore"):  # a scale may be infinite or NaN
                return quants.dequantize(self.array(name), GGMLQuantizationType(kind.id)).astype(np.float32, copy=False)
        except (NotImplementedError, ValueError):  # ValueError: no such type in the gguf library
            raise ModelError(f"{self.name}: {kind.name} cannot be dequantized") from None

    def close(self) -> None:
        """Unmap the files. A view that is still in use stays valid, and keeps its file mapped."""
        for part in self._parts.values():
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_gguf(path: Path) -> GGUF:
    """Open a GGUF; any part of a split model opens all of it. Raises only ModelError."""
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
        self._map = map_file(path, "a .gguf file")
        self.data = memoryview(self._map)
        self.header: Header

    def parse(self) -> None:
        _require_gguf(self.data, shown(self.path.name))
        self.header = parse_header(self.data, self.path)

    def close(self) -> None:
        with suppress(BufferError):  # a view is in use: the mapping ends with the last one
            self.data.release()
            self._map.close()

    def number(self, key: str) -> int:
        """Return an integer of the split keys, 0 where it is missing."""
        value = self.header.metadata.get(key, 0)
        if not isinstance(value, int) or value < 0:
            raise ModelError(f"{shown(self.path.name)} is damaged: {key} is not a number of parts", DOWNLOAD)
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
        raise ModelError(f"{mine}, but at most {MAX_PARTS} can be read", "merge them with llama-gguf-split")
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
            raise ModelError(
                f"{shown(path.name)} does not belong to {name}", "download both again (edgelm pull --verify MODEL)"
            )
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
    expected = parts[0].number("split.tensors.count")
    if expected and expected != len(seen):
        message = f"the parts of {name} hold {len(seen):,} tensors, but should hold {expected:,}"
        raise ModelError(message, "download them again (edgelm pull --verify MODEL)")


def _require_gguf(data: memoryview, name: str) -> None:
    """Refuse a file of another kind, version or byte order."""
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
        raise ModelError(f"{name} is GGUF version 1, which is too old", "convert it or download a newer file")
    if version & 0xFFFF == 0 and 0 < swapped < 100:
        raise ModelError(f"{name} is a big-endian GGUF, made for another kind of processor", "download a common one")
    if version not in VERSIONS:
        if max(VERSIONS) < version < 100:
            raise ModelError(f"{name} is GGUF version {version}, newer than edgelm supports", "update edgelm")
        raise ModelError(f"{name} is damaged: its version is {version:,}", DOWNLOAD)
