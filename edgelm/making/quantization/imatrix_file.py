"""Importance matrices as files: llama.cpp's GGUF format, and its older .dat format for reading.

Owns the sums that a matrix is made of, and their two formats. Knows nothing of models and texts.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from edgelm.base.disk import unfinished
from edgelm.base.errors import EdgeLMError, ModelError, RequestError
from edgelm.checkpoints.files import shown
from edgelm.checkpoints.gguf import MAGIC, open_gguf
from edgelm.checkpoints.gguf_parse import Array

SUMS, COUNTS = ".in_sum2", ".counts"
MAX_NAME = 256
MAX_ENTRIES = 2**16
MAX_DAT_BYTES = 2**32
HINT = "give a file of llama.cpp's imatrix tool, or of --save-imatrix"


@dataclass
class Statistics:
    """Sums of the squared activations that enter each matrix, by its name in the GGUF.

    A tensor with one matrix has one row of sums; one with experts has a row and a count for each of them.
    """

    sums: dict[str, NDArray[np.float64]] = field(default_factory=dict)  # [matrices, columns]
    counts: dict[str, NDArray[np.float64]] = field(default_factory=dict)  # [matrices], tokens
    num_chunks: int = 0  # windows of text
    chunk_len: int = 0  # tokens
    texts: tuple[str, ...] = ()

    def add(self, name: str, num_matrices: int, matrix: int, squares: NDArray[np.floating], tokens: int) -> None:
        """Add the sums of one matrix of a tensor over some tokens: [columns]."""
        if name not in self.sums:
            self.sums[name] = np.zeros((num_matrices, squares.size))
            self.counts[name] = np.zeros(num_matrices)
        self.sums[name][matrix] += squares
        self.counts[name][matrix] += tokens

    def means(self) -> Mapping[str, NDArray[np.float32]]:
        """Return the mean squares: [columns], or [experts, columns]. They are 1 for an expert that no token took.

        The sums are rounded as in a file, so that a file gives the same quantization.
        """
        means = {}
        for name, sums in self.sums.items():
            counts = self.counts[name][:, None]
            rounded = sums.astype(np.float32).astype(np.float64)
            mean = np.where(counts > 0, rounded / np.maximum(counts, 1), 1.0).astype(np.float32)
            means[name] = mean[0] if len(mean) == 1 else mean
        return means


def read_statistics(path: Path) -> Statistics:
    """Read a file of either format. Raises RequestError."""
    try:
        if path.exists() and not path.is_file():
            raise RequestError(f"{shown(str(path), 200)} is no file", HINT)
        with path.open("rb") as file:
            head = file.read(4)
            if head != MAGIC and path.stat().st_size > MAX_DAT_BYTES:
                raise RequestError(f"{shown(path.name)} is not an importance matrix", HINT)
            statistics = _read_gguf(path) if head == MAGIC else _read_dat(head + file.read(), path)
    except OSError as error:
        raise RequestError(f"{shown(str(path), 200)} cannot be read: {error.strerror}", HINT) from None
    except ModelError as error:
        raise RequestError(error.message, HINT) from None
    for name, sums in statistics.sums.items():
        if not np.isfinite(sums).all() or not np.isfinite(statistics.counts[name]).all() or (sums < 0).any():
            raise RequestError(f"{shown(path.name)}: the importance of {shown(name)} has impossible numbers", HINT)
    return statistics


def write_statistics(statistics: Statistics, path: Path) -> None:
    """Write a file in llama.cpp's GGUF format; it appears when it is whole. Raises EdgeLMError."""
    part = unfinished(path)
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        _write_gguf(statistics, part)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise EdgeLMError(f"{shown(str(path), 200)} cannot be written: {error.strerror}", "name another file") from None


def _write_gguf(statistics: Statistics, path: Path) -> None:
    writer = GGUFWriter(path, "")
    writer.kv_data[0].clear()  # the name of an architecture
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", list(statistics.texts) or [""])
    writer.add_uint32("imatrix.chunk_count", statistics.num_chunks)
    writer.add_uint32("imatrix.chunk_size", statistics.chunk_len)
    for name in sorted(statistics.sums):
        writer.add_tensor(name + SUMS, statistics.sums[name].astype(np.float32))
        writer.add_tensor(name + COUNTS, statistics.counts[name].astype(np.float32)[:, None])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _read_gguf(path: Path) -> Statistics:
    with open_gguf(path) as gguf:
        names = [name.removesuffix(SUMS) for name in gguf.tensors if name.endswith(SUMS)]
        if gguf.metadata.get("general.type") != "imatrix" or not names:
            raise RequestError(f"{gguf.name} holds no importance matrix", HINT)
        statistics = Statistics(
            num_chunks=_number(gguf.metadata.get("imatrix.chunk_count")),
            chunk_len=_number(gguf.metadata.get("imatrix.chunk_size")),
            texts=_texts(gguf.metadata.get("imatrix.datasets")),
        )
        for name in names:
            if name + COUNTS not in gguf.tensors:
                raise RequestError(f"{gguf.name} has no counts of {shown(name)}", HINT)
            counts = gguf.dequantized(name + COUNTS).astype(np.float64).reshape(-1)
            sums = gguf.dequantized(name + SUMS).astype(np.float64).reshape(-1)
            if sums.size % counts.size:
                raise RequestError(f"{gguf.name}: the sums of {shown(name)} do not fit its counts", HINT)
            statistics.sums[name] = sums.reshape(counts.size, -1)
            statistics.counts[name] = counts
    return statistics


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value[:100])) if isinstance(value, Array) else ()


def _read_dat(data: bytes, path: Path) -> Statistics:
    """Read the older format: for each tensor its name, the number of windows, and the sums, all in one row."""
    statistics = Statistics()
    at = 0

    def read(kind: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(kind, data, at)
        at += struct.calcsize(kind)
        return int(value)

    try:
        num_entries = read("<i")
        if not 0 < num_entries <= MAX_ENTRIES:
            raise ValueError
        for _ in range(num_entries):
            length = read("<i")
            if not 0 < length <= MAX_NAME:
                raise ValueError
            name = data[at : at + length].decode()
            at += length
            calls, size = read("<i"), read("<i")
            if size <= 0:
                raise ValueError
            sums = np.frombuffer(data, "<f4", size, at).astype(np.float64)
            at += sums.size * 4
            statistics.sums[name] = sums[None]
            statistics.counts[name] = np.array([max(calls, 1)], np.float64)
        statistics.num_chunks = read("<i") if at < len(data) else 0
    except (struct.error, ValueError):  # of decode and frombuffer too
        raise RequestError(f"{shown(path.name)} is not an importance matrix, or is damaged", HINT) from None
    return statistics
