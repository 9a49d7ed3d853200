"""The worker that reads files, with two faults: cut.gguf is cut while it is read, and slow.gguf never ends.

As a module in place of jobs/reader.py: `read_each(..., module="tests.cutting_reader")`.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any

from edgelm.jobs import reader

summarize = reader.summarize


def cut(path: Path) -> Any:
    if path.name == "cut.gguf":
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        os.truncate(path, 0)
        mapped[100_000]
    if path.name == "slow.gguf":
        time.sleep(600)
    return summarize(path)


if __name__ == "__main__":
    reader.summarize = cut
    reader.main()
