"""A model that is on this machine: its name, its files, and what makes two of them the same.

Owns the record and how a file's name is shown. Which models there are is scan.py's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

Place = Literal["built-in", "given", "hub", "folder"]


@dataclass(frozen=True)
class LocalModel:
    """A model that can be asked for by its name."""

    name: str
    path: Path  # the GGUF (its first part), or the folder
    place: Place = "given"
    format: Literal["gguf", "safetensors"] = "gguf"
    files: tuple[Path, ...] = ()  # all that belong to it
    quantization: str | None = None  # as the file's name says
    hub_name: str | None = None  # OWNER/NAME:…, for what lies in the hub's cache
    repository: str | None = None
    revision: str | None = None
    superseded: bool = False  # a newer revision has another file of its name

    @cached_property
    def identity(self) -> str:
        """The same for two names of the same bytes."""
        return os.path.realpath(self.path)

    def is_called(self, name: str) -> bool:
        """Tell whether a name is the model's own, or that of its place in the hub."""
        return name.casefold() in (each.casefold() for each in (self.name, self.hub_name) if each)

    def is_at(self, path: Path) -> bool:
        """Tell whether a path leads to this model."""
        return path == self.path or os.path.realpath(path) == self.identity


def printable(text: str) -> str:
    """Return a file's name as text that can be shown and sent; bytes and characters that cannot are escaped."""
    clean = os.fsencode(text).decode("utf-8", "backslashreplace")
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in clean)
