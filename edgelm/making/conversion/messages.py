"""The messages between `edgelm convert` and its worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKER = "edgelm.making.conversion.worker"


@dataclass(frozen=True, slots=True)
class ConvertJob:
    """Convert a folder of safetensors to a GGUF."""

    folder: Path
    out: Path
    to: str = "source"
    check: bool = True
    threads: int = 1
    lora: tuple[str, ...] = ()  # adapters that are merged: ADAPTER or ADAPTER:SCALE


@dataclass(frozen=True, slots=True)
class Written:
    """The progress of the file, in bytes."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Stage:
    """The worker does something else than writing."""

    text: str


@dataclass(frozen=True, slots=True)
class Note:
    """A fact about the result that the user should know."""

    text: str


@dataclass(frozen=True, slots=True)
class Converted:
    """The file has its name; `document` is what `--json` prints."""

    document: dict[str, Any]


REPLIES = (Written, Stage, Note, Converted)
