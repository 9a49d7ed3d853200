"""Shared by the programs of this package: their lines of JSON, and their memory.

Owns where lines go, and which lines of a file are of the present kernels, so that a run can go on after a cut.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
KERNELS = (ROOT / "kernels", ROOT / "models")


def digest_of_kernels() -> str:
    """Return a digest of the kernels' sources, of the models that launch them, and of Triton's version."""
    digest = hashlib.sha256(version("triton").encode())
    for folder in KERNELS:
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class Records:
    """Lines about what has run, by the values of some of their fields. Without a file they are printed."""

    def __init__(self, path: Path | None, key: tuple[str, ...]) -> None:
        self.path = path
        self.key = key
        self.kernels = digest_of_kernels()
        self._done: set[tuple[Any, ...]] = set()
        for text in path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else ():
            line = json.loads(text)
            if line["of"] == self.kernels:
                self._done.add(tuple(line[name] for name in key))

    def has(self, *values: Any) -> bool:
        """Return whether the file has a line of the present kernels with these values."""
        return values in self._done

    def add(self, line: dict[str, Any]) -> None:
        text = json.dumps(line | {"of": self.kernels})
        if self.path is None:
            print(text, flush=True)
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


@contextmanager
def collecting_by_hand() -> Iterator[None]:
    """Collect garbage only where gc.collect() is called: it took an eighth of the time of a run, and found nothing."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
