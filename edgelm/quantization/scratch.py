"""A copy of a model with 16-bit weights, whose matrices can be changed while llama.cpp has it loaded.

llama.cpp maps the file, and a mapped file shows what is written to it: a matrix is replaced in microseconds, without a
second load. Owns the file: it is removed at the end, and after a kill by the next user of the folder. Knows nothing of
the measurements.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgelm.checkpoints.gguf import GGUF, open_gguf
from edgelm.disk import require_space
from edgelm.errors import EdgeLMError

Floats = NDArray[np.float32]

SUFFIX = ".scratch"
HEADER_BYTES = 2**22  # of the copy, beside that of the source


class Scratch:
    """The copy. `path` is for llama.cpp, which has to map it and use the matrices where they lie."""

    def __init__(self, path: Path, gguf: GGUF, file: int) -> None:
        self.path = path
        self._gguf = gguf
        self._file = file

    @property
    def header_bytes(self) -> int:
        """The size of all that comes before the tensors, which no type changes."""
        return min(tensor.offset for tensor in self._gguf.tensors.values())

    @contextmanager
    def changed(self, matrices: Mapping[str, Floats]) -> Iterator[None]:
        """Replace the numbers of some tensors until the block ends."""
        saved = {name: bytes(self._gguf.tensor_bytes(name)) for name in matrices}
        try:
            for name, values in matrices.items():
                kind = {"F16": np.float16, "F32": np.float32}[self._gguf.tensors[name].type.name]
                self._write(name, values.astype(kind).tobytes())
            yield
        finally:
            for name, data in saved.items():
                self._write(name, data)

    def _write(self, name: str, data: bytes) -> None:
        tensor = self._gguf.tensors[name]
        assert len(data) == tensor.nbytes
        try:
            done = 0
            while done < len(data):  # one call writes at most 2 GiB
                done += os.pwrite(self._file, data[done : done + 2**30], tensor.offset + done)
        except OSError as error:
            raise EdgeLMError(f"{self.path} cannot be written: {error.strerror}", "free some space") from None


@contextmanager
def scratch_copy(source: GGUF, folder: Path, write: Callable[[Path], None]) -> Iterator[Scratch]:
    """Make the copy by `write`, which writes a file with F16 matrices; remove it at the end.

    Raises EdgeLMError where the disk has no room for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    numbers = sum(tensor.num_elements for tensor in source.tensors.values())
    require_space(folder, 2 * numbers + HEADER_BYTES, "the copy on which the model is measured")
    path = folder / f"{secrets.token_hex(8)}{SUFFIX}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # it ends with this process, also by a kill
        write(path)
        with open_gguf(path) as gguf:
            yield Scratch(path, gguf, file)
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


def remove_leftovers(folder: Path) -> None:
    """Remove the copies whose processes have ended."""
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
