"""A copy of a model with 16-bit weights, whose matrices can be changed while llama.cpp has it loaded.

llama.cpp maps the file, and a mapped file shows what is written to it: a matrix is replaced without a second load. Owns
the file: it is removed at the end, and after a kill by the next user of the folder. Knows nothing of measurements.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgelm.base.disk import require_space
from edgelm.base.errors import EdgeLMError
from edgelm.checkpoints.gguf import GGUF, open_gguf

PREFIX, SUFFIX = ".edgelm-", ".scratch"
NUMPY_TYPES = {"F16": np.float16, "F32": np.float32}
PIECE_BYTES = 2**26


class Scratch:
    """The copy. llama.cpp has to map `path`, and to use the matrices where they lie."""

    def __init__(self, path: Path, gguf: GGUF, file: int) -> None:
        self.path = path
        self._gguf = gguf
        self._file = file

    @property
    def header_bytes(self) -> int:
        """The size of all that comes before the tensors."""
        return min(tensor.offset for tensor in self._gguf.tensors.values())

    def require_shared(self) -> None:
        """Raise EdgeLMError where a mapped file does not show what is written to it, as on some network drives."""
        tensor = next(iter(self._gguf.tensors.values()))
        mapped = self._gguf.tensor_bytes(tensor.name)
        before = mapped[0]
        os.pwrite(self._file, bytes([before ^ 1]), tensor.offset)
        after = mapped[0]
        os.pwrite(self._file, bytes([before]), tensor.offset)
        if after == before:
            raise EdgeLMError(
                f"{self.path.parent} is on a disk where mapped files do not show changes",
                "choose a folder on a local disk",
            )

    def write(self, name: str, values: NDArray[np.float32]) -> None:
        """Replace the numbers of a tensor. Raises EdgeLMError where the disk refuses."""
        tensor = self._gguf.tensors[name]
        with np.errstate(over="ignore"):
            data = np.ascontiguousarray(values, NUMPY_TYPES[tensor.type.name]).data.cast("B")
        assert len(data) == tensor.nbytes
        try:
            for start in range(0, len(data), PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                if os.pwrite(self._file, piece, tensor.offset + start) != len(piece):
                    raise OSError(0, "the disk is full")
        except OSError as error:
            raise EdgeLMError(f"{self.path} cannot be written: {error.strerror}", "free some space") from None


@contextmanager
def scratch_copy(source: GGUF, folder: Path, write: Callable[[Path], object]) -> Iterator[Scratch]:
    """Make the copy by `write`, which writes a file with F16 matrices; remove it at the end.

    Raises EdgeLMError where the disk has no room for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    tensors = source.tensors.values()
    numbers = sum(tensor.num_elements for tensor in tensors)
    metadata = max(source.size - sum(tensor.nbytes for tensor in tensors), 0)
    require_space(folder, 2 * numbers + metadata, "a copy of the model on which types are tried")
    path = folder / f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # it ends with this process, also by a kill
        write(path)
        with open_gguf(path) as gguf:
            copy = Scratch(path, gguf, file)
            copy.require_shared()
            yield copy
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


def remove_leftovers(folder: Path) -> None:
    """Remove the copies whose processes have ended."""
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
