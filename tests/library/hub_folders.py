"""Caches in the hub client's layout, made by hand: blobs, snapshots of links, refs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

FIRST, SECOND, THIRD = "1" * 40, "2" * 40, "3" * 40  # commits


def put(
    hub: Path,
    repository: str,
    files: Mapping[str, bytes],
    *,
    revision: str = FIRST,
    ref: str | None = "main",
    links: bool = True,
    at: float | None = None,
) -> Path:
    """Add a revision of a repository; return its snapshot. `at` is its time, in seconds since 1970."""
    folder = hub / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True, exist_ok=True)
    (folder / "blobs").mkdir(exist_ok=True)
    for name, data in files.items():
        path = snapshot / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not links:
            path.write_bytes(data)
            continue
        blob = folder / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        path.symlink_to(os.path.relpath(blob, path.parent))
    if ref is not None:
        (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / ref).write_text(revision)
    if at is not None:
        os.utime(snapshot, (at, at))
    return snapshot


def put_part(hub: Path, repository: str, data: bytes, file: str | None = None) -> Path:
    """Add an unfinished download; return its part. `file` is its path in the repository."""
    folder = hub / f"models--{repository.replace('/', '--')}"
    (folder / "snapshots" / THIRD).mkdir(parents=True, exist_ok=True)
    (folder / "blobs").mkdir(exist_ok=True)
    part = folder / "blobs" / f"{hashlib.sha256(data).hexdigest()}.part"
    part.write_bytes(data)
    part.with_name(f"{part.name}.etag").write_text('"etag"')
    if file is not None:
        part.with_name(f"{part.name}.path").write_text(file)
    return part


def share(hub: Path, data: bytes, *blobs: Path) -> Path:
    """Move the bytes of blobs of several repositories to the store that the client (2.4) shares between them."""
    content = hashlib.sha256(b"xet" + data).hexdigest()
    store = hub / "blobs" / content[:2] / content
    store.parent.mkdir(parents=True, exist_ok=True)
    (hub / "blobs" / ".huggingface-shared-blobs").write_text("1\n")
    store.write_bytes(data)
    for blob in blobs:
        blob.unlink()
        blob.symlink_to(os.path.relpath(store, blob.parent))
    references = "".join(f"{blob.relative_to(hub).as_posix()}\n" for blob in blobs)
    store.with_name(f"{content}.refs").write_text(references)
    return store
