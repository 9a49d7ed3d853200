"""The files and folders below a folder, without those that a .gitignore excludes.

Owns the walk, its limits, and git's rules: of several patterns the last one decides, a file in a deeper folder before
one above it, and nothing below an excluded folder comes back. Knows nothing of what files hold.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from edgelm.chats.ignore_patterns import Pattern, parse_line

MAX_ENTRIES = 20_000  # files and folders
MAX_WALK_S = 3.0
MAX_RULES_BYTES = 256 * 2**10  # of a .gitignore
MAX_PATTERNS = 2_000  # of a .gitignore
READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY  # NONBLOCK: a FIFO has no end
_NEVER = frozenset({".git"})
_GENERATED = frozenset({"node_modules", "__pycache__", "site-packages", "venv"})
_OF_THE_SYSTEM = ("/proc", "/sys", "/dev")  # what lies there are no files that anybody wrote


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or folder; `name` is relative to the folder where the walk began, with slashes."""

    name: str
    is_folder: bool
    is_link: bool = False


@dataclass(frozen=True, slots=True)
class _Rules:
    """The patterns of one file, for the paths below the folder `base`."""

    base: str
    patterns: tuple[Pattern, ...]

    def verdict(self, path: str, *, is_folder: bool) -> bool | None:
        """Tell whether the last pattern that matches a path excludes it; None: no pattern matches."""
        name = path[len(self.base) :].lstrip("/")
        for pattern in reversed(self.patterns):
            if (is_folder or not pattern.folders_only) and pattern.matches(name):
                return pattern.excludes
        return None


class Walk:
    """A walk through a folder, upper folders first. `limit` says why it ended early; empty: it did not."""

    def __init__(self, root: str, *, hidden: bool = False, max_entries: int = MAX_ENTRIES) -> None:
        """`root` is absolute; `hidden`: also names that begin with a dot."""
        self._root = root.rstrip("/")
        self._hidden = hidden
        self._max_entries = max_entries
        self.limit = ""

    def entries(self) -> Iterator[Entry]:
        """Yield files and folders. What cannot be read is passed over."""
        rules = _rules_above(self._root)
        if any_excludes(rules, self._root, is_folder=True):  # the user named this folder
            rules = ()
        folders = [("", rules)]
        count, end = 0, time.monotonic() + MAX_WALK_S
        for folder, outer in folders:  # it grows
            inner = (*_rules_of(f"{self._root}/{folder}"), *outer)
            for entry in self._scan(folder, inner, end):
                if count == self._max_entries:
                    self.limit = f"only the first {count:,} files and folders"
                    return
                count += 1
                if entry.is_folder:
                    folders.append((f"{entry.name}/", inner))
                yield entry
            if time.monotonic() > end:
                self.limit = f"only the first {count:,} files and folders"
                return

    def _scan(self, folder: str, rules: tuple[_Rules, ...], end: float) -> list[Entry]:
        entries = []
        try:
            with os.scandir(f"{self._root}/{folder}") as scan:
                for item in scan:
                    if not self._is_shown(item.name) or item.path in _OF_THE_SYSTEM:
                        continue
                    is_folder = item.is_dir(follow_symlinks=False)
                    if not any_excludes(rules, item.path, is_folder=is_folder):
                        entries.append(Entry(f"{folder}{item.name}", is_folder, item.is_symlink()))
                    if len(entries) > self._max_entries or time.monotonic() > end:
                        break
        except OSError:
            pass
        return sorted(entries, key=lambda entry: entry.name)

    def _is_shown(self, name: str) -> bool:
        if name in _NEVER or name in _GENERATED or not name.isprintable():
            return False
        return self._hidden or not name.startswith(".")


def is_of_the_system(path: str) -> bool:
    """Tell whether an absolute path lies where the kernel shows processes and devices as files."""
    return path in _OF_THE_SYSTEM or path.startswith(tuple(f"{folder}/" for folder in _OF_THE_SYSTEM))


def any_excludes(rules: tuple[_Rules, ...], path: str, *, is_folder: bool) -> bool:
    """Tell whether the nearest rules that say something about a path exclude it."""
    for of_folder in rules:
        verdict = of_folder.verdict(path, is_folder=is_folder)
        if verdict is not None:
            return verdict
    return False


def read_regular(path: str, max_bytes: int) -> tuple[bytes, os.stat_result]:
    """Return up to `max_bytes` and one more of a regular file, and its status. Raises OSError."""
    descriptor = os.open(path, READ_FLAGS)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "not a regular file")
        parts, left = [], max_bytes + 1
        while left and (part := os.read(descriptor, min(left, 2**20))):
            parts.append(part)
            left -= len(part)
        return b"".join(parts), status
    finally:
        os.close(descriptor)


def _rules_above(root: str) -> tuple[_Rules, ...]:
    """Return the rules of the folders above one in the same repository, the nearest first; none outside of one."""
    rules: list[_Rules] = []
    path = Path(root)
    for folder in (path, *path.parents):
        if folder != path:
            rules += _rules_of(str(folder))
        if (folder / ".git").exists():
            return (*rules, *_rules_of(str(folder), ".git/info/exclude"))
    return ()


def _rules_of(folder: str, name: str = ".gitignore") -> tuple[_Rules, ...]:
    """Return the rules of the file in a folder."""
    base = folder.rstrip("/")
    try:
        data, _ = read_regular(f"{base}/{name}", MAX_RULES_BYTES)
    except OSError:
        return ()
    lines = data.decode("utf-8-sig", "replace").split("\n")
    patterns = tuple(islice(filter(None, map(parse_line, lines)), MAX_PATTERNS))
    return (_Rules(base, patterns),) if patterns else ()
