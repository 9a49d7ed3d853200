"""Launches that are equal: the same PTX on the same bytes.

Owns what makes two launches equal, and the results of those that ran. Knows nothing of instructions.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

# of an architecture, and for debuggers: they change nothing that is computed
IGNORED = re.compile(r"^\s*\.(?:version|target|loc|file)\b.*$|^\$L__tmp\d+:|//.*$", re.MULTILINE)
SECTION = re.compile(r"\.section\s+\.debug\w*\s*\{[^}]*\}")


def stripped(ptx: str) -> str:
    """Return PTX without its version, target, comments and what is only for debuggers."""
    lines = (line.strip() for line in SECTION.sub("", IGNORED.sub("", ptx)).splitlines())
    return "\n".join(line for line in lines if line)


def digest_of(ptx: str, values: object, tensors: Sequence[torch.Tensor]) -> str:
    """Return a digest of a launch: its PTX, the values that are no tensors, and the tensors' places and bytes.

    Not of it: the addresses of the tensors.
    """
    digest = hashlib.sha256(f"{stripped(ptx)}\n{values!r}".encode())
    storages = storages_of(tensors)
    order = {storage.data_ptr(): at for at, storage in enumerate(storages)}
    for tensor in tensors:
        start = tensor.untyped_storage().data_ptr()
        digest.update(f"{order[start]} {tensor.data_ptr() - start} {tensor.dtype};".encode())
    for storage in storages:
        digest.update(f"{storage.nbytes()};".encode())
        digest.update(bytes_of(storage))
    return digest.hexdigest()


def storages_of(tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of tensors, each once, in the order of the tensors."""
    return list({tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}.values())


def bytes_of(storage: torch.UntypedStorage) -> memoryview:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data


class _Result(NamedTuple):
    instructions: int
    written: dict[int, bytes]  # the storages that have changed, by their number


class Launches:
    """The results of launches, by digest."""

    def __init__(self) -> None:
        self._results: dict[str, _Result] = {}

    def run(self, digest: str, tensors: Sequence[torch.Tensor], run: Callable[[], int]) -> tuple[int, bool]:
        """Write the result of an equal launch, or run this one. Returns its instructions, and whether it was known."""
        views = [bytes_of(storage) for storage in storages_of(tensors)]
        if digest in self._results:
            for number, data in self._results[digest].written.items():
                views[number][:] = data
            return self._results[digest].instructions, True
        before = [bytes(view) for view in views]
        count = run()
        after = [bytes(view) for view in views]
        written = {number: data for number, data in enumerate(after) if data != before[number]}
        self._results[digest] = _Result(count, written)
        return count, False
