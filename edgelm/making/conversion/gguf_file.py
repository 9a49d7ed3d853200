"""A GGUF that is written tensor by tensor, and that an interrupted conversion goes on with.

    .NAME.part        the file so far: header, then tensors; whole tensors only count up to the state
    .NAME.part.json   the state: what the file is made from, and how many of its tensors are on the disk

Owns both files, the lock that keeps two processes from writing one file, and the last step, which gives it its name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf import GGUFWriter

from edgelm.base.atomic import atomic_json, read_json, sync
from edgelm.base.disk import DISK_FULL, TOO_LARGE, require_space, unfinished
from edgelm.base.errors import EdgeLMError
from edgelm.making.conversion.tensors import Bytes, OutTensor

ALIGNMENT = 32  # of each tensor
STATE_EVERY_S = 1.0
STATE_EVERY_BYTES = 2**26  # or after so many: those after the last state are written again
MAX_STATE_BYTES = 2**16

Pieces = Callable[[OutTensor], Iterator[Bytes]]


class GGUFFile:
    """The unfinished file of one conversion. Use `open_unfinished`.

    `key` is all that the bytes depend on: with another key, the file starts over.
    """

    def __init__(self, path: Path, file: BinaryIO, key: str) -> None:
        self.path = path
        self.part = unfinished(path)
        self._file = file
        self._key = key
        self.num_done = self.start = 0
        state = read_json(self._state, MAX_STATE_BYTES)
        if isinstance(state, dict) and state.get("key") == key and isinstance(state.get("start"), int):
            self.num_done, self.start = state["done"], state["start"]

    @property
    def _state(self) -> Path:
        return self.part.with_name(self.part.name + ".json")

    def write(
        self,
        writer: Callable[[], GGUFWriter],
        tensors: Sequence[OutTensor],
        pieces: Pieces,
        progress: Callable[[int, int], None],
    ) -> None:
        """Write the header and all tensors that are not there yet; `progress` takes the bytes done and in all.

        Raises EdgeLMError where the disk is full, or will be.
        """
        sizes = [padded(tensor.nbytes) for tensor in tensors]
        self._check_resumable(sizes)
        total = sum(sizes)
        with disk_errors(self.path):
            present = self._file.seek(0, os.SEEK_END)
            require_space(self.path.parent, max(self.start + total - present, 0), self.path.name)
            if not self.start:
                self._write_header(writer(), tensors)
            done = sum(sizes[: self.num_done])
            self._file.truncate(self.start + done)
            self._file.seek(self.start + done)
            saved_at, saved = time.monotonic(), done
            for i in range(self.num_done, len(tensors)):
                for data in pieces(tensors[i]):
                    self._file.write(data.data)
                    done += data.nbytes
                    progress(done, total)
                padding = sizes[i] - tensors[i].nbytes
                self._file.write(b"\0" * padding)
                done += padding
                if time.monotonic() - saved_at >= STATE_EVERY_S or done - saved >= STATE_EVERY_BYTES:
                    self._save(i + 1)
                    saved_at, saved = time.monotonic(), done
            self._save(len(tensors))

    def finish(self) -> None:
        """Give the file its name."""
        with disk_errors(self.path):
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(self._file.fileno(), 0o666 & ~mask)
            self._file.flush()
            os.fsync(self._file.fileno())
            self.part.replace(self.path)
            sync(self.path.parent)
        with suppress(OSError):
            self._state.unlink()

    def discard(self) -> None:
        """Delete the unfinished file and its state."""
        for path in (self._state, self.part):
            with suppress(OSError):
                path.unlink()

    def _check_resumable(self, sizes: Sequence[int]) -> None:
        """Start over where the file is shorter than its state says."""
        length = self._file.seek(0, os.SEEK_END)
        if self.start and (self.num_done > len(sizes) or length < self.start + sum(sizes[: self.num_done])):
            self.num_done = self.start = 0

    def _write_header(self, writer: GGUFWriter, tensors: Sequence[OutTensor]) -> None:
        """Write everything before the first tensor. The writer opens the same file again, which is still locked."""
        for tensor in tensors:
            writer.add_tensor_info(
                tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=tensor.kind
            )
        with suppress(OSError):
            self._state.unlink()
        writer.write_header_to_file(self.part)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        end = self._file.seek(0, os.SEEK_END)
        self._file.write(b"\0" * (padded(end) - end))
        self.start = padded(end)
        self._save(0)

    def _save(self, num_done: int) -> None:
        """Save the state, after the bytes that it speaks of are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.num_done = num_done
        atomic_json(self._state, {"key": self._key, "start": self.start, "done": num_done})


@contextmanager
def open_unfinished(path: Path, key: str) -> Iterator[GGUFFile]:
    """Open the unfinished file for a path, or create it. Raises EdgeLMError where another process writes it."""
    part = unfinished(path)
    with disk_errors(path):
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise EdgeLMError(f"another edgelm is writing {path.name}", "wait until it is done, or stop it") from None
        yield GGUFFile(path, file, key)


def padded(num_bytes: int) -> int:
    """Return the bytes that a part of the file takes with the padding behind it."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise EdgeLMError for what the disk of a file refuses."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise EdgeLMError(f"{path.parent} cannot take {path.name}: {TOO_LARGE}", "choose another folder") from None
        if error.errno in DISK_FULL:
            raise EdgeLMError(
                f"the disk of {path.parent} is full", "free some space; the same command goes on where it stopped"
            ) from None
        raise EdgeLMError(
            f"{path.name} cannot be written in {path.parent}: {error.strerror}", "choose another folder"
        ) from None
