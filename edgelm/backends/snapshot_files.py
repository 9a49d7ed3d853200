"""Snapshots in files: the KV of idle conversations, for the next process that loads the same model.

Owns the folder of one model, the format of its files, and the bounds over the files of all models:

    head         magic, format, lengths, identity of the model, CRC of the state
    namespace    the cache namespace of the tokens
    tokens       int32, whose KV the state holds
    CRC          of all above
    state        as the executor gives it

A file is written under a temporary name first, so a file with a proper name is complete; its checksums detect later
damage. Several processes may use a folder: each sees the files of the others, and if a file disappears its prefix is
computed again. The files hold conversations, so only the user may read them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import shutil
import struct
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgelm.base.atomic import atomic_write
from edgelm.base.config import Settings
from edgelm.engine.core import StoredPrefix
from edgelm.engine.shared_prefixes import SHARED_SHARE, kept_longest

SUFFIX = ".kv"
SHARED_SUFFIX = ".shared.kv"  # of a prefix that several conversations begin with; before it, its namespace's digest
PROMPT_TOKENS = "known.chats"  # the prompt token cache (text/prompt_token_cache.py) is in the same folder
MAX_FILES = 512  # of one model, the last used ones
MAX_TOKENS = 2**22  # a head with more is damaged
MAX_NAMESPACE_BYTES = 4096
STALE_S = 600.0  # no process still writes an incomplete file that is so old
PIECE = 2**20  # bytes of a state between two signs of progress
SETTLED_S = 0.1  # a folder may change again with the same time stamp within this time
_MAGIC = b"edgelmKV"
# magic, format, size of this head, identity, namespace bytes, tokens, state bytes, CRC of the state
_HEAD = struct.Struct("<8sII16sIIQI")
_FORMAT = 1
_CRC = struct.Struct("<I")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds over the files of all models: their total size, and the age of one that is not used.

    The shared prefixes of each namespace are deleted last, up to `shared_share` of the size.
    """

    max_bytes: int
    max_age_s: float
    shared_share: float = SHARED_SHARE

    @classmethod
    def of(cls, settings: Settings) -> Bounds:
        max_bytes, shared_share = int(settings.prefix_cache_disk * 2**30), settings.prefix_cache_shared / 100
        return cls(max_bytes, settings.prefix_cache_days * 86400, shared_share)


def new_memory(nbytes: int) -> NDArray[np.uint8]:
    """Return memory for a state, which the system gets back with it. Raises MemoryError.

    From malloc, states of many sizes that come and go take half as much again as they hold: the gaps between them stay.
    """
    try:
        mapped = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise MemoryError from None
    return np.frombuffer(mapped, np.uint8, nbytes)


class SnapshotFolder:
    """The files of one model under `root`. `identity` stands for all that a state depends on."""

    def __init__(self, root: Path, identity: bytes, bounds: Bounds) -> None:
        assert len(identity) == 16
        self._root = root
        self._identity = identity
        self._bounds = bounds
        self.path = root / identity.hex()
        self.num_pieces = 0  # written or prepared: callers that wait for the disk read it
        self._files: tuple[StoredPrefix, ...] = ()
        self._listed_ns = 0  # the folder's modification time when `_files` was listed
        self._refused: set[str] = set()  # unreadable files, deleted or not

    def files(self) -> tuple[StoredPrefix, ...]:
        """Return the files, of which only the heads are read. The tuple is the same object while nothing changes."""
        try:
            changed_ns = self.path.stat().st_mtime_ns
        except OSError:
            changed_ns = 0
        if changed_ns != self._listed_ns:
            settled = time.time_ns() - changed_ns > SETTLED_S * 1e9
            self._listed_ns = changed_ns if settled else 0
            heads = {file.name: file for file in self._files}
            files = tuple(
                file for name in self._names() if (file := heads.get(name) or self._read_head(name)) is not None
            )
            if files != self._files:
                self._files = files
        return self._files

    def load(self, name: str, loaded: Future[NDArray[np.uint8]]) -> None:
        """Load a file's state, for `read`. For any thread."""
        try:
            loaded.set_result(self._load(name))
        except (_DamagedError, OSError, MemoryError) as error:
            loaded.set_exception(error)
        finally:
            loaded.cancel()  # only if it has no result: nobody waits for ever for a thread that a bug ended

    def read(self, name: str, loaded: Future[NDArray[np.uint8]] | None = None) -> NDArray[np.uint8] | None:
        """Return a file's state, which another thread may have `loaded`; None: it cannot be read.

        A damaged file is deleted.
        """
        try:
            return loaded.result() if loaded else self._load(name)
        except _DamagedError as error:
            self.delete(name, str(error))
        except (OSError, MemoryError) as error:
            log.info("%s cannot be read: %s", self.path / name, error)
            self._forget(name)
        return None

    def write(
        self,
        tokens: NDArray[np.int32],
        cache_namespace: str,
        state: NDArray[np.uint8],
        shared: bool = False,
        replaced: Sequence[str] = (),
    ) -> bool:
        """Write a file unless it exists, and then remove the `replaced` ones.

        Return False if there is no room, or if the disk fails, which is logged; the replaced ones stay then. If the
        disk cannot hold both, they are removed first.
        """
        namespace_bytes = cache_namespace.encode()[:MAX_NAMESPACE_BYTES]
        token_bytes = tokens.astype("<i4").tobytes()
        key = hashlib.blake2b(namespace_bytes).digest()
        name = hashlib.blake2b(token_bytes, key=key, digest_size=16).hexdigest()
        path = self.path / (f"{name}.{key.hex()[:16]}{SHARED_SUFFIX}" if shared else name + SUFFIX)
        pieces = [state.data[at : at + PIECE] for at in range(0, state.size, PIECE)]
        head = _HEAD.pack(
            *(_MAGIC, _FORMAT, _HEAD.size, self._identity),
            *(len(namespace_bytes), len(tokens), state.size, self._crc(pieces)),
        )
        head += namespace_bytes + token_bytes
        head += _CRC.pack(zlib.crc32(head))
        if path.exists():
            self.remove(replaced)
            return True
        size = len(head) + state.size
        if not self._make_room(size, replaced):
            return path.exists()
        try:
            _private_folder(self._root)
            _private_folder(self.path)
            if 0 < size - shutil.disk_usage(self.path).free <= self._num_bytes(replaced):
                self.remove(replaced)
            atomic_write(path, head, *pieces, on_part=self._note_progress)
        except OSError as error:
            log.warning("a conversation is not kept on disk: %s: %s", self.path, error.strerror or error)
            return False
        self._refused.discard(path.name)
        self.remove(replaced)
        self._make_room(0)  # other processes may have written too; the last one sees all files
        return True

    def delete(self, name: str, reason: str) -> None:
        """Delete an unusable file."""
        log.warning("%s is deleted: %s", self.path / name, reason)
        with contextlib.suppress(OSError):
            (self.path / name).unlink()
        self._forget(name)

    def remove(self, names: Sequence[str]) -> None:
        """Remove files that a longer one has replaced."""
        for name in names:
            with contextlib.suppress(OSError):
                (self.path / name).unlink()

    def prune(self) -> None:
        """Delete files of any model that are too old, and the least recently used ones above the size bound."""
        self._make_room(0)

    # --------------------------------------------------------------------------------------------------------------

    def _load(self, name: str) -> NDArray[np.uint8]:
        """Return a file's state and mark the file as used."""
        path = self.path / name
        with path.open("rb") as file:
            head = _Head.read(file.read(_HEAD.size))
            head.check_size(file.fileno())  # before memory is taken for what a damaged length says
            file.seek(head.state_at)
            state = new_memory(head.num_bytes)
            if file.readinto(state.data) != head.num_bytes or zlib.crc32(state.data) != head.state_crc:
                raise _DamagedError("its state is damaged")
        os.utime(path)
        return state

    def _note_progress(self) -> None:
        self.num_pieces += 1

    def _crc(self, pieces: Sequence[memoryview]) -> int:
        crc = 0
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
            self._note_progress()
        return crc

    def _names(self) -> list[str]:
        """Return the names of the last used files, and delete incomplete files that a process left."""
        times: dict[str, float] = {}
        with contextlib.suppress(OSError), os.scandir(self.path) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    changed = entry.stat(follow_symlinks=False).st_mtime
                    if entry.name.endswith(SUFFIX) and entry.name not in self._refused:
                        times[entry.name] = changed
                    elif entry.name.startswith(".") and time.time() - changed > STALE_S:
                        Path(entry.path).unlink()
        return sorted(times, key=lambda name: times[name], reverse=True)[:MAX_FILES]

    def _read_head(self, name: str) -> StoredPrefix | None:
        """Return a file's tokens and namespace, without its state. A damaged file is deleted."""
        try:
            with (self.path / name).open("rb") as file:
                data = file.read(_HEAD.size)
                head = _Head.read(data)
                data += file.read(head.state_at - _HEAD.size - _CRC.size)
                crc = file.read(_CRC.size)
                if len(data) + len(crc) != head.state_at or crc != _CRC.pack(zlib.crc32(data)):
                    raise _DamagedError("its head is damaged")
                if head.identity != self._identity:
                    raise _DamagedError("it belongs to another model")
                head.check_size(file.fileno())
            cache_namespace = data[_HEAD.size : _HEAD.size + head.namespace_len].decode()
            tokens = np.frombuffer(data, "<i4", head.num_tokens, _HEAD.size + head.namespace_len).astype(np.int32)
            return StoredPrefix(name, tokens, cache_namespace, name.endswith(SHARED_SUFFIX))
        except (_DamagedError, UnicodeDecodeError) as error:
            self.delete(name, str(error))
        except OSError as error:
            log.info("%s cannot be read: %s", self.path / name, error)
        return None

    def _forget(self, name: str) -> None:
        self._refused.add(name)
        self._files = tuple(file for file in self._files if file.name != name)
        self._listed_ns = 0

    def _num_bytes(self, names: Sequence[str]) -> int:
        sizes = 0
        for name in names:
            with contextlib.suppress(OSError):
                sizes += (self.path / name).stat().st_size
        return sizes

    def _make_room(self, nbytes: int, replaced: Sequence[str] = ()) -> bool:
        """Delete old files, and others until `nbytes` more fit. Return False if they never will.

        The least recently used ones go first, and after them those of shared prefixes. The `replaced` ones stay, and
        do not count: the caller removes them after it has written.
        """
        now, most = time.time(), self._bounds.max_bytes
        not_counted = {str(self.path / name) for name in replaced}
        files: list[tuple[float, int, str]] = []
        for folder in _entries(self._root):
            for entry in _entries(folder.path):
                is_ours = entry.name.endswith((SUFFIX, PROMPT_TOKENS)) or entry.name.startswith(".")
                if not is_ours or entry.path in not_counted:
                    continue
                with contextlib.suppress(OSError):
                    stat = entry.stat(follow_symlinks=False)
                    files.append((stat.st_mtime, stat.st_size, entry.path))
        files.sort()
        shared = [file for file in files[::-1] if file[2].endswith(SHARED_SUFFIX)]
        share = int(most * self._bounds.shared_share)
        last = kept_longest(((file, file[2].split(".")[-3], file[1]) for file in shared), share)
        total = sum(size for _, size, _ in files)
        for file in sorted(files, key=last.__contains__):
            used, size, path = file
            if now - used <= self._bounds.max_age_s and (total + nbytes <= most or nbytes > most):
                continue
            with contextlib.suppress(OSError):
                Path(path).unlink()
            total -= size
            with contextlib.suppress(OSError):  # it was its model's last file
                Path(path).parent.rmdir()
        return total + nbytes <= most


class _DamagedError(Exception):
    """A file is damaged, or not ours."""


@dataclass(frozen=True, slots=True)
class _Head:
    identity: bytes
    namespace_len: int
    num_tokens: int
    num_bytes: int
    state_crc: int

    @classmethod
    def read(cls, data: bytes) -> _Head:
        if len(data) != _HEAD.size:
            raise _DamagedError("it is too short")
        magic, file_format, size, *fields = _HEAD.unpack(data)
        head = cls(*fields)
        if (magic, file_format, size) != (_MAGIC, _FORMAT, _HEAD.size):
            raise _DamagedError("it is not a snapshot of this version")
        if head.namespace_len > MAX_NAMESPACE_BYTES or not 0 < head.num_tokens <= MAX_TOKENS or head.num_bytes >= 2**40:
            raise _DamagedError("its lengths are impossible")
        return head

    def check_size(self, file: int) -> None:
        """Raise _DamagedError if an open file has another size than the head says."""
        if os.fstat(file).st_size != self.state_at + self.num_bytes:
            raise _DamagedError("it is incomplete")

    @property
    def state_at(self) -> int:
        return _HEAD.size + self.namespace_len + 4 * self.num_tokens + _CRC.size


def _entries(path: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []


def _private_folder(path: Path) -> None:
    """Make a folder for the user alone, or take other users' access away from an existing one."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)
