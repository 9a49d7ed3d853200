"""The progress of a pull as data, and sizes and durations as text. Does not know how they are displayed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PullJob:
    """A pull, for a worker."""

    model: str  # "qwen3:4b" or "OWNER/NAME:QUANT"
    revision: str | None = None
    connections: int | None = None  # None: the default


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file of the model, and how much of it is on this disk."""

    path: str  # inside the repository
    size: int  # bytes
    here: int  # bytes


@dataclass(frozen=True, slots=True)
class Listed:
    """The hub has listed the files of the model."""

    repository: str
    commit: str
    files: tuple[ListedFile, ...]
    new_name: str = ""  # of a repository that was renamed


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of all files together; sent several times a second."""

    done: int  # bytes
    total: int
    files_done: int
    files: int
    rate: float  # bytes a second over the last seconds; 0: the transfer stalls
    seconds_left: float | None  # None: unknown


@dataclass(frozen=True, slots=True)
class Waiting:
    """Another process downloads this file; the pull waits for it."""

    path: str


@dataclass(frozen=True, slots=True)
class Retrying:
    """A request failed and is retried after a wait."""

    path: str
    reason: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class StandingIn:
    """The hub cannot be reached: another model is fetched in place of the one named."""

    named: str
    model: str


@dataclass(frozen=True, slots=True)
class Checking:
    """All bytes of a file are here; its checksum is still being computed."""

    path: str


@dataclass(frozen=True, slots=True)
class Wrong:
    """The checksum of a file is wrong; the file is downloaded again."""

    path: str


@dataclass(frozen=True, slots=True)
class Fetched:
    """A file is complete and in the cache, where every tool finds it."""

    path: str


@dataclass(frozen=True, slots=True)
class Pulled:
    """The whole model is here."""

    path: Path  # the one to run: a GGUF, the first shard of a split one, or a folder
    nbytes: int  # of the model
    fetched: int  # bytes that came over the network
    seconds: float


Event = Listed | Progress | Waiting | Retrying | StandingIn | Checking | Wrong | Fetched | Pulled
EVENTS = (Listed, Progress, Waiting, Retrying, StandingIn, Checking, Wrong, Fetched, Pulled)


def size_text(nbytes: float) -> str:
    """Return a number of bytes with at most three digits: 812 B, 4.92 GB. Decimal units, as disks and the hub use."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        nbytes /= 1000
        if nbytes < 999.5 or unit == "TB":
            break
    digits = 2 if nbytes < 9.995 else 1 if nbytes < 99.95 else 0
    return f"{nbytes:.{digits}f} {unit}"


def time_text(seconds: float) -> str:
    """Return a duration: 42 s, 3:07 min, 1:20:05 h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} h"
