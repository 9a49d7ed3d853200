"""Which files of a folder are knowledge, and their text.

Owns the limits, and what is left out and why. A file is opened from folder to folder below the root, and no step
follows a symbolic link: nothing outside the folder is read, also while somebody replaces files in it. Knows nothing of
passages and of the index.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from edgelm.base.errors import EdgeLMError
from edgelm.base.places import expand_home
from edgelm.chats.knowledge.plain_text import BINARY_ENDINGS, NOT_TEXT, plain_text
from edgelm.chats.knowledge.secret_files import holds_key, is_secret_folder, is_secret_name

MAX_FILE_BYTES = 2 * 2**20
MAX_FILES = 5_000  # of a root
MAX_TOTAL_BYTES = 64 * 2**20  # of a root
MAX_ENTRIES = 100_000  # files and folders that are looked at: the walk through a whole disk ends
MAX_NOTES = 500  # files that are left out and named
RACY_NS = 2 * 10**9  # a file that changed this recently may change again at the same time stamp

IS_PRIVATE = "it may hold a key or a password"
IS_LINK = "a symbolic link"
_GENERATED = frozenset({"node_modules", "__pycache__", "site-packages", "venv"})
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY  # NONBLOCK: a FIFO has no end
_ATTEMPTS = 3  # to read a file that is changing


class LeftOut(NamedTuple):
    """A file or folder that is not read."""

    path: str  # below the root; the root as the user named it, where a limit ended the walk
    reason: str


@dataclass(frozen=True, slots=True)
class File:
    """A file of a root. `stamp` changes with the file; it is empty if the file changed just now."""

    name: str  # relative to the root, with slashes
    size: int
    stamp: str


@dataclass(frozen=True, slots=True)
class Text:
    """What a file holds: its text, or the reason why it is left out."""

    text: str
    stamp: str
    reason: str = ""


def real_root(root: str) -> str:
    """Return the absolute path that a root stands for. Raises EdgeLMError."""
    try:
        path = os.path.realpath(expand_home(root))
        path.encode()
    except (OSError, ValueError) as error:
        raise EdgeLMError(f"{root!a} cannot be knowledge: {error}", "name a folder or a file") from None
    return path


class Root:
    """A folder or a file that the user named; open while it is used. Raises EdgeLMError."""

    def __init__(self, root: str) -> None:
        self._named = root
        path = Path(real_root(root))
        if not root:
            raise EdgeLMError("the path of the knowledge is empty", "name a folder or a file")
        if any(map(is_secret_folder, path.parts)):
            raise EdgeLMError(f"{root} cannot be knowledge: {IS_PRIVATE}", "name another folder")
        try:
            self._single = None if path.is_dir() else path.name
            path.stat()
            self._folder = os.open(
                path if self._single is None else path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            )
        except FileNotFoundError:
            raise EdgeLMError(f"{root} does not exist", "name a folder or a file that is there") from None
        except OSError as error:
            raise EdgeLMError(f"{root} cannot be read: {error.strerror}", "check its permissions") from None
        self.left_out: list[LeftOut] = []

    @property
    def is_file(self) -> bool:
        """Whether the user named a file, and no folder."""
        return self._single is not None

    def close(self) -> None:
        os.close(self._folder)

    def leave_out(self, path: str, reason: str) -> None:
        """Note that a file is not read; a limit of the whole root comes first."""
        if path == self._named:
            self.left_out.insert(0, LeftOut(path, reason))
        elif len(self.left_out) < MAX_NOTES:
            self.left_out.append(LeftOut(path, reason))

    def files(self) -> Iterator[File]:
        """Yield the files that may be knowledge, those of upper folders first. Hidden ones are passed over silently."""
        total = count = 0
        for name, status in self._walk():
            if count == MAX_FILES:
                return self.leave_out(self._named, f"only the first {MAX_FILES:,} files are read")
            if reason := _refusal(name, status):
                self.leave_out(name, reason)
                continue
            if total + status.st_size > MAX_TOTAL_BYTES:
                return self.leave_out(self._named, f"only the first {MAX_TOTAL_BYTES // 2**20} MiB are read")
            total += status.st_size
            count += 1
            yield File(name, status.st_size, _stamp(status))
        return None

    def read(self, file: File) -> Text | None:
        """Return the text of a file; None if it is gone."""
        for _ in range(_ATTEMPTS):
            try:
                descriptor = self._open(file.name.split("/"))
            except FileNotFoundError:
                return None
            except OSError as error:
                return Text("", file.stamp, IS_LINK if error.errno == errno.ELOOP else error.strerror or str(error))
            try:
                before = os.fstat(descriptor)
                if reason := _refusal(file.name, before):
                    return Text("", _stamp(before), reason)
                try:
                    data = _read(descriptor)
                except OSError as error:
                    return Text("", file.stamp, error.strerror or str(error))
                after = os.fstat(descriptor)
            finally:
                os.close(descriptor)
            if _identity(before) == _identity(after) and len(data) == after.st_size:
                text = plain_text(data)
                if text is None:
                    return Text("", _stamp(after), NOT_TEXT)
                return Text("", _stamp(after), IS_PRIVATE) if holds_key(text) else Text(text, _stamp(after))
        return Text("", "", "it changed while it was read")

    def _walk(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield name and status of each file, one folder after the other."""
        if self._single is not None:
            with suppress(FileNotFoundError):
                yield self._single, os.stat(self._single, dir_fd=self._folder, follow_symlinks=False)
            return
        folders: list[str] = [""]
        num_entries = 0
        for folder in folders:  # it grows
            entries = self._entries(folder)
            num_entries += len(entries)
            if num_entries > MAX_ENTRIES:
                return self.leave_out(self._named, f"more than {MAX_ENTRIES:,} files and folders: the rest is not read")
            for name, status in entries:
                if stat.S_ISDIR(status.st_mode):
                    folders.append(f"{name}/")
                else:
                    yield name, status
        return None

    def _entries(self, folder: str) -> list[tuple[str, os.stat_result]]:
        """Return name and status of what is in a folder, sorted."""
        entries = []
        try:
            descriptor = self._open(folder.split("/")[:-1], os.O_DIRECTORY)
        except OSError as error:
            if error.errno != errno.ENOENT:
                self.leave_out(folder or self._named, error.strerror or str(error))
            return []
        try:
            with os.scandir(descriptor) as found:
                for entry in found:
                    if entry.name.startswith(".") or entry.name in _GENERATED:
                        continue
                    if not entry.name.isprintable():  # control characters, and bytes that are no UTF-8
                        self.leave_out(f"{folder}{entry.name!a}", "its name has characters that cannot be shown")
                        continue
                    name = f"{folder}{entry.name}"
                    try:
                        entries.append((name, entry.stat(follow_symlinks=False)))
                    except FileNotFoundError:
                        continue
                    except OSError as error:  # such as in a folder whose names may be read, and no more
                        self.leave_out(name, error.strerror or str(error))
                    if len(entries) > MAX_ENTRIES:
                        break
        except OSError as error:
            self.leave_out(folder or self._named, error.strerror or str(error))
        finally:
            os.close(descriptor)
        return sorted(entries)

    def _open(self, parts: Sequence[str], flags: int = 0) -> int:
        """Open a file below the root; a symbolic link in any place is an error."""
        folder = os.dup(self._folder)
        try:
            for part in parts[:-1]:
                inner = os.open(part, _FLAGS | os.O_DIRECTORY, dir_fd=folder)
                os.close(folder)
                folder = inner
            return os.open(parts[-1] if parts else ".", _FLAGS | flags, dir_fd=folder)
        finally:
            os.close(folder)


def _refusal(name: str, status: os.stat_result) -> str:
    """Return why a file is not read, before it is opened; empty: it is."""
    base = name.rpartition("/")[2]
    if stat.S_ISLNK(status.st_mode):
        return IS_LINK
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    if base.startswith("."):  # the user named it alone
        return "hidden files are not read"
    if is_secret_name(base):
        return IS_PRIVATE
    if status.st_size > MAX_FILE_BYTES:
        return f"larger than {MAX_FILE_BYTES // 2**20} MiB"
    if base.lower().endswith(BINARY_ENDINGS):
        return NOT_TEXT
    return ""


def _read(descriptor: int) -> bytes:
    """Return the content of a file, of at most a byte more than a file may have."""
    parts = []
    left = MAX_FILE_BYTES + 1
    while left and (part := os.read(descriptor, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _stamp(status: os.stat_result) -> str:
    if abs(time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns)) < RACY_NS:
        return ""
    return "-".join(map(str, _identity(status)))
