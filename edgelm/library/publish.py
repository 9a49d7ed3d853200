"""The hub client's cache, written as the client writes it, so that every other tool finds what was pulled.

    .locks/models--OWNER--NAME/<hash>.lock       held while a file is fetched, by us and by the client
    models--OWNER--NAME/blobs/<hash>             the bytes
                       /snapshots/<commit>/FILE  a link to them
                       /refs/<revision>          the commit, written when all files are there

Owns that layout and the lock. Fetches nothing.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgelm.library.hub import HubFile, Listing
from edgelm.library.hub_cache import folder_name

LOCK_S = 0.05
CACHE_TAG = "CACHEDIR.TAG"
CACHE_TAG_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n# Files of the Hugging Face Hub: see bford.info/cachedir\n"
)


class CachedRepository:
    """The folder of one listing in a cache."""

    def __init__(self, cache: Path, listing: Listing) -> None:
        self.folder = cache / folder_name(listing.repository)
        self.blobs = self.folder / "blobs"
        self.snapshot = self.folder / "snapshots" / listing.commit
        self._locks = cache / ".locks" / self.folder.name
        self._cache = cache
        self._listing = listing

    def make(self) -> None:
        """Make the folders."""
        for folder in (self.blobs, self.snapshot, self._locks):
            folder.mkdir(parents=True, exist_ok=True)
        tag = self._cache / CACHE_TAG  # backups leave such folders out
        if not tag.exists():
            with suppress(OSError):
                tag.write_text(CACHE_TAG_TEXT)

    def path(self, file: HubFile) -> Path:
        """Return where a file of the model is found by its name."""
        return self.snapshot / file.path

    def is_here(self, file: HubFile) -> bool:
        """Tell whether a file is complete and linked."""
        return _size(self.path(file)) == file.size

    def has_blob(self, file: HubFile) -> bool:
        """Tell whether the bytes are here; after a power cut, a file may be shorter than what was written."""
        return _size(self.blobs / file.blob) == file.size

    def part_len(self, file: HubFile) -> int:
        """Return how many bytes of a file have come so far."""
        return max(0, min(_size(self.blobs / f"{file.blob}.part"), file.size))

    @contextmanager
    def lock(self, file: HubFile) -> Iterator[bool]:
        """Hold the hub's lock of a file; yields False, without it, where another process or thread has it."""
        from filelock import Timeout
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

        lock = WeakFileLock(self._locks / f"{file.blob}.lock", timeout=LOCK_S)
        try:
            lock.__enter__()
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.__exit__(None, None, None)

    def link(self, file: HubFile) -> None:
        """Give the bytes their name in the snapshot. The caller holds the lock."""
        path = self.path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        blob = self.blobs / file.blob
        new = path.with_name(f".{uuid.uuid4().hex}.link")
        try:
            new.symlink_to(os.path.relpath(blob, path.parent))
        except OSError:  # a file system without links: the file itself, as the client does
            blob.replace(path)
            return
        new.replace(path)

    def set_ref(self) -> None:
        """Let the revision that was asked for mean this commit, now that the model is whole."""
        if self._listing.revision == self._listing.commit:
            return
        ref = self.folder / "refs" / self._listing.revision
        with suppress(OSError):
            if ref.read_text() == self._listing.commit:
                return
        ref.parent.mkdir(parents=True, exist_ok=True)
        new = ref.with_name(f"{ref.name}.{uuid.uuid4().hex}.tmp")
        new.write_text(self._listing.commit)
        new.replace(ref)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
