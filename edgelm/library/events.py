"""What a pull tells while it runs. Data only: who shows it, and how, is not known here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file of the model, and how much of it is here."""

    path: str  # inside the repository
    size: int  # bytes
    here: int  # bytes


@dataclass(frozen=True, slots=True)
class Listed:
    """The hub has said what the model is made of."""

    repository: str
    commit: str
    files: tuple[Wanted, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far all files together are; comes several times a second."""

    done: int  # bytes
    total: int
    files_done: int
    files: int
    rate: float  # bytes a second, of the last seconds; 0: nothing comes
    seconds_left: float | None  # None: not known


@dataclass(frozen=True, slots=True)
class Waiting:
    """Another process fetches this file; it is waited for."""

    path: str


@dataclass(frozen=True, slots=True)
class Retrying:
    """Something went wrong, and is tried again after a while."""

    path: str
    reason: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class Checking:
    """All bytes of a file are here, and its hash is still being computed."""

    path: str


@dataclass(frozen=True, slots=True)
class Wrong:
    """The bytes of a file do not have its hash: this file is fetched again."""

    path: str


@dataclass(frozen=True, slots=True)
class Fetched:
    """A file is complete, and where every tool finds it."""

    path: str


@dataclass(frozen=True, slots=True)
class Pulled:
    """The model is here, whole."""

    path: Path  # what to run: a GGUF, the first of a split one, or a folder
    nbytes: int  # of the model
    fetched: int  # bytes that came over the network
    seconds: float


Event = Listed | Progress | Waiting | Retrying | Checking | Wrong | Fetched | Pulled
