"""What stands for a model's files: enough of them to tell any two models apart, without reading them whole.

Owns the choice of what is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

HEAD_BYTES = 2**20  # metadata and the places of tensors
SAMPLES, SAMPLE_BYTES = 64, 4096  # of the weights: two models of one family differ in each


def file_identity(files: Sequence[Path]) -> Iterator[bytes]:
    """Yield size, time, head and samples of each file. Raises OSError where one cannot be read."""
    for path in files:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            yield f"{found.st_size} {found.st_mtime_ns}".encode()
            yield file.read(HEAD_BYTES)
            for sample in range(SAMPLES):
                file.seek(found.st_size * sample // SAMPLES)
                yield file.read(SAMPLE_BYTES)
