"""The messages between `edgelm convert` and its worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgelm.base.workers.messages import Note, Result, Status

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


REPLIES = (Written, Status, Note, Result)  # a status: it does something else than writing
