"""The files and folders below a folder, without those that a .gitignore excludes.

Owns the walk, its limits, and git's rules: of several patterns the last one decides, a file in a deeper folder before
one above it, and nothing below an excluded folder comes back. Knows nothing of what files hold.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pathspec.patterns.gitignore.base import GitIgnorePatternError
from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

MAX_ENTRIES = 20_000  # files and folders
MAX_WALK_S = 3.0
MAX_RULES_BYTES = 256 * 2**10  # of a .gitignore
MAX_STARS = 6  # in a pattern: matching one with many takes very long
READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY  # NONBLOCK: a FIFO has no end
_NEVER = frozenset({".git"})
_GENERATED = frozenset({"node_modules", "__pycache__", "site-packages", "venv"})
_BELOW = "ps_d"  # pathspec's group for the slash behind a folder that matches: the path lies below it


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or folder; `name` is relative to the folder where the walk began, with slashes."""

    name: str
    is_folder: bool
    is_link: bool = False


@dataclass(frozen=True, slots=True)
class _Pattern:
    regex: re.Pattern[str]
    excludes: bool
    folders_only: bool


@dataclass(frozen=True, slots=True)
class _Rules:
    """The patterns of one file, for the paths below the folder `base`."""

    base: str
    patterns: tuple[_Pattern, ...]

    def verdict(self, path: str, *, is_folder: bool) -> bool | None:
        """Tell whether the last pattern that matches a path excludes it; None: no pattern matches."""
        name = path[len(self.base) :].lstrip("/")
        for pattern in reversed(self.patterns):
            if pattern.folders_only and not is_folder:
                continue
            match = pattern.regex.match(name)
            if match is not None and not match.groupdict().get(_BELOW):
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
            for entry in self._scan(folder, inner):
                count += 1
                if count > self._max_entries or time.monotonic() > end:
                    self.limit = f"only the first {count - 1:,} files and folders"
                    return
                if entry.is_folder:
                    folders.append((f"{entry.name}/", inner))
                yield entry

    def _scan(self, folder: str, rules: tuple[_Rules, ...]) -> list[Entry]:
        entries = []
        try:
            with os.scandir(f"{self._root}/{folder}") as scan:
                for item in scan:
                    if not self._is_shown(item.name):
                        continue
                    is_folder = item.is_dir(follow_symlinks=False)
                    if not any_excludes(rules, item.path, is_folder=is_folder):
                        entries.append(Entry(f"{folder}{item.name}", is_folder, item.is_symlink()))
                    if len(entries) > self._max_entries:
                        break
        except OSError:
            pass
        return sorted(entries, key=lambda entry: entry.name)

    def _is_shown(self, name: str) -> bool:
        if name in _NEVER or name in _GENERATED or not name.isprintable():
            return False
        return self._hidden or not name.startswith(".")


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
    patterns = tuple(pattern for line in lines if (pattern := _compiled(line)) is not None)
    return (_Rules(base, patterns),) if patterns else ()


def _compiled(line: str) -> _Pattern | None:
    """Compile a line of a .gitignore; None where it has no valid pattern.

    pathspec's expressions match what lies below a folder, too. The walk does not enter excluded folders, so that the
    pattern of a folder is compiled without its slash and has to match the folder itself.
    """
    line = re.sub(r"(?<!\\) +$", "", line.removesuffix("\r"))
    if not line or line.startswith("#") or line.count("*") > MAX_STARS:
        return None
    body = line.rstrip("/")
    try:
        pattern = GitIgnoreSpecPattern(body)
    except GitIgnorePatternError:
        return None
    if pattern.include is None or pattern.regex is None:
        return None
    return _Pattern(pattern.regex, pattern.include, folders_only=body != line)
