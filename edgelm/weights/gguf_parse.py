"""The GGUF header: metadata and tensor descriptions, parsed from bytes that nobody vouches for.

Owns the format (versions 2 and 3, little endian) and the rule that no count, length, offset or type is used before it
is checked against the bytes that are there. Knows nothing of files, splits and architectures.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np
from gguf.constants import GGUFValueType
from numpy.typing import NDArray

from edgelm.errors import ModelError
from edgelm.weights.mapped import DOWNLOAD, shown
from edgelm.weights.tensor_types import DROPPED_TYPES, TENSOR_TYPES, TensorType

Scalar = int | float | bool | str

MAX_KEYS = 2**14
MAX_TENSORS = 2**16
MAX_KEY_BYTES = 256
MAX_NAME_BYTES = 256
MAX_STRING_BYTES = 2**26  # the tokenizer.json of a large vocabulary has 33 MB
MAX_TEXT_BYTES = 2**23  # that are decoded: a character may take four times as much in memory
MAX_STRINGS = 2**22  # in all arrays of a file together: finding the end of an array means walking it
EAGER_BYTES = 2**23  # strings decoded when the file is opened; those behind are decoded on access
MAX_DIMS = 4
MAX_ALIGNMENT = 2**20
DEFAULT_ALIGNMENT = 32

SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
STRUCTS = {kind: struct.Struct(fmt) for kind, fmt in SCALARS.items()}
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor lies. `shape` is in the file's order: the numbers of a row first, as ggml has it."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int  # from the start of its file
    nbytes: int
    path: Path  # the file that holds it

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class Array(Sequence[Scalar]):
    """An array of the metadata, read from the file on demand and not after the file is closed."""

    __slots__ = ("_data", "_end", "_start", "_starts", "len", "type")

    def __init__(self, data: memoryview, kind: GGUFValueType, length: int, start: int, end: int) -> None:
        self.type = kind  # of the elements
        self.len = length
        self._data = data
        self._start = start
        self._end = end
        self._starts: NDArray[np.int64] | None = None  # of the strings; made at the first access by index

    def __len__(self) -> int:
        return self.len

    def __repr__(self) -> str:
        return f"Array({self.type.name}, {self.len})"

    @overload
    def __getitem__(self, index: int) -> Scalar: ...
    @overload
    def __getitem__(self, index: slice) -> list[Scalar]: ...
    def __getitem__(self, index: int | slice) -> Scalar | list[Scalar]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.len))]
        if not -self.len <= index < self.len:
            raise IndexError(index)
        index %= self.len
        if self.type == GGUFValueType.STRING:
            if self._starts is None:
                self._starts = np.fromiter(self._walk(), np.int64, self.len)
            return self._string(int(self._starts[index]))
        reader = STRUCTS[self.type]
        value: Scalar = reader.unpack_from(self._data, self._start + index * reader.size)[0]
        return value

    def __iter__(self) -> Iterator[Scalar]:
        if self.type == GGUFValueType.STRING:
            yield from map(self._string, self._walk())
        else:
            for (value,) in STRUCTS[self.type].iter_unpack(self._data[self._start : self._end]):
                yield value

    def numpy(self) -> NDArray[np.generic]:
        """Return the numbers as an array, a view of the file where that is possible. Not for strings."""
        assert self.type != GGUFValueType.STRING, "strings have no numpy form"
        raw = self._data[self._start : self._end]
        if self.type == GGUFValueType.BOOL:
            truths: NDArray[np.generic] = np.frombuffer(raw, np.uint8) != 0  # a byte above 1 is no valid numpy bool
            return truths
        return np.frombuffer(raw, np.dtype(SCALARS[self.type]))

    @property
    def nbytes(self) -> int:
        """How much of the file the array takes."""
        return self._end - self._start

    def raw(self) -> Iterator[bytes]:
        """Yield the bytes of each string."""
        assert self.type == GGUFValueType.STRING, "numbers have no bytes of their own"
        for at in self._walk():
            yield bytes(self._string_bytes(at))

    def _walk(self) -> Iterator[int]:
        at = self._start
        for _ in repeat(None, self.len):
            yield at
            at += U64.unpack_from(self._data, at)[0] + U64.size

    def _string(self, at: int) -> str:
        raw = self._string_bytes(at)
        if len(raw) > MAX_TEXT_BYTES:
            raise ModelError(f"a string of the metadata is too long to be read: {len(raw):,} bytes", DOWNLOAD)
        return decode(raw)

    def _string_bytes(self, at: int) -> memoryview:
        (length,) = U64.unpack_from(self._data, at)
        if length > MAX_STRING_BYTES:
            raise ModelError(f"a string of the metadata is {length:,} bytes long", DOWNLOAD)
        return self._data[at + U64.size : at + U64.size + length]


class _Text(NamedTuple):
    """A string that is decoded on access."""

    start: int
    length: int


class Metadata(Mapping[str, "Scalar | Array"]):
    """The keys of a GGUF. Long strings and arrays are read on access, so not after the file is closed.

    Raises ModelError for a string too long to be text.
    """

    def __init__(self, data: memoryview, values: dict[str, Scalar | Array | _Text]) -> None:
        self._data = data
        self._values = values

    def __getitem__(self, key: str) -> Scalar | Array:
        value = self._values[key]
        if isinstance(value, _Text):
            if value.length > MAX_TEXT_BYTES:
                raise ModelError(f"the value of {shown(key)} is too long to be read: {value.length:,} bytes", DOWNLOAD)
            return decode(self._data[value.start : value.start + value.length])
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values


class Header(NamedTuple):
    """What the header of one file says."""

    version: int
    metadata: Metadata
    tensors: dict[str, Tensor]


def decode(raw: memoryview | bytes) -> str:
    """Decode text of a file; what is no UTF-8 (some vocabularies have it) becomes U+FFFD."""
    return str(raw, "utf-8", "replace")


def parse_header(data: memoryview, path: Path) -> Header:
    """Parse what follows the magic of a GGUF of version 2 or 3. Raises ModelError for whatever cannot be true."""
    return _Parser(data, path).header()


class _Parser:
    """A position in the bytes, and reads that check first."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data = data
        self.size = len(data)
        self.path = path
        self.name = shown(path.name)
        self.at = 4  # behind the magic
        self.eager_left = EAGER_BYTES
        self.strings_left = MAX_STRINGS

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.name} is damaged: {what}", DOWNLOAD)

    def cut(self, what: str) -> ModelError:
        return ModelError(
            f"{self.name} is cut short or damaged: {what} goes past the end of the file at byte {self.size:,}", DOWNLOAD
        )

    def read(self, reader: struct.Struct, what: str) -> Scalar:
        if self.size - self.at < reader.size:
            raise self.cut(what)
        value: Scalar = reader.unpack_from(self.data, self.at)[0]
        self.at += reader.size
        return value

    def count(self, reader: struct.Struct, what: str) -> int:
        value = self.read(reader, what)
        assert isinstance(value, int)
        return value

    def span(self, what: str) -> tuple[int, int]:
        """Step over a string and return its start and length."""
        length = self.count(U64, what)
        if length > self.size - self.at:
            raise self.cut(what)
        if length > MAX_STRING_BYTES:
            raise self.damaged(f"{what} is {length:,} bytes long")
        start = self.at
        self.at += length
        return start, length

    def identifier(self, what: str, limit: int) -> str:
        """Read a key or a tensor's name."""
        start, length = self.span(what)
        if not 0 < length <= limit:
            raise self.damaged(f"{what} is {length:,} bytes long, where 1 to {limit} are possible")
        try:
            text = str(self.data[start : self.at], "utf-8")
        except UnicodeDecodeError:
            text = ""
        if not text.isprintable() or not text:
            raise self.damaged(f"{what} is no text")
        return text

    def header(self) -> Header:
        version = self.count(U32, "the version")
        num_tensors = self.count(U64, "the number of tensors")
        num_keys = self.count(U64, "the number of keys")
        # the shortest key takes 14 bytes, the shortest tensor 25
        for count, what, limit, least in ((num_tensors, "tensors", MAX_TENSORS, 25), (num_keys, "keys", MAX_KEYS, 14)):
            if count > min(limit, (self.size - self.at) // least):
                raise self.damaged(f"its header claims {count:,} {what}")
        metadata = Metadata(self.data, self.keys(num_keys))
        described = [self.tensor(i) for i in range(num_tensors)]
        return Header(version, metadata, self.place(described, self.alignment(metadata)))

    def keys(self, num_keys: int) -> dict[str, Scalar | Array | _Text]:
        values: dict[str, Scalar | Array | _Text] = {}
        for i in range(num_keys):
            key = self.identifier(f"key {i + 1} of {num_keys}", MAX_KEY_BYTES)
            if key in values:
                raise self.damaged(f"the key {shown(key)} is there twice")
            values[key] = self.value(key)
        return values

    def value(self, key: str) -> Scalar | Array | _Text:
        what = f"the value of {shown(key)}"
        kind = self.value_type(what)
        if kind == GGUFValueType.STRING:
            start, length = self.span(what)
            if length > self.eager_left:
                return _Text(start, length)
            self.eager_left -= length
            return decode(self.data[start : self.at])
        if kind == GGUFValueType.ARRAY:
            return self.array(what)
        return self.read(STRUCTS[kind], what)

    def value_type(self, what: str) -> GGUFValueType:
        number = self.count(U32, what)
        if number > max(GGUFValueType):
            raise self.damaged(f"{what} has type {number}, which there is not")
        return GGUFValueType(number)

    def array(self, what: str) -> Array:
        kind = self.value_type(what)
        if kind == GGUFValueType.ARRAY:  # possible by the format, written by nobody, refused by llama.cpp
            raise ModelError(f"{self.name} cannot be read: {what} is an array of arrays", "convert the model anew")
        length = self.count(U64, what)
        start = self.at
        if kind == GGUFValueType.STRING:
            if length > (self.size - self.at) // U64.size:
                raise self.cut(what)
            if length > self.strings_left:
                raise self.damaged(f"{what} has {length:,} strings")
            self.strings_left -= length
            self.at = self.end_of_strings(length, what)
        else:
            if length > (self.size - self.at) // STRUCTS[kind].size:
                raise self.cut(what)
            self.at += length * STRUCTS[kind].size
        return Array(self.data, kind, length, start, self.at)

    def end_of_strings(self, length: int, what: str) -> int:
        """Walk the lengths of the strings: some 0.1 us each, so the loop has no check but unpack's own."""
        unpack, data, at = U64.unpack_from, self.data, self.at
        try:
            for _ in repeat(None, length):
                at += unpack(data, at)[0] + 8
        except (struct.error, OverflowError):  # an offset behind the data, or one that no address can be
            at = self.size + 1
        if at > self.size:
            raise self.cut(what)
        return at

    def alignment(self, metadata: Metadata) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
            said = shown(value) if isinstance(value, str) else value
            raise self.damaged(f"general.alignment is {said}, not a power of two from 8 to {MAX_ALIGNMENT:,}")
        return value

    def tensor(self, number: int) -> Tensor:
        """Read one description; the offset is still counted from the start of the data."""
        name = self.identifier(f"the name of tensor {number + 1}", MAX_NAME_BYTES)
        what = f"tensor {shown(name)}"
        num_dims = self.count(U32, what)
        if num_dims > MAX_DIMS:
            raise self.damaged(f"{what} has {num_dims:,} dimensions, where {MAX_DIMS} are possible")
        shape = tuple(self.count(U64, what) for _ in range(num_dims))
        type_id = self.count(U32, what)
        offset = self.count(U64, what)
        kind = TENSOR_TYPES.get(type_id)
        if kind is None:
            raise self.unsupported(what, type_id)
        if 0 in shape:
            raise self.damaged(f"{what} has a dimension of 0")
        row_len = shape[0] if shape else 1
        if row_len % kind.block_len:
            raise self.damaged(f"{what} has rows of {row_len:,}, but {kind.name} needs multiples of {kind.block_len}")
        nbytes = math.prod(shape) // kind.block_len * kind.block_bytes
        return Tensor(name, shape, kind, offset, nbytes, self.path)

    def unsupported(self, what: str, type_id: int) -> ModelError:
        if type_id in DROPPED_TYPES:
            old, new = DROPPED_TYPES[type_id]
            hint = f"llama.cpp gave this type up: download a {new} file of the model"
            return ModelError(f"{self.name}: {what} has the unsupported type {old}", hint)
        hint = f"update edgelm, or {DOWNLOAD} if it is damaged"
        return ModelError(f"{self.name}: {what} has the unsupported type {type_id}", hint)

    def place(self, described: list[Tensor], alignment: int) -> dict[str, Tensor]:
        """Turn offsets into those of the file, and check that the tensors lie in it, apart from each other."""
        data_start = -(-self.at // alignment) * alignment
        tensors: dict[str, Tensor] = {}
        for tensor in described:
            what = f"tensor {shown(tensor.name)}"
            if tensor.name in tensors:
                raise self.damaged(f"{what} is there twice")
            if tensor.offset % alignment:
                raise self.damaged(f"{what} starts at {tensor.offset:,}, not a multiple of {alignment}")
            tensors[tensor.name] = replace(tensor, offset=data_start + tensor.offset)
        end, previous = 0, ""
        for tensor in sorted(tensors.values(), key=lambda t: t.offset):
            if tensor.offset < end:
                raise self.damaged(f"tensor {shown(tensor.name)} overlaps {shown(previous)}")
            end, previous = tensor.offset + tensor.nbytes, tensor.name
        if end > 2**50:
            raise self.damaged(f"tensor {shown(previous)} ends far beyond any file")
        if end > self.size:
            message = f"tensor {shown(previous)} ends at byte {end:,} of {self.size:,}"
            raise ModelError(f"{self.name} is cut short: {message}", DOWNLOAD)
        return tensors
