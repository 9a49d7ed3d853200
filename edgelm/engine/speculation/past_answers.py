"""Past answers: tokens of earlier answers that drafts are made from, in memory and in one file per tokenizer.

Owns the file's place, format, size and permissions, and which answers are in memory. The answers of one cache namespace
never serve another. Knows nothing of drafts. An unreadable part of a file is skipped, and a file that cannot be written
is left alone: no request fails because of past answers.

    magic │ record │ record │ …     record: mark │ head (tokens, checksum, time, namespace) │ tokens, four bytes each

A record is appended in one write. After a crash, the rest of a torn record is skipped up to the next mark.
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
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgelm.base.atomic import atomic_write
from edgelm.engine.speculation.ngram_counts import NgramCounts

MAX_BYTES = 8 * 2**20  # of a file; above it, the older half is dropped
MAX_TOKENS = 50_000  # in memory, of all namespaces together: 15 to 26 MB, and half more while the older half is dropped
SUFFIX = ".answers"
LEFTOVERS = ("*.tmp", "*.new")  # of a process that was killed; .new: written by 0.3.1
_MAGIC = b"edgelm answers 1\n"
_MARK = b"\xf5\xf6\xf7A"  # never occurs in token ids: one of their four bytes is zero
_HEAD = struct.Struct("<IIQ16s")  # tokens, checksum, seconds since 1970, namespace
_MAX_RECORD_TOKENS = 2**20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Record:
    """One answer in a file."""

    namespace: bytes
    written: int  # seconds since 1970
    tokens: array[int]
    start: int  # offset in the file


@dataclass(frozen=True, slots=True)
class Info:
    """The content of a file in numbers."""

    path: Path
    answers: int
    tokens: int
    nbytes: int
    since: int | None  # seconds since 1970, of the oldest answer


def folder(data: Path) -> Path:
    """Return the folder of the files, inside the data folder."""
    return data / "memory"


def path_for(data: Path, pieces: Iterable[bytes]) -> Path:
    """Return the file for a tokenizer, which is identified by these bytes of its tokens."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(struct.pack("<I", len(piece)) + piece)
    return folder(data) / (digest.hexdigest()[:16] + SUFFIX)


def info(place: Path) -> list[Info]:
    """Return the content of each file of a folder in numbers. Raises OSError if a file cannot be read."""
    infos = []
    for path in sorted(place.glob("*" + SUFFIX)):
        data = path.read_bytes()
        records = list(read_records(data))
        num_tokens = sum(len(record.tokens) for record in records)
        since = min((record.written for record in records), default=None)
        infos.append(Info(path, len(records), num_tokens, len(data), since))
    return infos


def clear(place: Path) -> int:
    """Delete all files of a folder; return their number. A running engine notices and forgets. Raises OSError."""
    paths = [path for pattern in ("*" + SUFFIX, *LEFTOVERS) for path in place.glob(pattern)]
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


# -- the file ----------------------------------------------------------------------------------------------------------


def namespace_id(cache_namespace: str) -> bytes:
    """Return the 16 bytes that stand for a cache namespace in a file."""
    return hashlib.sha256(cache_namespace.encode()).digest()[:16]


def read_records(data: bytes) -> Iterator[Record]:
    """Yield the valid records in order, whatever lies between them."""
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
    num_tokens, checksum, written, namespace = _HEAD.unpack_from(data, head)
    body = head + _HEAD.size
    if not 0 < num_tokens <= _MAX_RECORD_TOKENS or body + 4 * num_tokens > len(data):
        return None
    raw = data[body : body + 4 * num_tokens]
    if _checksum(written, namespace, raw) != checksum:
        return None
    return Record(namespace, written, array("i", raw), at)


def _checksum(written: int, namespace: bytes, raw: bytes) -> int:
    return zlib.crc32(raw, zlib.crc32(struct.pack("<Q16s", written, namespace)))


class AnswersFile:
    """The file of one tokenizer. No method raises an error of the file or the disk."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._identity: tuple[int, int] | None = None  # device and inode when it was last read or written
        self._size = 0  # at that time; it only grows while it is the same file
        self._warned = False

    def read(self, cache_namespace: str) -> list[array[int]]:
        """Return the answers of a cache namespace, oldest first."""
        self._identity, self._size = self._stat()
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            self._warn("read", error)
            return []
        namespace = namespace_id(cache_namespace)
        return [record.tokens for record in read_records(data) if record.namespace == namespace]

    def append(self, cache_namespace: str, tokens: list[int]) -> None:
        """Append an answer."""
        if not 0 < len(tokens) <= _MAX_RECORD_TOKENS:
            return
        raw = array("i", tokens).tobytes()
        written, namespace = int(time.time()), namespace_id(cache_namespace)
        record = _MARK + _HEAD.pack(len(tokens), _checksum(written, namespace, raw), written, namespace) + raw
        unchanged = not self.changed()
        try:
            with _Locked(self._path) as file:
                size = os.fstat(file).st_size
                os.write(file, record if size else _MAGIC + record)
                if size + len(record) > self._max_bytes:
                    self._shorten()
        except OSError as error:
            self._warn("written", error)
        if unchanged:
            self._identity, self._size = self._stat()

    def changed(self) -> bool:
        """Return whether the file was removed or replaced since `read`: the caller must then forget its answers."""
        identity, size = self._stat()
        return identity != self._identity or size < self._size  # a new file may get the inode of the old one

    def _stat(self) -> tuple[tuple[int, int] | None, int]:
        try:
            status = self._path.stat()
        except OSError:
            return None, 0
        return (status.st_dev, status.st_ino), status.st_size

    def _shorten(self) -> None:
        """Keep the newest records, up to half of the maximal size. The caller holds the lock."""
        data = self._path.read_bytes()
        starts = [record.start for record in read_records(data) if len(data) - record.start <= self._max_bytes // 2]
        atomic_write(self._path, _MAGIC, data[starts[0] :] if starts else b"")

    def _warn(self, verb: str, error: OSError) -> None:
        if not self._warned:
            log.warning("%s cannot be %s: %s; answers are not remembered", self._path, verb, error.strerror)
        self._warned = True


class _Locked:
    """The file, created if needed, opened for appending by one process at a time."""

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
            os.close(self._file)  # the file was replaced or removed while we waited for the lock

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


# -- in memory ---------------------------------------------------------------------------------------------------------


class NamespaceAnswers:
    """The answers of one cache namespace: those in `counts`, and those that wait to be counted."""

    def __init__(self, max_tokens: int) -> None:
        self.counts = NgramCounts()
        self.num_tokens = 0  # of all answers in memory
        self._max_tokens = max_tokens
        self._answers: deque[array[int]] = deque()
        self._uncounted: deque[array[int]] = deque()
        self._num_counted = 0  # tokens of the first uncounted answer
        self._filling = self.counts  # other counts than `counts` while these are rebuilt

    def add(self, tokens: array[int]) -> None:
        """Add an answer; drop the older half of the answers if there are too many tokens."""
        tokens = tokens[-self._max_tokens // 2 :]
        self._answers.append(tokens)
        self._uncounted.append(tokens)
        self.num_tokens += len(tokens)
        if self.num_tokens > self._max_tokens:
            while self.num_tokens > self._max_tokens // 2:
                self.num_tokens -= len(self._answers.popleft())
            self._filling = NgramCounts()
            self._uncounted, self._num_counted = deque(self._answers), 0

    def work(self, num_tokens: int) -> bool:
        """Count at most `num_tokens` tokens; True: more are left."""
        while num_tokens > 0 and self._uncounted:
            answer = self._uncounted[0]
            stop = min(self._num_counted + num_tokens, len(answer))
            self._filling.add(answer, self._num_counted, stop)
            num_tokens -= stop - self._num_counted
            self._num_counted = stop
            if stop == len(answer):
                self._uncounted.popleft()
                self._num_counted = 0
        if not self._uncounted:
            self.counts = self._filling
        return bool(self._uncounted)


class PastAnswers:
    """The answers of all cache namespaces. `file` keeps them for the next process.

    Reading, counting and writing are postponed until `work` is called.
    """

    def __init__(self, file: AnswersFile | None = None, max_tokens: int = MAX_TOKENS) -> None:
        self._file = file
        self._max_tokens = max_tokens
        self._namespaces: OrderedDict[str, NamespaceAnswers] = OrderedDict()  # least recently used first
        self._unread: list[str] = []  # namespaces
        self._unwritten: deque[tuple[str, list[int]]] = deque()  # namespace, answer

    def of(self, cache_namespace: str) -> NamespaceAnswers:
        """Return the answers of a cache namespace. Those in the file are read when `work` is called."""
        if self._file and self._namespaces and self._file.changed():
            self._namespaces.clear()  # the user cleared the file, or another process shortened it
            self._unread.clear()
        if cache_namespace not in self._namespaces:
            self._namespaces[cache_namespace] = NamespaceAnswers(self._max_tokens)
            if self._file:
                self._unread.append(cache_namespace)
        self._namespaces.move_to_end(cache_namespace)
        return self._namespaces[cache_namespace]

    def add(self, cache_namespace: str, tokens: list[int]) -> None:
        """Add an answer."""
        if tokens:
            self._unwritten.append((cache_namespace, tokens))

    def work(self, num_tokens: int) -> bool:
        """Do a little of the postponed reading, writing or counting; True: there is more."""
        if self._unread and self._file:
            cache_namespace = self._unread.pop()
            for tokens in self._file.read(cache_namespace):
                self._namespaces[cache_namespace].add(tokens)
            self._make_room(cache_namespace)
        elif self._unwritten:
            cache_namespace, answer = self._unwritten.popleft()
            answers = self.of(cache_namespace)
            if cache_namespace not in self._unread:  # otherwise it will be read from the file
                answers.add(array("i", answer))
            if self._file:
                self._file.append(cache_namespace, answer)
            self._make_room(cache_namespace)
        else:
            return any(answers.work(num_tokens) for answers in reversed(self._namespaces.values()))
        return True

    def close(self) -> None:
        """Write the answers that are not written yet."""
        while self._unwritten:
            cache_namespace, answer = self._unwritten.popleft()
            if self._file:
                self._file.append(cache_namespace, answer)

    def _make_room(self, cache_namespace: str) -> None:
        """Drop the least recently used other namespaces; they are read again when they are used again."""
        while sum(answers.num_tokens for answers in self._namespaces.values()) > self._max_tokens:
            oldest = next(iter(self._namespaces))
            if oldest == cache_namespace:
                break
            del self._namespaces[oldest]
            self._unread = [namespace for namespace in self._unread if namespace != oldest]
