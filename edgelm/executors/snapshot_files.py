"""Snapshots in files: what idle conversations computed, for the next process that loads the same model.

Owns the folder of one model, the form of its files, and the bounds of all models' files together:

    head     magic, form, lengths, identity of the model, CRC of the state
    owner    whose tokens these are
    tokens   int32, what the state is the KV of
    CRC      of all above
    state    as llama.cpp gives it

A file is written under another name first, so what has a right name is whole; its checksums find what the disk or
another program did to it since. Several processes may use a folder: each finds what the others write, and a file that
goes away is one that is computed again. What is in them is a conversation: only the user may read them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgelm.core import StoredPrefix

SUFFIX = ".kv"
FOLDER_ATTEMPTS = 10
CHATS = "known.chats"  # beside the files: the texts of their conversations, by another module
MAX_FILES = 512  # of one model that are known at one time
MAX_TOKENS = 2**22  # a head that says more is not read further
MAX_OWNER_BYTES = 4096
STALE_S = 600.0  # after so long, a half-written file is nobody's any more
SETTLED_S = 0.1  # a folder that changed as recently may change again within the same time stamp
_MAGIC = b"edgelmKV"
# magic, form, length of this, identity, owner's bytes, tokens, bytes of the state, its CRC
_HEAD = struct.Struct("<8sII16sIIQI")
_FORM = 1
_CRC = struct.Struct("<I")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the files of all models may take, and how long one that is not used stays."""

    max_bytes: int
    max_age_s: float


class SnapshotFolder:
    """The files of one model under `root`. `identity` is of all that a state depends on."""

    def __init__(self, root: Path, identity: bytes, bounds: Bounds) -> None:
        assert len(identity) == 16
        self._root = root
        self._identity = identity
        self._bounds = bounds
        self.path = root / identity.hex()
        self._files: tuple[StoredPrefix, ...] = ()
        self._seen_ns = 0  # the folder's time when it was read
        self._refused: set[str] = set()  # what could not be read, whether or not it could be deleted

    def files(self) -> tuple[StoredPrefix, ...]:
        """Return the files there are, of which only the heads are read; the same object while nothing changes."""
        try:
            changed_ns = self.path.stat().st_mtime_ns
        except OSError:
            changed_ns = 0
        if changed_ns != self._seen_ns:
            settled = time.time_ns() - changed_ns > SETTLED_S * 1e9
            self._seen_ns = changed_ns if settled else 0
            known = {each.name: each for each in self._files}
            found = tuple(
                file for name in self._names() if (file := known.get(name) or self._read_head(name)) is not None
            )
            if found != self._files:
                self._files = found
        return self._files

    def read(self, name: str) -> NDArray[np.uint8] | None:
        """Return a file's state, and count that as use. One that is damaged is deleted; None: it cannot be had."""
        path = self.path / name
        try:
            with path.open("rb") as file:
                head = _Head.read(file.read(_HEAD.size))
                file.seek(head.state_at)
                state = np.empty(head.num_bytes, np.uint8)
                if file.readinto(state.data) != head.num_bytes or zlib.crc32(state.data) != head.state_crc:
                    raise _DamagedError("its state is not what was written")
            os.utime(path)
            return state
        except _DamagedError as error:
            self.delete(name, str(error))
        except (OSError, MemoryError) as error:
            log.info("%s cannot be read: %s", path, error)
            self._forget(name)
        return None

    def write(self, tokens: NDArray[np.int32], owner: str, state: NDArray[np.uint8]) -> bool:
        """Write a file unless it is there already. False: there is no room, or the disk fails, which is logged."""
        owner_bytes = owner.encode()[:MAX_OWNER_BYTES]
        token_bytes = tokens.astype("<i4").tobytes()
        name = hashlib.blake2b(token_bytes, key=hashlib.blake2b(owner_bytes).digest(), digest_size=16).hexdigest()
        path, partial = self.path / (name + SUFFIX), self.path / f".{name}.{os.getpid()}"
        head = _HEAD.pack(
            *(_MAGIC, _FORM, _HEAD.size, self._identity),
            *(len(owner_bytes), len(tokens), state.size, zlib.crc32(state.data)),
        )
        head += owner_bytes + token_bytes
        head += _CRC.pack(zlib.crc32(head))
        if path.exists() or not self._make_room(len(head) + state.size):
            return path.exists()
        try:
            with os.fdopen(self._create(partial), "wb") as file:
                file.write(head)
                file.write(state.data)
            partial.replace(path)
            self._refused.discard(path.name)
            self._make_room(0)  # others may have written meanwhile: whoever is last sees all files
        except OSError as error:
            log.warning("a conversation is not kept on disk: %s: %s", self.path, error.strerror or error)
            with contextlib.suppress(OSError):
                partial.unlink()
            return False
        return True

    def _create(self, partial: Path) -> int:
        """Open a new file. Another process that makes room removes the folder as long as it is empty: make it again."""
        for attempt in range(FOLDER_ATTEMPTS):
            _private_folder(self._root)
            _private_folder(self.path)
            try:
                return os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileNotFoundError:
                if attempt == FOLDER_ATTEMPTS - 1:
                    raise
        raise AssertionError

    def delete(self, name: str, reason: str) -> None:
        """Delete a file that cannot serve."""
        log.warning("%s is deleted: %s", self.path / name, reason)
        with contextlib.suppress(OSError):
            (self.path / name).unlink()
        self._forget(name)

    def remove(self, names: list[str]) -> None:
        """Remove files that others have replaced."""
        for name in names:
            with contextlib.suppress(OSError):
                (self.path / name).unlink()

    def prune(self) -> None:
        """Delete, of all models' files, those that are too old, and the least recently used above the bound."""
        self._make_room(0)

    # --------------------------------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        """Return the names of the last used files, and delete what a process left half-written."""
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
        """Return what a file holds, without its state; delete it if that cannot be."""
        try:
            with (self.path / name).open("rb") as file:
                data = file.read(_HEAD.size)
                head = _Head.read(data)
                data += file.read(head.state_at - _HEAD.size - _CRC.size)
                crc = file.read(_CRC.size)
                if len(data) + len(crc) != head.state_at or crc != _CRC.pack(zlib.crc32(data)):
                    raise _DamagedError("its head is not what was written")
                if head.identity != self._identity:
                    raise _DamagedError("it is of another model")
                if os.fstat(file.fileno()).st_size != head.state_at + head.num_bytes:
                    raise _DamagedError("it is not whole")
            owner = data[_HEAD.size : _HEAD.size + head.owner_len].decode()
            tokens = np.frombuffer(data, "<i4", head.num_tokens, _HEAD.size + head.owner_len).astype(np.int32)
            return StoredPrefix(name, tokens, owner)
        except (_DamagedError, UnicodeDecodeError) as error:
            self.delete(name, str(error))
        except OSError as error:
            log.info("%s cannot be read: %s", self.path / name, error)
        return None

    def _forget(self, name: str) -> None:
        self._refused.add(name)
        self._files = tuple(each for each in self._files if each.name != name)
        self._seen_ns = 0

    def _make_room(self, nbytes: int) -> bool:
        """Delete what is too old, and the least recently used until `nbytes` more fit; False: they never will."""
        now = time.time()
        files: list[tuple[float, int, str]] = []
        for folder in _entries(self._root):
            for entry in _entries(folder.path):
                if not entry.name.endswith((SUFFIX, CHATS)) and not entry.name.startswith("."):
                    continue  # not ours
                with contextlib.suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    files.append((facts.st_mtime, facts.st_size, entry.path))
        files.sort()
        total = sum(size for _, size, _ in files)
        for used, size, path in files:
            if total + nbytes <= self._bounds.max_bytes and now - used <= self._bounds.max_age_s:
                break
            if nbytes > self._bounds.max_bytes and now - used <= self._bounds.max_age_s:
                break
            with contextlib.suppress(OSError):
                Path(path).unlink()
            total -= size
            with contextlib.suppress(OSError):  # another model's last file
                Path(path).parent.rmdir()
        return total + nbytes <= self._bounds.max_bytes


class _DamagedError(Exception):
    """A file is not what we wrote."""


@dataclass(frozen=True, slots=True)
class _Head:
    identity: bytes
    owner_len: int
    num_tokens: int
    num_bytes: int
    state_crc: int

    @classmethod
    def read(cls, data: bytes) -> _Head:
        if len(data) != _HEAD.size:
            raise _DamagedError("it is too short")
        magic, form, size, *rest = _HEAD.unpack(data)
        head = cls(*rest)
        if (magic, form, size) != (_MAGIC, _FORM, _HEAD.size):
            raise _DamagedError("it is no snapshot of this version")
        if head.owner_len > MAX_OWNER_BYTES or not 0 < head.num_tokens <= MAX_TOKENS or head.num_bytes >= 2**40:
            raise _DamagedError("its lengths cannot be")
        return head

    @property
    def state_at(self) -> int:
        return _HEAD.size + self.owner_len + 4 * self.num_tokens + _CRC.size


def _entries(path: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []


def _private_folder(path: Path) -> None:
    """Make a folder, or let one that is there be the user's alone."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)
