"""Removing models from the hub's cache: first the links, then the blobs that nothing else in the cache uses.

    removed        the model's files as `edgelm list` shows them, in every revision with the same bytes at that path
    kept           a blob that another file or revision links to; a file that another tool put there
    removed too    a revision with nothing left but files that belong to a model (README, tokenizer, projector); the
                   whole repository after its last revision, with its unfinished downloads except those in progress

Owns that choice. The hub client deletes, and counts references to blobs that repositories share. Never touches
anything outside the cache: a folder in it that is a link to another place is the user's own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.library.hub_cache import (
    LOCKS,
    Repository,
    Snapshot,
    Unfinished,
    blob_lock,
    file_size,
    free_unfinished,
    is_inside,
    link_target,
    names_in,
    read_repository,
    require_inside,
    unfinished_in,
)
from edgelm.library.names import shown
from edgelm.library.ollama_store import ORIGIN
from edgelm.library.scan import LocalModel
from edgelm.library.selection import AUXILIARY

LOCK_S = 1.0
COMPANION = re.compile(  # files that are of no use without a model
    r".*\.(?:md|json|jinja|txt|model|tiktoken|spm|png|jpe?g|svg|gif|webp|ya?ml|pdf|py)|\.gitattributes"
    r"|(?:LICEN[CS]E|NOTICE|USE_POLICY)[\w.-]*",
    re.IGNORECASE | re.DOTALL,
)
WEIGHTS = (".safetensors", ".safetensors.index.json")
PARTIAL = (".part", ".incomplete")


@dataclass(frozen=True, slots=True)
class Removal:
    """The files to remove from one repository. `bytes` is an estimate of the space that this frees."""

    repository: str
    folder: Path
    links: frozenset[Path]  # files of snapshots
    blobs: frozenset[Path]
    snapshots: frozenset[Path]
    refs: frozenset[Path]
    is_whole: bool  # the repository's folder goes too
    bytes: int
    kept: tuple[str, ...]  # files whose bytes stay, because another file uses them
    unfinished: tuple[Unfinished, ...]  # removed with the last model


class Freed(NamedTuple):
    """The bytes freed by removing unfinished downloads, and the downloads that a running pull holds."""

    nbytes: int
    held: list[Unfinished]


def plan_removal(models: Iterable[LocalModel], hub: Path, *, dated: Container[Path] = ()) -> list[Removal]:
    """Return the files to remove with these models, by repository; for paths in `dated`, of one revision only.

    Raises ModelError for a model outside the hub's cache, which is the user's own.
    """
    by_folder: dict[Path, list[LocalModel]] = {}
    for model in models:
        by_folder.setdefault(_repository_folder(model, hub), []).append(model)
    return [_plan(read_repository(folder), group, dated) for folder, group in by_folder.items()]


def remove(models: Iterable[LocalModel], hub: Path, *, dated: Container[Path] = ()) -> int:
    """Remove models; return the number of freed bytes. Raises EdgeLMError if a file cannot be removed.

    Holds the hub client's locks, and looks up again under them what uses each blob.
    """
    freed, models = 0, list(models)
    for removal in plan_removal(models, hub, dated=dated):
        group = [model for model in models if _repository_folder(model, hub) == removal.folder]
        with _locked(hub, removal):
            current = _plan(read_repository(removal.folder), group, dated)
            freed += _execute(current, hub, removal.blobs)
        freed += remove_unfinished(current.unfinished, hub).nbytes
    return freed


def remove_unfinished(downloads: Iterable[Unfinished], hub: Path) -> Freed:
    """Remove unfinished downloads, except those that a pull holds, and the folders that are then empty.

    Raises EdgeLMError if a file cannot be removed.
    """
    downloads = list(downloads)
    removed = free_unfinished(downloads, hub)
    held = [download for download in downloads if download not in removed]
    for folder in {_folder_of(download) for download in removed} - {_folder_of(download) for download in held}:
        _execute(_plan(read_repository(folder), [], ()), hub, frozenset())
    return Freed(sum(download.nbytes for download in removed), held)


def _folder_of(download: Unfinished) -> Path:
    return download.part.parents[1]


def _repository_folder(model: LocalModel, hub: Path) -> Path:
    if model.place == "built-in":
        raise ModelError("the starter is a part of edgelm", "it is removed when edgelm is uninstalled")
    if model.place == "ollama":
        name = shown(model.name.removeprefix(ORIGIN))
        raise ModelError(f"{shown(model.name)} belongs to Ollama", f"remove it with `ollama rm {name}`")
    if model.place != "hub" or model.revision is None:
        message = f"{shown(model.name)} is your own file, not one of the hub's cache"
        raise ModelError(
            message, f"edgelm removes what it can pull again; delete {shown(str(model.path), 200)} yourself"
        )
    parents = (path for path in (model.path, *model.path.parents) if path.name == model.revision)
    folder = next(path for path in parents if path.parent.name == "snapshots").parents[1]
    assert folder.parent == hub, f"{folder} is not in {hub}"
    return folder


def _plan(repository: Repository, models: list[LocalModel], dated: Container[Path]) -> Removal:
    doomed = set(_links(repository, models, dated))
    snapshots = {snapshot.path for snapshot in repository.snapshots if _is_spent(snapshot, doomed)}
    for snapshot in repository.snapshots:
        if snapshot.path in snapshots:
            doomed |= {snapshot.path / file for file in (*snapshot.files, *snapshot.broken)}
    links = [snapshot.path / file for snapshot in repository.snapshots for file in (*snapshot.files, *snapshot.broken)]
    blobs_of = {link: _blob(repository, link) for link in links}
    used = {blob for link, blob in blobs_of.items() if link not in doomed}
    blobs = {blob for link, blob in blobs_of.items() if link in doomed and blob is not None} - used
    commits = {snapshot.name for snapshot in snapshots}
    is_empty = all(
        snapshot.path in snapshots or not (snapshot.files or snapshot.broken) for snapshot in repository.snapshots
    )
    refs = [repository.path / "refs" / ref for ref, commit in repository.refs.items() if commit in commits]
    for path in (*doomed, *blobs, *refs):
        require_inside(path, repository.path.parent)
    # A link leads to another disk: only the link itself would go.
    is_whole = is_empty and not _has_partial_files(repository) and not repository.path.is_symlink()
    return Removal(
        repository.name,
        repository.path,
        frozenset(doomed),
        frozenset(blobs),
        frozenset(snapshots),
        frozenset(refs),
        is_whole,
        sum(file_size(blob) for blob in blobs) + sum(file_size(link) for link in doomed if not link.is_symlink()),
        tuple(sorted({link.name for link in doomed if blobs_of.get(link) in used - {None}})),
        unfinished_in(repository) if is_empty else (),
    )


def _links(repository: Repository, models: list[LocalModel], dated: Container[Path]) -> Iterator[Path]:
    """Yield the snapshot entries that are weights of these models: the same path and bytes, in any revision."""
    for model in models:
        is_gguf = model.format == "gguf"
        root = repository.path / "snapshots" / str(model.revision)
        for file in (file for file in model.files if is_gguf or file.name.endswith(WEIGHTS)):
            inside = file.relative_to(root).as_posix()
            for snapshot in repository.snapshots:
                link = snapshot.path / inside
                if snapshot.revision == model.revision or (
                    model.path not in dated
                    and inside in snapshot.files
                    and _same_bytes(link, file)
                    and is_inside(link, repository.path.parent)
                ):
                    yield link


def _same_bytes(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _is_spent(snapshot: Snapshot, doomed: set[Path]) -> bool:
    """Return whether a revision loses files, and no file that is left can be used by itself."""
    left = [file for file in snapshot.files if snapshot.path / file not in doomed]
    loses_files = len(left) < len(snapshot.files)
    return loses_files and not snapshot.path.is_symlink() and all(_is_companion(file) for file in left)


def _is_companion(file: str) -> bool:
    name = file.rpartition("/")[2]
    return COMPANION.fullmatch(name) is not None or (name.endswith(".gguf") and AUXILIARY.search(name) is not None)


def _blob(repository: Repository, link: Path) -> Path | None:
    """Return the blob of this repository that a link leads to; None if it is no link or leads elsewhere."""
    target = link_target(link)
    return target if target != link and target.parent == repository.path / "blobs" else None


def _has_partial_files(repository: Repository) -> bool:
    """Return whether a download began here that can still be resumed."""
    return any(name.endswith(PARTIAL) for name in names_in(repository.path / "blobs", []))


@contextmanager
def _locked(hub: Path, removal: Removal) -> Iterator[None]:
    """Hold the client's lock of each blob. Raises EdgeLMError if one is being downloaded."""
    from filelock import Timeout

    with ExitStack() as locks:
        try:
            for blob in sorted(removal.blobs):
                locks.enter_context(blob_lock(hub, removal.folder.name, blob.name, LOCK_S))
        except Timeout:
            message = f"{removal.repository} is being downloaded"
            raise EdgeLMError(message, "wait until that is done, or stop it") from None
        except OSError as error:
            message = f"{hub / LOCKS / removal.folder.name} cannot be written: {error.strerror}"
            raise EdgeLMError(message, "change its permissions") from None
        yield


def _execute(removal: Removal, hub: Path, locked: frozenset[Path]) -> int:
    """Delete the files whose locks are held; return the number of freed bytes."""
    from huggingface_hub import DeleteCacheStrategy

    blobs = removal.blobs & locked
    real = {path: file_size(path) for path in (Path(os.path.realpath(file)) for file in (*blobs, *removal.links))}
    strategy = DeleteCacheStrategy(
        expected_freed_size=removal.bytes,
        files=removal.links,
        snapshots=removal.snapshots,
        refs=removal.refs,
        blobs=blobs,
        repos=frozenset(),
        cache_dir=hub,
    )
    try:
        strategy.execute()
        if removal.is_whole and blobs == removal.blobs:
            DeleteCacheStrategy(
                0, frozenset(), frozenset(), frozenset({removal.folder}), frozenset(), cache_dir=hub
            ).execute()
    except OSError as error:
        message = f"{removal.repository} cannot be removed completely: {error.strerror}: {error.filename}"
        raise EdgeLMError(message, "change the permissions and try again; the files that are left are intact") from None
    if left := [link for link in removal.links if os.path.lexists(link)]:
        raise EdgeLMError(f"{left[0]} could not be removed", "change the permissions of its folder")
    return sum(nbytes for path, nbytes in real.items() if not os.path.lexists(path))
