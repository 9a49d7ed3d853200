"""What files of models are by their names: GGUFs and their parts, quantizations, folders with safetensors.

Knows names alone. Opens no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from edgelm.library.names import QUANTIZATION

PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL | re.IGNORECASE)
NO_MODEL = re.compile(r"(?:^|[-._])(?:mmproj|imatrix)(?:[-._]|$)", re.IGNORECASE)  # read beside a model, not alone
_LABEL = re.compile(rf"(?:^|[-._])({QUANTIZATION})(?=[-.]|$)", re.IGNORECASE | re.ASCII)
CONFIG = "config.json"


class GGUFFiles(NamedTuple):
    """A GGUF model: its first file and all of them, as they were given."""

    first: str
    files: tuple[str, ...]

    @property
    def quantization(self) -> str | None:
        """The label in the file's name, upper case."""
        return quantization_of(self.first)

    @property
    def stem(self) -> str:
        """The file's name without folder, number of the part and ending."""
        return _stem(self.first)


def group_ggufs(names: Iterable[str]) -> list[GGUFFiles]:
    """Return the models among paths with slashes: the parts of one as one, without projectors and such."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted(names):
        if not name.casefold().endswith(".gguf") or NO_MODEL.search(name.rpartition("/")[2]):
            continue
        part = PART.fullmatch(name)
        groups.setdefault((part["stem"], part["count"]) if part else (name, ""), []).append(name)
    return [GGUFFiles(found[0], tuple(found)) for found in groups.values()]


def quantization_of(name: str) -> str | None:
    """Return the last label of a quantization in a file's name, upper case."""
    labels = _LABEL.findall(_stem(name))
    return str(labels[-1]).upper() if labels else None


def is_safetensors_folder(names: Iterable[str]) -> bool:
    """Tell whether the files of a folder make a model that transformers would load."""
    found = set(names)
    return CONFIG in found and any(name.endswith(".safetensors") for name in found)


def _stem(name: str) -> str:
    last = name.rpartition("/")[2]
    part = PART.fullmatch(last)
    return part["stem"] if part else last[: -len(".gguf")] if last.casefold().endswith(".gguf") else last
