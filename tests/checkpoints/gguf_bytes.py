"""Writes GGUF bytes in which any field may be false, and parses valid files to change one field in them.

The gguf library's writer, which the round-trip tests use, writes only what is true.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

from gguf.constants import GGUFValueType as V

from edgelm.checkpoints.gguf import GGUF
from edgelm.checkpoints.gguf_parse import SCALARS, Array

Key = tuple[V, object]  # an array's value is (type of the elements, list)


@dataclass
class RawTensor:
    name: str | bytes
    dims: tuple[int, ...]
    type: int = 0
    data: bytes = b""
    offset: int | None = None  # None: the correct one


@dataclass
class RawGGUF:
    """The content to write. Numbers that are None are computed."""

    keys: dict[str, Key] = field(default_factory=dict)
    tensors: list[RawTensor] = field(default_factory=list)
    version: int = 3
    alignment: int = 32
    num_keys: int | None = None
    num_tensors: int | None = None
    extra_keys: bytes = b""  # raw bytes after the keys; count them in num_keys

    def with_keys(self, **changes: Key | None) -> RawGGUF:
        """Return a copy with some keys changed, or removed where the value is None; `__` stands for a dot."""
        named = {key.replace("__", "."): value for key, value in changes.items()}
        merged = {**self.keys, **named}
        return replace(self, keys={key: value for key, value in merged.items() if value is not None})

    def to_bytes(self) -> bytes:
        num_keys = len(self.keys) if self.num_keys is None else self.num_keys
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        out = bytearray(struct.pack("<4sIQQ", b"GGUF", self.version, num_tensors, num_keys))
        for key, (kind, value) in self.keys.items():
            out += raw_key(key, kind, value)
        out += self.extra_keys
        at = 0
        for tensor in self.tensors:
            offset = at if tensor.offset is None else tensor.offset
            out += text(tensor.name) + struct.pack("<I", len(tensor.dims))
            out += b"".join(struct.pack("<Q", dim) for dim in tensor.dims) + struct.pack("<IQ", tensor.type, offset)
            at += -(-len(tensor.data) // self.alignment) * self.alignment
        for tensor in self.tensors:
            out += bytes(-len(out) % self.alignment) + tensor.data
        return bytes(out)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def raw_value(kind: V, value: object) -> bytes:
    if kind == V.STRING:
        assert isinstance(value, str | bytes)
        return text(value)
    if kind == V.ARRAY:
        assert isinstance(value, tuple)
        of, items = value
        return struct.pack("<IQ", of, len(items)) + b"".join(raw_value(of, item) for item in items)
    return struct.pack(SCALARS[kind], value)


def raw_key(key: str | bytes, kind: V, value: object) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw_value(kind, value)


def types_of_keys(path: Path) -> dict[str, V]:
    """Read the types of the scalar keys, which the reader does not keep."""
    from gguf import GGUFReader

    return {name: field.types[0] for name, field in GGUFReader(path).fields.items() if field.types}


def take_apart(gguf: GGUF) -> RawGGUF:
    """Parse a small file."""
    types = types_of_keys(gguf.path)
    raw = RawGGUF(version=gguf.version)
    for key, value in gguf.metadata.items():
        raw.keys[key] = (types[key], (value.type, list(value)) if isinstance(value, Array) else value)
    for tensor in gguf.tensors.values():
        data = bytes(gguf.tensor_bytes(tensor.name))
        raw.tensors.append(RawTensor(tensor.name, tensor.shape, tensor.type.id, data))
    return raw
