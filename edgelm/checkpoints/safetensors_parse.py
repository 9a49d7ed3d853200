"""The safetensors format: the header of a file, and the index of a model's shards.

The bytes are untrusted: no offset, length, shape or type is used before it is checked against the bytes that exist.
Knows nothing of which files belong together.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from edgelm.base.errors import ModelError
from edgelm.checkpoints.files import DOWNLOAD, looks_like, shown
from edgelm.checkpoints.json_scan import JSONScan

SUFFIX = ".safetensors"
METADATA = "__metadata__"
LENGTH_BYTES = 8  # before the header
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_TENSORS = 150_000  # Kimi-K2 has 140,000
MAX_NAME_BYTES = 512
MAX_ENTRY_BYTES = 4096  # of one tensor in the header
MAX_METADATA_KEYS = 2**14
MAX_METADATA_BYTES = 2**22
MAX_DIMS = 32
MAX_ELEMENTS = 2**60
INDEX_KEY_BYTES = 256


class Dtype(NamedTuple):
    """The type of a tensor's numbers. `numpy` is its type there, or that of the raw bits where numpy has none."""

    name: str
    bits: int
    numpy: str


DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("BOOL", 8, "?"),
        Dtype("F4", 4, "u1"),  # two in a byte
        Dtype("F6_E2M3", 6, "u1"),  # four in three bytes
        Dtype("F6_E3M2", 6, "u1"),
        Dtype("U8", 8, "u1"),
        Dtype("I8", 8, "i1"),
        Dtype("F8_E5M2", 8, "u1"),
        Dtype("F8_E4M3", 8, "u1"),
        Dtype("F8_E8M0", 8, "u1"),
        Dtype("F8_E5M2FNUZ", 8, "u1"),
        Dtype("F8_E4M3FNUZ", 8, "u1"),
        Dtype("U16", 16, "<u2"),
        Dtype("I16", 16, "<i2"),
        Dtype("F16", 16, "<f2"),
        Dtype("BF16", 16, "<u2"),
        Dtype("U32", 32, "<u4"),
        Dtype("I32", 32, "<i4"),
        Dtype("F32", 32, "<f4"),
        Dtype("U64", 64, "<u8"),
        Dtype("I64", 64, "<i8"),
        Dtype("F64", 64, "<f8"),
        Dtype("C64", 64, "<c8"),
    )
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """The place of a tensor. `shape` is in the order of torch and numpy: the columns last."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    offset: int  # from the start of its file
    nbytes: int
    path: Path  # the file that holds it

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class Header(NamedTuple):
    """The header of one file."""

    metadata: dict[str, str]
    tensors: dict[str, Tensor]


def parse_header(data: memoryview, path: Path) -> Header:
    """Parse the header of a whole file. Raises ModelError for anything that cannot be true."""
    name = shown(path.name)
    head = bytes(data[:512])
    length = struct.unpack_from("<Q", head)[0] if len(head) > LENGTH_BYTES else 0
    if head[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{":
        message = f"{name} is not a safetensors file: it {looks_like(head, len(data))}"
        raise ModelError(message, "name or download a .safetensors file")
    if length > MAX_HEADER_BYTES:
        raise ModelError(f"{name} is damaged: it claims a header of {length:,} bytes", DOWNLOAD)
    start = LENGTH_BYTES + length
    if start > len(data):
        message = f"its header ends at byte {start:,} of {len(data):,}"
        raise ModelError(f"{name} is cut short: {message}", DOWNLOAD)
    scan = JSONScan(data, LENGTH_BYTES, start, name)
    metadata: dict[str, str] | None = None
    tensors: dict[str, Tensor] = {}
    for key in scan.members(MAX_NAME_BYTES):
        if key == METADATA:
            if metadata is not None:
                raise scan.damaged(f"{METADATA} is there twice")
            metadata = _metadata(scan)
            continue
        if not key or not key.isprintable():
            raise scan.damaged(f"the name of tensor {len(tensors) + 1:,} is not printable text")
        if key in tensors:
            raise scan.damaged(f"tensor {shown(key)} is there twice")
        if len(tensors) == MAX_TENSORS:
            raise scan.damaged(f"it has more than {MAX_TENSORS:,} tensors")
        tensors[key] = _tensor(scan, key, start, path)
    scan.finish()
    _require_gapless(tensors, start, len(data), scan)
    return Header(metadata or {}, tensors)


def parse_index(data: memoryview, path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each tensor and of its file from an index. Raises ModelError on the way."""
    name = shown(path.name)
    if bytes(data[:1]) not in (b"{", b" ", b"\n", b"\r", b"\t"):
        raise ModelError(f"{name} is not an index: it {looks_like(bytes(data[:512]), len(data))}", DOWNLOAD)
    scan = JSONScan(data, 0, len(data), name)
    scan.skip_space()
    count, seen = 0, False
    for key in scan.members(INDEX_KEY_BYTES):
        if key != "weight_map":
            scan.skip()
            continue
        if seen:
            raise scan.damaged("weight_map is there twice")
        seen = True
        for tensor in scan.members(MAX_NAME_BYTES):
            count += 1
            if count > MAX_TENSORS:
                raise scan.damaged(f"it has more than {MAX_TENSORS:,} tensors")
            yield tensor, _file_name(scan)
    scan.finish()
    if not count:
        raise scan.damaged("it names no tensors")


def _metadata(scan: JSONScan) -> dict[str, str]:
    start = scan.at
    metadata: dict[str, str] = {}
    if bytes(scan.data[start : start + 4]) == b"null":  # the format's own reader accepts it
        scan.skip()
        if scan.at - start > 4:
            raise scan.invalid()
        return metadata
    for key in scan.members(MAX_METADATA_BYTES):
        if key in metadata:
            raise scan.damaged(f"{METADATA} has {shown(key)} twice")
        metadata[key] = scan.string(MAX_METADATA_BYTES)
        if len(metadata) > MAX_METADATA_KEYS or scan.at - start > MAX_METADATA_BYTES:
            raise scan.damaged(f"{METADATA} is too large")
    return metadata


def _tensor(scan: JSONScan, name: str, start: int, path: Path) -> Tensor:
    """Read a tensor's entry in the header; its offsets are counted from `start`."""
    entry = scan.flat(MAX_ENTRY_BYTES)
    label = f"tensor {shown(name)}"
    type_name, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(type_name, str):
        raise scan.damaged(f"{label} has no type")
    dtype = DTYPES.get(type_name)
    if dtype is None:
        hint = f"update edgelm, or {DOWNLOAD} if it is damaged"
        raise ModelError(f"{scan.source}: {label} has the unsupported type {shown(type_name, 20)}", hint)
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        raise scan.damaged(f"{label} has no shape of at most {MAX_DIMS} sizes")
    if math.prod(size or 1 for size in shape) > MAX_ELEMENTS:
        raise scan.damaged(f"{label} is larger than any memory")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise scan.damaged(f"{label} has no start and end offset")
    begin, end = offsets
    if start + end > len(scan.data):
        message = f"{label} ends at byte {start + end:,} of {len(scan.data):,}"
        raise ModelError(f"{scan.source} is cut short or damaged: {message}", DOWNLOAD)
    if math.prod(shape) * dtype.bits != 8 * (end - begin):
        sizes = " x ".join(map(str, shape)) or "one number"
        raise scan.damaged(f"{label} has {end - begin:,} bytes, which is not {sizes} in {type_name}")
    return Tensor(name, tuple(shape), dtype, start + begin, end - begin, path)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _require_gapless(tensors: dict[str, Tensor], start: int, size: int, scan: JSONScan) -> None:
    """Check that the tensors follow each other without a gap, from the header to the end of the file."""
    end, previous = start, "the header"
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        label = f"tensor {shown(tensor.name)}"
        if tensor.offset < end:
            raise scan.damaged(f"{label} overlaps {previous}")
        if tensor.offset > end:
            raise scan.damaged(f"{tensor.offset - end:,} bytes between {previous} and {label} belong to no tensor")
        end, previous = tensor.offset + tensor.nbytes, label
    if end < size:
        raise scan.damaged(f"{size - end:,} bytes after {previous} belong to no tensor")


def _file_name(scan: JSONScan) -> str:
    """Read the name of a shard: a file beside the index, never a path."""
    name = scan.string(INDEX_KEY_BYTES)
    if not name.endswith(SUFFIX) or not name.isprintable() or set("/\\:") & set(name):
        raise scan.damaged(f"it names {shown(name)}, which is not a {SUFFIX} file beside it")
    return name
