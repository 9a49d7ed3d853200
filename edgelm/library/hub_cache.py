"""The layout of the hub client's cache, read without it: repositories, snapshots, links to blobs.

    models--OWNER--NAME/blobs/ETAG                      the bytes, each once
                       /snapshots/COMMIT/FILE           a link to a blob, or the file itself where links do not work
                       /refs/main                       the commit of a branch

Owns what is there, whatever state it is in: what cannot be read is told in a line and skipped. Changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "models--"
MAX_REF_BYTES = 200


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A revision. `files` are paths inside of it that can be opened; `broken` those whose bytes are gone."""

    revision: str
    path: Path
    files: tuple[str, ...]
    broken: tuple[str, ...] = ()

    def blob(self, file: str) -> Path:
        """Return where the file's link leads, one step: a blob, or the file itself."""
        return first_hop(self.path / file)


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository's snapshots, that of its branch main first, then the newest first."""

    name: str  # OWNER/NAME
    path: Path
    snapshots: tuple[Snapshot, ...]
    refs: dict[str, str]  # branch or tag: commit

    def has_revision(self, snapshot: Snapshot, wanted: str | None) -> bool:
        """Tell whether a snapshot is of a branch, tag or commit (or its beginning)."""
        if wanted is None:
            return True
        begins = len(wanted) >= 7 and snapshot.revision.startswith(wanted.lower())
        return begins or self.refs.get(wanted) == snapshot.revision


def repositories(hub: Path, problems: list[str] | None = None) -> Iterator[Repository]:
    """Yield the model repositories of a cache by name; a line for each that cannot be read goes to `problems`."""
    told = [] if problems is None else problems
    for name in sorted(names_in(hub, told)):
        if name.startswith(PREFIX):
            yield read_repository(hub / name, told)


def read_repository(path: Path, problems: list[str] | None = None) -> Repository:
    """Read one repository's folder; what is missing is empty."""
    told = [] if problems is None else problems
    refs = _refs(path / "refs")
    snapshots = path / "snapshots"
    found = [_snapshot(snapshots / name, told) for name in names_in(snapshots, told)]
    times = {each.revision: _changed(each.path) for each in found}
    found.sort(key=lambda each: (each.revision == refs.get("main"), times[each.revision]), reverse=True)
    owner, _, name = path.name.removeprefix(PREFIX).partition("--")
    return Repository(f"{owner}/{name}" if name else owner, path, tuple(found), refs)


def folder_name(repository: str) -> str:
    """Return the name of a model repository's folder."""
    return PREFIX + repository.replace("/", "--")


def first_hop(path: Path) -> Path:
    """Return where a link leads, without following what is there."""
    try:
        target = os.readlink(path)  # noqa: PTH115 - relative to the link
    except OSError:
        return path
    return Path(os.path.normpath(path.parent / target))


def names_in(folder: Path, problems: list[str]) -> list[str]:
    """Return the names in a folder; none where there is no folder, and a line where it cannot be read."""
    try:
        return os.listdir(folder)  # noqa: PTH208 - names alone, of thousands
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        problems.append(f"{folder} cannot be read: {error.strerror}")
        return []


def _snapshot(path: Path, problems: list[str]) -> Snapshot:
    files: list[str] = []
    broken: list[str] = []

    def tell(error: OSError) -> None:
        problems.append(f"{error.filename} cannot be read: {error.strerror}")

    for folder, _, names in os.walk(path, onerror=tell):
        inside = os.path.relpath(folder, path)
        for name in names:
            file = name if inside == os.curdir else f"{inside}/{name}"
            (files if os.path.isfile(f"{folder}/{name}") else broken).append(file)  # noqa: PTH113 - thousands of them
    return Snapshot(path.name, path, tuple(sorted(files)), tuple(sorted(broken)))


def _refs(folder: Path) -> dict[str, str]:
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with suppress(OSError), path.open("rb") as file:
                found[path.relative_to(folder).as_posix()] = file.read(MAX_REF_BYTES).decode("ascii", "replace").strip()
    return found


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
