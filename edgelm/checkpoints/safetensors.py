"""Safetensors files, mapped and read lazily: one file, or the shards of a model as one.

Owns the format, and which files belong together: a folder, its index, its shards. The bytes are untrusted: no offset,
length, shape or type is used before it is checked against the bytes that exist. Knows nothing of what the tensors are
for; config.json is in config_json.py. Truncating a mapped file kills the process that reads it (SIGBUS).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeGuard

import numpy as np
from numpy.typing import NDArray

from edgelm.checkpoints.files import DOWNLOAD, cannot_open, looks_like, map_file, shown
from edgelm.checkpoints.json_scan import JSONScan
from edgelm.errors import ModelError

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors", re.DOTALL)
EXPECTED = "a .safetensors file, or the folder of a model"
METADATA = "__metadata__"
LENGTH_BYTES = 8  # before the header
MAX_SHARDS = 512  # each keeps a file open
MAX_INDEX_BYTES = 2**26
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


class Safetensors:
    """An open safetensors model. Tensors are read from the mapped files on access."""

    def __init__(self, shards: list[_Shard]) -> None:
        self.paths = tuple(shard.path for shard in shards)
        self.folder = shards[0].path.parent
        self.size = sum(len(shard.data) for shard in shards)  # bytes
        self.metadata: dict[str, str] = {}  # the first shard that has a key gives its value
        self.tensors: dict[str, Tensor] = {}
        for shard in shards:
            self.metadata = shard.header.metadata | self.metadata
            self.tensors |= shard.header.tensors
        self._shards = {shard.path: shard for shard in shards}

    @property
    def name(self) -> str:
        """The name of the model's folder, or of its only file, for messages."""
        return shown(self.folder.name if len(self.paths) > 1 else self.paths[0].name)

    def tensor_bytes(self, name: str) -> memoryview:
        """Return the bytes of a tensor, a view of the mapped file."""
        tensor = self.tensors[name]
        return self._shards[tensor.path].data[tensor.offset : tensor.offset + tensor.nbytes]

    def array(self, name: str) -> NDArray[np.generic]:
        """Return a tensor in its shape, a read-only view of the mapped file that may not be aligned.

        A type that numpy does not have is returned as raw bits: BF16 as uint16, one of 8 bits as uint8, a smaller one
        as flat bytes. Bools are a copy, since a byte of a file may be more than 1.
        """
        tensor = self.tensors[name]
        raw = np.frombuffer(self.tensor_bytes(name), np.uint8)
        if tensor.dtype.bits < 8:
            return raw
        if tensor.dtype.name == "BOOL":
            bools: NDArray[np.generic] = (raw != 0).reshape(tensor.shape)
            return bools
        return raw.view(tensor.dtype.numpy).reshape(tensor.shape)

    def close(self) -> None:
        """Unmap the files. A view that is still in use stays valid, and keeps its file mapped."""
        for shard in self._shards.values():
            shard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_safetensors(path: Path) -> Safetensors:
    """Open the model in a folder, or of a file; an index or any shard opens all of it. Raises only ModelError."""
    with ExitStack() as opened:
        model = Safetensors(_shards_of(path, opened))
        opened.pop_all()
        return model


# -- files -------------------------------------------------------------------------------------------------------------


class _Shard:
    """One mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path, EXPECTED)
        self.data = memoryview(self._map)
        self.header: Header

    def close(self) -> None:
        with suppress(BufferError):  # a view is in use: the mapping ends with the last one
            self.data.release()
            self._map.close()


def _shards_of(path: Path, opened: ExitStack) -> list[_Shard]:
    """Open all files of a model."""
    path = _file_of(path)
    if path.name.endswith(INDEX_SUFFIX):
        return _open_indexed(path, opened)
    match = SHARD_NAME.fullmatch(path.name)
    if match is None:
        return _open_files([path], opened)
    index = path.with_name(match["stem"] + INDEX_SUFFIX)
    if not _exists(index):
        return _open_files(_numbered(path, match), opened)
    shards = _open_indexed(index, opened)
    if path not in [shard.path for shard in shards]:
        raise ModelError(f"{shown(index.name)} does not name {shown(path.name)}", "name the folder, or " + DOWNLOAD)
    return shards


def _file_of(path: Path) -> Path:
    """Return the file to open for a path: for a folder its index, or its only file."""
    try:
        if not path.is_dir():
            return path
        for name in ("model" + SUFFIX, "model" + INDEX_SUFFIX):  # as transformers prefers them
            if (path / name).is_file():
                return path / name
        names = sorted(entry.name for entry in path.iterdir() if entry.name.endswith((SUFFIX, INDEX_SUFFIX)))
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise cannot_open(shown(path.name), error) from None
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    models = {match["stem"] if (match := SHARD_NAME.fullmatch(name)) else name for name in names}
    if len(indexes) == 1:
        return path / indexes[0]
    if not names:
        raise ModelError(f"the folder {shown(path.name)} holds no {SUFFIX} file", "name the folder of a model")
    if len(models) > 1:
        raise ModelError(f"the folder {shown(path.name)} holds {len(models)} models", f"name one {SUFFIX} file")
    return path / names[0]


def _open_indexed(path: Path, opened: ExitStack) -> list[_Shard]:
    """Open the shards that an index names, and check that it is true."""
    with map_file(path, EXPECTED) as mapped, memoryview(mapped) as data:
        name = shown(path.name)
        if len(data) > MAX_INDEX_BYTES:
            raise ModelError(f"{name} is {len(data):,} bytes long, but the limit is {MAX_INDEX_BYTES:,}", DOWNLOAD)
        files = dict.fromkeys(file for _, file in parse_index(data, path))
        if len(files) > MAX_SHARDS:
            raise ModelError(f"{name} names {len(files):,} files, but at most {MAX_SHARDS} can be opened")
        shards = _open_files([path.with_name(file) for file in sorted(files)], opened)
        _check_index(data, path, shards)
    return shards


def _numbered(path: Path, match: re.Match[str]) -> list[Path]:
    """Return the shards of a model whose index is missing."""
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count <= MAX_SHARDS:
        raise ModelError(f"{shown(path.name)} is numbered {number:,} of {count:,}", "give it its true name")
    return [path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}{SUFFIX}") for i in range(1, count + 1)]


def _open_files(paths: list[Path], opened: ExitStack) -> list[_Shard]:
    """Open these files as one model."""
    shards: list[_Shard] = []
    seen: set[str] = set()
    for path in paths:
        if len(paths) > 1 and not _exists(path):
            message = f"{shown(path.name)} is missing, and the model has {len(paths)} such files"
            raise ModelError(message, "download all files of the model into one folder")
        shard = _Shard(path)
        opened.callback(shard.close)
        shard.header = parse_header(shard.data, path)
        for tensor in shard.header.tensors:
            if tensor in seen:
                raise ModelError(f"{shown(path.name)}: tensor {shown(tensor)} is in another file too", DOWNLOAD)
            seen.add(tensor)
        if len(seen) > MAX_TENSORS:
            raise ModelError(f"the model of {shown(path.name)} has more than {MAX_TENSORS:,} tensors")
        shards.append(shard)
    return shards


def _check_index(index: memoryview, path: Path, shards: list[_Shard]) -> None:
    """Check that each tensor is in the file that the index states, and that the index omits none."""
    by_name = {shard.path.name: shard.header.tensors for shard in shards}
    left = {name for tensors in by_name.values() for name in tensors}
    for name, file in parse_index(index, path):
        if name not in by_name[file]:
            raise ModelError(f"{shown(path.name)} has tensor {shown(name)} in {file}, which does not hold it", DOWNLOAD)
        if name not in left:
            raise ModelError(f"{shown(path.name)} is damaged: tensor {shown(name)} is there twice", DOWNLOAD)
        left.remove(name)
    if left:
        raise ModelError(f"{shown(path.name)} does not name tensor {shown(min(left))}, which a shard holds", DOWNLOAD)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a loop of links, or a name with a null byte
        return True  # opening it raises the error


# -- the format --------------------------------------------------------------------------------------------------------


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
