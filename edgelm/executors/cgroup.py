"""Where this process stands in Linux control groups, versions 1 and 2.

Owns finding the folders. Knows nothing of what is limited there: `cores` and `memory` read their own files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def cgroup_folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders of this process's group and of all its parents, for one controller ("cpu", "memory").

    Both versions are searched, since one machine may run both; each reader looks for its version's file names.
    Some folders may not exist. Nothing is yielded where there are no control groups.
    """
    mounts = list(_mounts(root))
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, own = rest.partition(":")
        unified = hierarchy == "0" and not controllers
        if not unified and controller not in controllers.split(","):
            continue
        for fstype, options, source, at in mounts:
            if (fstype == "cgroup2") if unified else (fstype == "cgroup" and controller in options):
                top = root / at.relative_to("/")
                folder = top / _below(PurePosixPath(own), source)
                yield folder
                yield from (parent for parent in folder.parents if parent.is_relative_to(top))


def read_text(path: Path) -> str | None:
    """Return a file's text, or None where it is absent or unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _mounts(root: Path) -> Iterator[tuple[str, list[str], PurePosixPath, PurePosixPath]]:
    """Yield (file system, its options, the group that is mounted, where) of each mounted group hierarchy."""
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        mount, separator, filesystem = line.partition(" - ")
        before, after = mount.split(), filesystem.split()
        if separator and len(before) >= 5 and len(after) >= 3 and after[0] in ("cgroup", "cgroup2"):
            source, at = (PurePosixPath(_unescape(before[i])) for i in (3, 4))
            if at.is_absolute():
                yield after[0], after[2].split(","), source, at


def _below(own: PurePosixPath, source: PurePosixPath) -> PurePosixPath:
    """Return the group's path inside a mount of the group `source`, or "." where it is not below it.

    In a container the mount is often of the container's own group: `own` is then equal to it, or outside of it.
    """
    if ".." in own.parts or not own.is_relative_to(source):
        return PurePosixPath(".")
    return own.relative_to(source)


def _unescape(path: str) -> str:
    """Undo the kernel's octal escapes of blanks in a path."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)
