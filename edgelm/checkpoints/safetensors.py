"""Safetensors files, mapped and read lazily: one file, or the shards of a model as one.

Owns which files belong together: a folder, its index, its shards. The format is in safetensors_parse.py. Knows nothing
of what the tensors are for; config.json is in config_json.py. Truncating a mapped file kills the process that reads it
(SIGBUS).
"""

from __future__ import annotations

import re
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from edgelm.base.errors import ModelError
from edgelm.base.macos_files import is_macos_file
from edgelm.checkpoints.files import DOWNLOAD, cannot_open, map_file, shown
from edgelm.checkpoints.safetensors_parse import MAX_TENSORS, SUFFIX, Header, Tensor, parse_header, parse_index

INDEX_SUFFIX = ".safetensors.index.json"
SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors", re.DOTALL)
EXPECTED = "a .safetensors file, or the folder of a model"
MAX_SHARDS = 512  # each keeps a file open
MAX_INDEX_BYTES = 2**26


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
        found = (entry.name for entry in path.iterdir() if not is_macos_file(entry.name))
        names = sorted(name for name in found if name.endswith((SUFFIX, INDEX_SUFFIX)))
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
