"""The GGUF header: metadata and tensor descriptions, parsed from untrusted bytes.

Owns the format (versions 2 and 3, little endian), and ggml's tensor types where they differ from the gguf library's.
No count, length, offset or type is used before it is checked against the bytes that exist. Knows nothing of files,
splits and architectures.
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
from gguf.constants import GGML_QUANT_SIZES, GGUFValueType
from numpy.typing import NDArray

from edgelm.base.errors import ModelError
from edgelm.checkpoints.files import DOWNLOAD, shown

Scalar = int | float | bool | str

MAX_KEYS = 2**14
MAX_TENSORS = 2**16
MAX_KEY_BYTES = 256
MAX_NAME_BYTES = 256
MAX_STRING_BYTES = 2**26  # the tokenizer.json of a large vocabulary has 33 MB
MAX_TEXT_BYTES = 2**23  # of a decoded string: in memory a character may take four times as much
MAX_STRINGS = 2**22  # in all arrays of a file together: finding the end of an array means walking it
EAGER_BYTES = 2**23  # of strings decoded when the file is opened; the rest are decoded on access
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


class TensorType(NamedTuple):
    """How the numbers of a tensor are stored: `block_bytes` for each `block_len` numbers of a row."""

    id: int  # in files
    name: str
    block_len: int
    block_bytes: int


TENSOR_TYPES = {
    int(kind): TensorType(int(kind), kind.name, block_len, size) for kind, (block_len, size) in GGML_QUANT_SIZES.items()
}
# llama.cpp's own table is newer than that of the gguf library, or differs from it
TENSOR_TYPES |= {9: TensorType(9, "Q8_1", 32, 36), 42: TensorType(42, "Q2_0", 64, 18)}
REMOVED_TYPES = {  # id: the name, and the type that replaced it
    4: ("Q4_2", "Q4_0"),
    5: ("Q4_3", "Q4_1"),
    31: ("Q4_0_4_4", "Q4_0"),
    32: ("Q4_0_4_8", "Q4_0"),
    33: ("Q4_0_8_8", "Q4_0"),
    36: ("IQ4_NL_4_4", "IQ4_NL"),
    37: ("IQ4_NL_4_8", "IQ4_NL"),
    38: ("IQ4_NL_8_8", "IQ4_NL"),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """The place of a tensor. `shape` is in ggml's order: the columns first."""

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
    """An array of the metadata, read from the file on demand. It cannot be read after the file is closed."""

    __slots__ = ("_data", "_end", "_start", "_starts", "len", "type")

    def __init__(self, data: memoryview, kind: GGUFValueType, length: int, start: int, end: int) -> None:
        self.type = kind  # of the elements
        self.len = length
        self._data = data
        self._start = start
        self._end = end
        self._starts: NDArray[np.int64] | None = None  # of the strings; built at the first access by index

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
        """Return numbers as an array, a view of the file where possible. Not for strings."""
        assert self.type != GGUFValueType.STRING, "strings have no numpy form"
        raw = self._data[self._start : self._end]
        if self.type == GGUFValueType.BOOL:
            bools: NDArray[np.generic] = np.frombuffer(raw, np.uint8) != 0  # numpy has no bool above 1, a file may
            return bools
        return np.frombuffer(raw, np.dtype(SCALARS[self.type]))

    @property
    def nbytes(self) -> int:
        """The size of the array in the file."""
        return self._end - self._start

    def raw(self) -> Iterator[bytes]:
        """Yield the bytes of each string."""
        assert self.type == GGUFValueType.STRING, "only strings have bytes"
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
    """The keys of a GGUF. Long strings and arrays are read on access, while the file is open.

    Raises ModelError for a string that is too long to be text.
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
    """The header of one file."""

    version: int
    metadata: Metadata
    tensors: dict[str, Tensor]


def decode(raw: memoryview | bytes) -> str:
    """Decode text of a file. Invalid UTF-8, which some vocabularies have, becomes U+FFFD."""
    return str(raw, "utf-8", "replace")


def parse_header(data: memoryview, path: Path) -> Header:
    """Parse the bytes after the magic, of version 2 or 3. Raises ModelError for anything that cannot be true."""
    return _Parser(data, path).header()


class _Parser:
    """A position in the bytes, with checked reads."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data = data
        self.size = len(data)
        self.path = path
        self.name = shown(path.name)
        self.at = 4  # after the magic
        self.eager_left = EAGER_BYTES
        self.strings_left = MAX_STRINGS

    def damaged(self, reason: str) -> ModelError:
        return ModelError(f"{self.name} is damaged: {reason}", DOWNLOAD)

    def cut(self, label: str) -> ModelError:
        return ModelError(
            f"{self.name} is cut short or damaged: {label} goes past the end of the file at byte {self.size:,}",
            DOWNLOAD,
        )

    def read(self, reader: struct.Struct, label: str) -> Scalar:
        if self.size - self.at < reader.size:
            raise self.cut(label)
        value: Scalar = reader.unpack_from(self.data, self.at)[0]
        self.at += reader.size
        return value

    def count(self, reader: struct.Struct, label: str) -> int:
        value = self.read(reader, label)
        assert isinstance(value, int)
        return value

    def span(self, label: str) -> tuple[int, int]:
        """Step over a string and return its start and length."""
        length = self.count(U64, label)
        if length > self.size - self.at:
            raise self.cut(label)
        if length > MAX_STRING_BYTES:
            raise self.damaged(f"{label} is {length:,} bytes long")
        start = self.at
        self.at += length
        return start, length

    def identifier(self, label: str, limit: int) -> str:
        """Read a key or a tensor's name."""
        start, length = self.span(label)
        if not 0 < length <= limit:
            raise self.damaged(f"{label} is {length:,} bytes long, but must be 1 to {limit}")
        try:
            text = str(self.data[start : self.at], "utf-8")
        except UnicodeDecodeError:
            text = ""
        if not text.isprintable() or not text:
            raise self.damaged(f"{label} is not printable text")
        return text

    def header(self) -> Header:
        version = self.count(U32, "the version")
        num_tensors = self.count(U64, "the number of tensors")
        num_keys = self.count(U64, "the number of keys")
        # the shortest key takes 14 bytes, the shortest tensor 25
        for count, kind, limit, least in ((num_tensors, "tensors", MAX_TENSORS, 25), (num_keys, "keys", MAX_KEYS, 14)):
            if count > min(limit, (self.size - self.at) // least):
                raise self.damaged(f"its header claims {count:,} {kind}")
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
        label = f"the value of {shown(key)}"
        kind = self.value_type(label)
        if kind == GGUFValueType.STRING:
            start, length = self.span(label)
            if length > self.eager_left:
                return _Text(start, length)
            self.eager_left -= length
            return decode(self.data[start : self.at])
        if kind == GGUFValueType.ARRAY:
            return self.array(label)
        return self.read(STRUCTS[kind], label)

    def value_type(self, label: str) -> GGUFValueType:
        number = self.count(U32, label)
        if number > max(GGUFValueType):
            raise self.damaged(f"{label} has type {number}, which does not exist")
        return GGUFValueType(number)

    def array(self, label: str) -> Array:
        kind = self.value_type(label)
        if kind == GGUFValueType.ARRAY:  # the format allows it, no converter writes it, llama.cpp refuses it
            raise ModelError(f"{self.name} cannot be read: {label} is an array of arrays", "convert the model again")
        length = self.count(U64, label)
        start = self.at
        if kind == GGUFValueType.STRING:
            if length > (self.size - self.at) // U64.size:
                raise self.cut(label)
            if length > self.strings_left:
                raise self.damaged(f"{label} has {length:,} strings")
            self.strings_left -= length
            self.at = self.end_of_strings(length, label)
        else:
            if length > (self.size - self.at) // STRUCTS[kind].size:
                raise self.cut(label)
            self.at += length * STRUCTS[kind].size
        return Array(self.data, kind, length, start, self.at)

    def end_of_strings(self, length: int, label: str) -> int:
        """Walk the lengths of the strings. One takes about 0.1 us, so the loop relies on unpack's own check."""
        unpack, data, at = U64.unpack_from, self.data, self.at
        try:
            for _ in repeat(None, length):
                at += unpack(data, at)[0] + 8
        except (struct.error, OverflowError):  # an offset past the data, or too large for an address
            at = self.size + 1
        if at > self.size:
            raise self.cut(label)
        return at

    def alignment(self, metadata: Metadata) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
            text = shown(value) if isinstance(value, str) else value
            raise self.damaged(f"general.alignment is {text}, not a power of two from 8 to {MAX_ALIGNMENT:,}")
        return value

    def tensor(self, number: int) -> Tensor:
        """Read one description; its offset is still counted from the start of the data."""
        name = self.identifier(f"the name of tensor {number + 1}", MAX_NAME_BYTES)
        label = f"tensor {shown(name)}"
        num_dims = self.count(U32, label)
        if num_dims > MAX_DIMS:
            raise self.damaged(f"{label} has {num_dims:,} dimensions, but the limit is {MAX_DIMS}")
        shape = tuple(self.count(U64, label) for _ in range(num_dims))
        type_id = self.count(U32, label)
        offset = self.count(U64, label)
        kind = TENSOR_TYPES.get(type_id)
        if kind is None:
            raise self.unsupported(label, type_id)
        if 0 in shape:
            raise self.damaged(f"{label} has a dimension of 0")
        row_len = shape[0] if shape else 1
        if row_len % kind.block_len:
            raise self.damaged(f"{label} has rows of {row_len:,}, but {kind.name} needs multiples of {kind.block_len}")
        nbytes = math.prod(shape) // kind.block_len * kind.block_bytes
        return Tensor(name, shape, kind, offset, nbytes, self.path)

    def unsupported(self, label: str, type_id: int) -> ModelError:
        if type_id in REMOVED_TYPES:
            old, new = REMOVED_TYPES[type_id]
            hint = f"llama.cpp removed this type: download a {new} file of the model"
            return ModelError(f"{self.name}: {label} has the unsupported type {old}", hint)
        hint = f"update edgelm, or {DOWNLOAD} if it is damaged"
        return ModelError(f"{self.name}: {label} has the unsupported type {type_id}", hint)

    def place(self, described: list[Tensor], alignment: int) -> dict[str, Tensor]:
        """Turn offsets into those of the file, and check that the tensors are inside it and do not overlap."""
        data_start = -(-self.at // alignment) * alignment
        tensors: dict[str, Tensor] = {}
        for tensor in described:
            label = f"tensor {shown(tensor.name)}"
            if tensor.name in tensors:
                raise self.damaged(f"{label} is there twice")
            if tensor.offset % alignment:
                raise self.damaged(f"{label} starts at {tensor.offset:,}, not a multiple of {alignment}")
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
