"""AnswersFile: past answers as tokens, on disk, for one tokenizer.

Owns the file's place, format, size and permissions. Knows nothing of drafts. What cannot be read is skipped, and a
file that cannot be written is left alone: whoever runs a model never fails for its memory.

    magic │ record │ record │ …        record: mark │ head (tokens, checksum, time, owner) │ tokens, four bytes each

A record is written in one piece at the end. After a crash the rest of a torn record is skipped up to the next mark.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import struct
import time
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 8 * 2**20  # then the older half is dropped
SUFFIX = ".answers"
_MAGIC = b"edgelm answers 1\n"
_MARK = b"\xf5\xf6\xf7A"  # no four bytes of token ids look so: one of four is zero
_HEAD = struct.Struct("<IIQ16s")  # tokens, checksum, seconds since 1970, owner
_MAX_TOKENS = 2**20  # of one answer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Record:
    """One answer."""

    owner: bytes
    written: int  # seconds since 1970
    tokens: array[int]
    start: int  # where it begins in the file


@dataclass(frozen=True, slots=True)
class Info:
    """What a file holds."""

    path: Path
    answers: int
    tokens: int
    nbytes: int
    since: int | None  # seconds since 1970, of the oldest answer


def folder(data: Path) -> Path:
    """Return where the files lie in the data folder."""
    return data / "memory"


def path_for(data: Path, pieces: Iterable[bytes]) -> Path:
    """Return the file for a tokenizer, which is known by the bytes of all its tokens, in order."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(struct.pack("<I", len(piece)) + piece)
    return folder(data) / (digest.hexdigest()[:16] + SUFFIX)


def owner_id(owner: str) -> bytes:
    """Return what stands for an owner in the file."""
    return hashlib.sha256(owner.encode()).digest()[:16]


def read_records(data: bytes) -> Iterator[Record]:
    """Yield the records that are whole, in order, whatever lies between them."""
    at = data.find(_MARK)
    while at >= 0:
        record = _record_at(data, at)
        after = at + 1
        if record is not None:
            yield record
            after = at + len(_MARK) + _HEAD.size + 4 * len(record.tokens)
        at = data.find(_MARK, after)


def _record_at(data: bytes, at: int) -> Record | None:
    head = at + len(_MARK)
    if head + _HEAD.size > len(data):
        return None
    num_tokens, checksum, written, owner = _HEAD.unpack_from(data, head)
    body = head + _HEAD.size
    if not 0 < num_tokens <= _MAX_TOKENS or body + 4 * num_tokens > len(data):
        return None
    raw = data[body : body + 4 * num_tokens]
    if _checksum(written, owner, raw) != checksum:
        return None
    return Record(owner, written, array("i", raw), at)


def _checksum(written: int, owner: bytes, raw: bytes) -> int:
    return zlib.crc32(raw, zlib.crc32(struct.pack("<Q16s", written, owner)))


class AnswersFile:
    """The answers of one tokenizer. No method raises for what is wrong with the file or the disk."""

    def __init__(self, path: Path, most_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._seen: tuple[int, int] | None = None
        self._size = 0  # at least, as long as it is the same file
        self._complained = False

    def read(self, owner: str) -> list[array[int]]:
        """Return an owner's answers, oldest first."""
        self._seen, self._size = self._identity()
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            self._complain("read", error)
            return []
        wanted = owner_id(owner)
        return [record.tokens for record in read_records(data) if record.owner == wanted]

    def append(self, owner: str, tokens: list[int]) -> None:
        """Add an answer at the end."""
        if not 0 < len(tokens) <= _MAX_TOKENS:
            return
        raw = array("i", tokens).tobytes()
        written, who = int(time.time()), owner_id(owner)
        record = _MARK + _HEAD.pack(len(tokens), _checksum(written, who, raw), written, who) + raw
        unchanged = not self.changed()
        try:
            with _Locked(self._path) as file:
                size = os.fstat(file).st_size
                os.write(file, record if size else _MAGIC + record)
                if size + len(record) > self._most_bytes:
                    self._shorten()
        except OSError as error:
            self._complain("written", error)
        if unchanged:
            self._seen, self._size = self._identity()

    def changed(self) -> bool:
        """Tell whether the file was removed or replaced since `read`: then what was read is to be forgotten."""
        seen, size = self._identity()
        return seen != self._seen or size < self._size  # a new file may get the number of the one before it

    def _identity(self) -> tuple[tuple[int, int] | None, int]:
        try:
            status = self._path.stat()
        except OSError:
            return None, 0
        return (status.st_dev, status.st_ino), status.st_size

    def _shorten(self) -> None:
        """Keep the newest records, half of what the file may hold. The lock is held."""
        data = self._path.read_bytes()
        starts = [record.start for record in read_records(data) if len(data) - record.start <= self._most_bytes // 2]
        kept = self._path.with_suffix(".new")
        file = os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "wb") as new:
            new.write(_MAGIC + (data[starts[0] :] if starts else b""))
        kept.replace(self._path)

    def _complain(self, what: str, error: OSError) -> None:
        if not self._complained:
            log.warning("%s cannot be %s: %s; answers are not remembered", self._path, what, error.strerror)
        self._complained = True


class _Locked:
    """The file opened at its end, made if need be, for one process at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> int:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX)
                os.fchmod(self._file, 0o600)
                if self._path.exists() and os.path.samestat(os.fstat(self._file), self._path.stat()):
                    return self._file
            except OSError:
                os.close(self._file)
                raise
            os.close(self._file)  # it was replaced or removed while we waited

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


def info(place: Path) -> list[Info]:
    """Return what each file of a folder holds. Raises OSError for one that cannot be read."""
    found = []
    for path in sorted(place.glob("*" + SUFFIX)):
        data = path.read_bytes()
        records = list(read_records(data))
        tokens = sum(len(record.tokens) for record in records)
        since = min((record.written for record in records), default=None)
        found.append(Info(path, len(records), tokens, len(data), since))
    return found


def clear(place: Path) -> int:
    """Remove all files of a folder; return how many. A running engine forgets what it read. Raises OSError."""
    paths = [path for pattern in ("*" + SUFFIX, "*.new") for path in place.glob(pattern)]
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)
