"""The hub client's cache on this disk, in the client's layout, so that every other tool finds what was pulled.

    .locks/models--OWNER--NAME/<hash>.lock      held while a file is downloaded, by us and by the client
    models--OWNER--NAME/blobs/<hash>            the bytes, each once; <hash>.part* while incomplete (download.py)
                       /snapshots/<commit>/FILE a link to a blob, or the file itself where links do not work
                       /refs/<revision>         the commit of a branch or tag, written when all files are there
                       /refs/edgelm-unfinished  the commit of a pull that is not complete: `hf cache prune` keeps it

Owns that layout, its locks, and unfinished downloads. Reads the cache in whatever state it is: a folder that cannot be
read is reported in a line and skipped. Downloads nothing.
"""

from __future__ import annotations

import os
import uuid
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgelm.base.atomic import atomic_write
from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.base.macos_files import is_macos_file
from edgelm.library.catalog import find_entry, name_of
from edgelm.library.names import CatalogName, HubReference, Reference, parse_name, shown
from edgelm.library.selection import is_companion, quantization_of

if TYPE_CHECKING:
    from edgelm.library.hub import HubFile, Listing

PREFIX = "models--"
LOCKS = ".locks"
MAX_REF_BYTES = 200
LOCK_S = 0.05
CACHE_TAG = "CACHEDIR.TAG"
CACHE_TAG_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n# Files of the Hugging Face Hub: see bford.info/cachedir\n"
)
PART = ".part"
PART_NOTES = (".path", ".etag", ".map")  # suffixes of the files beside a part
MAX_PATH_BYTES = 4096
UNFINISHED_REF = "edgelm-unfinished"  # without a ref, `hf cache prune` deletes the repository, parts included


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A revision. `files` are paths inside it that can be opened; `broken` are those whose bytes are gone."""

    revision: str
    path: Path
    files: tuple[str, ...]
    broken: tuple[str, ...] = ()

    def blob(self, file: str) -> Path:
        """Return the target of the file's link, one step: a blob, or the file itself."""
        return link_target(self.path / file)


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository's snapshots: that of branch main first, then the newest first."""

    name: str  # OWNER/NAME
    path: Path
    snapshots: tuple[Snapshot, ...]
    refs: dict[str, str]  # branch or tag: commit

    def has_revision(self, snapshot: Snapshot, revision: str | None) -> bool:
        """Return whether a snapshot belongs to a branch, a tag or a commit (or the beginning of one)."""
        if revision is None:
            return True
        is_commit = len(revision) >= 7 and snapshot.revision.startswith(revision.lower())
        return is_commit or self.refs.get(revision) == snapshot.revision


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An unfinished download. `file` is its path inside the repository, None if unknown."""

    repository: str  # OWNER/NAME
    part: Path
    file: str | None
    nbytes: int
    reference: HubReference | None = None  # that was pulled

    @property
    def revision(self) -> str | None:
        return self.reference.revision if self.reference else None

    @property
    def quantization(self) -> str | None:
        """The label of the model whose file it is, as far as it is known."""
        if self.file is None or is_companion(self.file):
            return self.reference.quantization if self.reference else None
        return quantization_of(self.file)

    @property
    def name(self) -> str:
        """The name by which `edgelm pull` resumes it, as far as it is known."""
        if self.file is None or not self.file.casefold().endswith(".gguf") or is_companion(self.file):
            return str(self.reference or self.repository)
        label = self.quantization
        if label is None:
            return str(HubReference(self.repository, file=self.file, revision=self.revision))
        name = None if self.revision else name_of(self.repository, label)
        return name or str(HubReference(self.repository, label, revision=self.revision))


def repositories(hub: Path, problems: list[str] | None = None) -> Iterator[Repository]:
    """Yield the model repositories of a cache by name; a line for each unreadable one goes to `problems`."""
    problems = [] if problems is None else problems
    for name in sorted(names_in(hub, problems)):
        if name.startswith(PREFIX):
            yield read_repository(hub / name, problems)


def read_repository(path: Path, problems: list[str] | None = None) -> Repository:
    """Read one repository's folder; missing parts are empty."""
    problems = [] if problems is None else problems
    refs = _read_refs(path / "refs")
    folder = path / "snapshots"
    snapshots = [_read_snapshot(folder / name, problems) for name in names_in(folder, problems)]
    times = {snapshot.revision: _modified_at(snapshot.path) for snapshot in snapshots}
    snapshots.sort(key=lambda snapshot: (snapshot.revision == refs.get("main"), times[snapshot.revision]), reverse=True)
    owner, _, name = path.name.removeprefix(PREFIX).partition("--")
    return Repository(f"{owner}/{name}" if name else owner, path, tuple(snapshots), refs)


def folder_name(repository: str) -> str:
    """Return the name of a model repository's folder."""
    return PREFIX + repository.replace("/", "--")


def link_target(path: Path) -> Path:
    """Return the target of a link, one step; the path itself if it is no link."""
    try:
        target = os.readlink(path)  # noqa: PTH115 - relative to the link
    except OSError:
        return path
    return Path(os.path.normpath(path.parent / target))


def is_inside(path: Path, hub: Path) -> bool:
    """Return whether an entry of the cache is really in it, and not in a folder elsewhere that the cache links to."""
    return Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(hub))


def require_inside(path: Path, hub: Path) -> None:
    """Raise ModelError for an entry that is not in the cache, so that it is never removed."""
    if not is_inside(path, hub):
        place = shown(os.path.realpath(path.parent), 200)
        raise ModelError(
            f"{shown(path.name)} is in {place}, outside the cache, which only links to it",
            "edgelm removes nothing outside the cache; delete it there yourself",
        )


def names_in(folder: Path, problems: list[str]) -> list[str]:
    """Return the names in a folder, without what macOS puts there: none if the folder does not exist.

    If it cannot be read, a line goes to `problems`.
    """
    try:
        return [name for name in os.listdir(folder) if not is_macos_file(name)]  # noqa: PTH208 - names alone, of thousands
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        problems.append(f"{folder} cannot be read: {error.strerror}")
        return []


def file_size(path: Path, missing: int = 0) -> int:
    """Return the size of a file in bytes, or `missing` if it cannot be read."""
    try:
        return path.stat().st_size
    except OSError:
        return missing


def _read_snapshot(path: Path, problems: list[str]) -> Snapshot:
    files: list[str] = []
    broken: list[str] = []

    def report(error: OSError) -> None:
        problems.append(f"{error.filename} cannot be read: {error.strerror}")

    for folder, _, names in os.walk(path, onerror=report):
        inside = os.path.relpath(folder, path)
        for name in names:
            if is_macos_file(name):
                continue
            file = name if inside == os.curdir else f"{inside}/{name}"
            (files if os.path.isfile(f"{folder}/{name}") else broken).append(file)  # noqa: PTH113 - thousands of them
    return Snapshot(path.name, path, tuple(sorted(files)), tuple(sorted(broken)))


def _read_refs(folder: Path) -> dict[str, str]:
    refs = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with suppress(OSError), path.open("rb") as file:
                refs[path.relative_to(folder).as_posix()] = file.read(MAX_REF_BYTES).decode("ascii", "replace").strip()
    return refs


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


@contextmanager
def blob_lock(hub: Path, repository_folder: str, blob: str, timeout_s: float = LOCK_S) -> Iterator[None]:
    """Hold the hub client's lock of a blob. Raises filelock.Timeout if another process or thread has it."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    folder = hub / LOCKS / repository_folder
    folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(folder / f"{blob}.lock", timeout=timeout_s):
        yield


class CachedRepository:
    """The folder of one listing in a cache, as a pull writes it."""

    def __init__(self, cache: Path, listing: Listing) -> None:
        self.folder = cache / folder_name(listing.repository)
        self.blobs = self.folder / "blobs"
        self.snapshot = self.folder / "snapshots" / listing.commit
        self._cache = cache
        self._listing = listing

    def make_folders(self) -> None:
        """Create the folders, and the tag by which backup programs skip a cache."""
        for folder in (self.blobs, self.snapshot, self._cache / LOCKS / self.folder.name):
            folder.mkdir(parents=True, exist_ok=True)
        self._write_ref(UNFINISHED_REF)
        tag = self._cache / CACHE_TAG
        if not tag.exists():
            with suppress(OSError):
                tag.write_text(CACHE_TAG_TEXT)

    def path(self, file: HubFile) -> Path:
        """Return the path of a file in the snapshot."""
        return self.snapshot / file.path

    def is_here(self, file: HubFile) -> bool:
        """Return whether a file is complete and linked."""
        return file_size(self.path(file), -1) == file.size

    def has_blob(self, file: HubFile) -> bool:
        """Return whether all bytes are here; after a power cut, a file may be shorter than what was written."""
        return file_size(self.blobs / file.blob, -1) == file.size

    def bytes_of(self, file: HubFile) -> Path | None:
        """Return where all bytes of a file are; None: some are missing."""
        if self.is_here(file):
            return self.path(file)
        return self.blobs / file.blob if self.has_blob(file) else None

    def discard(self, file: HubFile) -> None:
        """Remove a damaged file. The caller holds the lock."""
        for path in (self.path(file), self.blobs / file.blob):
            path.unlink(missing_ok=True)

    def leave(self) -> None:
        """Remove what a pull made that ends without a byte: folders that are empty, and the ref of its commit."""
        if any(name.endswith(PART) for name in names_in(self.blobs, [])):
            return
        (self.folder / "refs" / UNFINISHED_REF).unlink(missing_ok=True)
        for folder in (self.snapshot, self.snapshot.parent, self.folder / "refs", self.blobs, self.folder):
            with suppress(OSError):  # not empty
                folder.rmdir()

    def partial_len(self, file: HubFile) -> int:
        """Return how many bytes of a file were downloaded so far."""
        return min(part_len(self.blobs / f"{file.blob}{PART}"), file.size)

    @contextmanager
    def lock(self, file: HubFile) -> Iterator[bool]:
        """Try to hold the hub's lock of a file; yield False if another process or thread has it."""
        from filelock import Timeout

        with ExitStack() as stack:
            try:
                stack.enter_context(blob_lock(self._cache, self.folder.name, file.blob))
            except Timeout:
                yield False
                return
            yield True

    def link(self, file: HubFile) -> None:
        """Link the blob into the snapshot. The caller holds the lock."""
        path = self.path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        blob = self.blobs / file.blob
        new = path.with_name(f".{uuid.uuid4().hex}.link")
        try:
            new.symlink_to(os.path.relpath(blob, path.parent))
        except OSError:  # a file system without links: move the file itself, as the client does
            blob.replace(path)
            return
        new.replace(path)

    def finish(self) -> None:
        """Point the requested revision at this commit, now that the model is complete, and remove outdated parts."""
        if self._listing.revision != self._listing.commit:
            self._write_ref(self._listing.revision)
        paths = {file.path: file.blob for file in self._listing.files}
        parts = unfinished_in(read_repository(self.folder))
        outdated = [
            part
            for part in parts
            if (part.revision or "main") == self._listing.revision
            and part.file is not None
            and paths.get(part.file) != part.part.stem
            and is_inside(part.part, self._cache)
        ]
        if not set(parts) - set(free_unfinished(outdated, self._cache)):
            (self.folder / "refs" / UNFINISHED_REF).unlink(missing_ok=True)

    def _write_ref(self, name: str) -> None:
        ref = self.folder / "refs" / name
        with suppress(OSError):
            if ref.read_text() == self._listing.commit:
                return
        ref.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(ref, self._listing.commit.encode(), mode=0o666)  # users may share a cache


def all_unfinished(hub: Path) -> list[Unfinished]:
    """Return the unfinished downloads of a cache, by repository."""
    return [download for repository in repositories(hub) for download in unfinished_in(repository)]


def unfinished_in(repository: Repository) -> tuple[Unfinished, ...]:
    """Return the unfinished downloads of one repository, by file name."""
    blobs = repository.path / "blobs"
    parts = [blobs / name for name in names_in(blobs, []) if name.endswith(PART)]
    downloads = [Unfinished(repository.name, part, *_note_of(part)) for part in parts]
    return tuple(sorted(downloads, key=lambda download: (download.file or "", download.part)))


def unfinished_of(reference: Reference, hub: Path) -> list[Unfinished]:
    """Return the unfinished downloads that a name refers to: one quantization, or the whole repository."""
    if isinstance(reference, CatalogName):
        reference = find_entry(reference).reference(reference.quantization)
    if not isinstance(reference, HubReference):
        return []
    return [download for download in all_unfinished(hub) if _is_of(download, reference)]


def free_unfinished(downloads: Iterable[Unfinished], hub: Path) -> list[Unfinished]:
    """Delete unfinished downloads under the hub's locks; return those deleted: all but the ones a pull holds.

    Raises EdgeLMError if a file cannot be deleted.
    """
    return [download for download in downloads if _free(download, hub)]


def _free(download: Unfinished, hub: Path) -> bool:
    from filelock import Timeout

    part = download.part
    require_inside(part, hub)
    try:
        with blob_lock(hub, part.parents[1].name, part.name.removesuffix(PART)):
            for path in (*(part.with_name(part.name + suffix) for suffix in PART_NOTES), part):
                path.unlink(missing_ok=True)
    except Timeout:
        return False
    except OSError as error:
        message = f"{error.filename or part} cannot be removed: {error.strerror}"
        raise EdgeLMError(message, "change the permissions and try again") from None
    return True


def _is_of(download: Unfinished, reference: HubReference) -> bool:
    if download.repository.casefold() != reference.repository.casefold():
        return False
    if reference.revision is not None and reference.revision != download.revision:
        return False
    if reference.file is not None:
        return download.file is not None and reference.file in (download.file, download.file.rpartition("/")[2])
    if reference.quantization is None or download.file is None:
        return True
    return download.quantization in (reference.quantization, f"UD-{reference.quantization}")


def note_text(file: HubFile, reference: HubReference) -> str:
    """Return the note beside a part: the file's path in the repository, and the name that was pulled."""
    return f"{file.path}\n{reference}\n"


def _note_of(part: Path) -> tuple[str | None, int, HubReference | None]:
    """Return what is known of a part: the file's path in the repository, the bytes so far, and the name pulled."""
    path, reference = None, None
    with suppress(OSError, ValueError), part.with_name(part.name + ".path").open("rb") as file:
        first, _, second = file.read(MAX_PATH_BYTES).decode().partition("\n")
        path = first if first and first.isprintable() else None
        with suppress(ModelError):
            parsed = parse_name(second.strip()) if path and second else None
            reference = parsed if isinstance(parsed, HubReference) else None
    return path, part_len(part), reference


def part_len(part: Path) -> int:
    """Return how many bytes of an unfinished download are here."""
    size = file_size(part)
    _, counts = read_map(part)
    return min(sum(counts), size) if counts else size


def read_map(part: Path) -> tuple[int, list[int]]:
    """Return the length of a part's segments, and the bytes of each so far; no segments: the bytes have no gap."""
    with suppress(OSError, ValueError):
        numbers = array("Q", part.with_name(part.name + ".map").read_bytes())
        if len(numbers) > 1 and all(count <= numbers[0] for count in numbers[1:]):
            return numbers[0], numbers[1:].tolist()
    return 0, []
