"""Freeing models of the hub's cache: links first, then the blobs that nothing else in the cache uses.

    asked for      a model as `edgelm list` shows it: its files, in every revision that has the same bytes at that path
    stays          a blob that another file or revision links to, a file that another tool put there
    goes with it   a revision in which nothing but what belongs to a model is left (README, tokenizer, projector); the
                   whole repository when that was its last one, with what came of downloads that were not finished:
                   all but what is being fetched

Owns the choice of what goes. The deleting is the hub client's own, which also counts the references to blobs that
repositories share. Never touches what lies outside of the cache.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from edgelm.errors import EdgeLMError, ModelError
from edgelm.library.files import NO_MODEL
from edgelm.library.hub_cache import Repository, Snapshot, read_repository
from edgelm.library.local import LocalModel
from edgelm.library.names import shown
from edgelm.library.unfinished import Unfinished, free_unfinished, unfinished_in

LOCK_S = 1.0
COMPANION = re.compile(  # what belongs to a model and is of no use without it
    r".*\.(?:md|json|jinja|txt|model|tiktoken|spm|png|jpe?g|svg|gif|webp|ya?ml|pdf|py)|\.gitattributes"
    r"|(?:LICEN[CS]E|NOTICE|USE_POLICY)[\w.-]*",
    re.IGNORECASE | re.DOTALL,
)
WEIGHTS = (".safetensors", ".safetensors.index.json")
UNFINISHED = (".part", ".incomplete")


@dataclass(frozen=True, slots=True)
class Removal:
    """What goes of one repository. `bytes` are those that will be free, as far as can be known before."""

    repository: str
    folder: Path
    links: frozenset[Path]  # files of snapshots
    blobs: frozenset[Path]
    snapshots: frozenset[Path]
    refs: frozenset[Path]
    whole: bool  # the repository's folder itself
    bytes: int
    kept: tuple[str, ...]  # files whose bytes stay, since something else uses them
    unfinished: tuple[Unfinished, ...]  # goes with the last model


class Freed(NamedTuple):
    """How many bytes of downloads are free, and what stays, since a pull is at it."""

    nbytes: int
    held: list[Unfinished]


def plan_removal(models: Iterable[LocalModel], hub: Path, *, dated: Container[Path] = ()) -> list[Removal]:
    """Return what removing these models takes away, by repository; of those in `dated` one revision alone.

    Raises ModelError for a model that is not in the hub's cache: it is the user's own.
    """
    by_folder: dict[Path, list[LocalModel]] = {}
    for model in models:
        by_folder.setdefault(_repository_folder(model, hub), []).append(model)
    return [_plan(read_repository(folder), group, dated) for folder, group in by_folder.items()]


def remove(models: Iterable[LocalModel], hub: Path, *, dated: Container[Path] = ()) -> int:
    """Remove models; return how many bytes are free now. Raises EdgeLMError where something hinders it.

    The locks of the hub's client are held meanwhile, and what uses a blob is looked up again under them.
    """
    freed, models = 0, list(models)
    for removal in plan_removal(models, hub, dated=dated):
        group = [model for model in models if _repository_folder(model, hub) == removal.folder]
        with _locked(hub, removal):
            now = _plan(read_repository(removal.folder), group, dated)
            freed += _execute(now, hub, removal.blobs)
        freed += remove_unfinished(now.unfinished, hub).nbytes
    return freed


def remove_unfinished(wanted: Iterable[Unfinished], hub: Path) -> Freed:
    """Remove what came of downloads that were not finished, but for what a pull holds, and the folders left empty.

    Raises EdgeLMError where something hinders it.
    """
    wanted = list(wanted)
    gone = free_unfinished(wanted, hub)
    for folder in {each.part.parents[1] for each in gone}:
        if folder not in {each.part.parents[1] for each in wanted if each not in gone}:
            _execute(_plan(read_repository(folder), [], ()), hub, frozenset())
    return Freed(sum(each.nbytes for each in gone), [each for each in wanted if each not in gone])


def _repository_folder(model: LocalModel, hub: Path) -> Path:
    if model.place == "built-in":
        raise ModelError("the starter is a part of edgelm", "it goes when edgelm is uninstalled")
    if model.place != "hub" or model.revision is None:
        message = f"{shown(model.name)} is your own file, not one of the hub's cache"
        raise ModelError(
            message, f"edgelm removes what it can pull again; delete {shown(str(model.path), 200)} yourself"
        )
    snapshots = (each for each in (model.path, *model.path.parents) if each.name == model.revision)
    folder = next(each for each in snapshots if each.parent.name == "snapshots").parents[1]
    assert folder.parent == hub, f"{folder} is not of {hub}"
    return folder


def _plan(repository: Repository, models: list[LocalModel], dated: Container[Path]) -> Removal:
    doomed = set(_links(repository, models, dated))
    snapshots = {each.path for each in repository.snapshots if _is_spent(each, doomed)}
    for snapshot in repository.snapshots:
        if snapshot.path in snapshots:
            doomed |= {snapshot.path / file for file in (*snapshot.files, *snapshot.broken)}
    links = [each.path / file for each in repository.snapshots for file in (*each.files, *each.broken)]
    blobs_of = {link: _blob(repository, link) for link in links}
    used = {blob for link, blob in blobs_of.items() if link not in doomed}
    blobs = {blob for link, blob in blobs_of.items() if link in doomed and blob is not None} - used
    gone = {snapshot.name for snapshot in snapshots}
    empty = all(each.path in snapshots or not (each.files or each.broken) for each in repository.snapshots)
    whole = empty and not _is_unfinished(repository) and not _is_link(repository)
    return Removal(
        repository.name,
        repository.path,
        frozenset(doomed),
        frozenset(blobs),
        frozenset(snapshots),
        frozenset(repository.path / "refs" / ref for ref, commit in repository.refs.items() if commit in gone),
        whole,
        sum(_size(blob) for blob in blobs) + sum(_size(link) for link in doomed if not link.is_symlink()),
        tuple(sorted({link.name for link in doomed if blobs_of.get(link) in used - {None}})),
        unfinished_in(repository) if empty else (),
    )


def _links(repository: Repository, models: list[LocalModel], dated: Container[Path]) -> Iterator[Path]:
    """Yield the entries of snapshots that are these models' weights: the same path and bytes, in any revision."""
    for model in models:
        files = model.files if model.format == "gguf" else [each for each in model.files if each.name.endswith(WEIGHTS)]
        root = repository.path / "snapshots" / str(model.revision)
        for snapshot in repository.snapshots:
            for file in files:
                inside = file.relative_to(root).as_posix()
                same = snapshot.revision == model.revision or (
                    model.path not in dated and inside in snapshot.files and _same_bytes(snapshot.path / inside, file)
                )
                if same:
                    yield snapshot.path / inside


def _same_bytes(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _is_spent(snapshot: Snapshot, doomed: set[Path]) -> bool:
    """Tell whether a revision loses files, and nothing is left in it that is of use by itself."""
    left = [file for file in snapshot.files if snapshot.path / file not in doomed]
    touched = len(left) < len(snapshot.files)
    return touched and not snapshot.path.is_symlink() and all(_is_companion(file) for file in left)


def _is_companion(file: str) -> bool:
    name = file.rpartition("/")[2]
    return COMPANION.fullmatch(name) is not None or (name.endswith(".gguf") and NO_MODEL.search(name) is not None)


def _blob(repository: Repository, link: Path) -> Path | None:
    """Return the blob of this repository that a link leads to; None for a file itself, and for any other place."""
    if not link.is_symlink():
        return None
    target = Path(os.path.normpath(link.parent / link.readlink()))
    return target if target.parent == repository.path / "blobs" else None


def _is_unfinished(repository: Repository) -> bool:
    """Tell whether a download began here that can still be continued."""
    try:
        return any(each.name.endswith(UNFINISHED) for each in (repository.path / "blobs").iterdir())
    except OSError:
        return False


def _is_link(repository: Repository) -> bool:
    return repository.path.is_symlink()  # to another disk: the link alone would go


@contextmanager
def _locked(hub: Path, removal: Removal) -> Iterator[None]:
    """Hold the client's lock of each blob. Raises EdgeLMError where somebody fetches one."""
    from filelock import Timeout
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    locks = hub / ".locks" / removal.folder.name
    with ExitStack() as held:
        try:
            locks.mkdir(parents=True, exist_ok=True)
            for blob in sorted(removal.blobs):
                held.enter_context(WeakFileLock(locks / f"{blob.name}.lock", timeout=LOCK_S))
        except Timeout:
            raise EdgeLMError(f"{removal.repository} is being fetched just now", "wait for that, or end it") from None
        except OSError as error:
            raise EdgeLMError(f"{locks} cannot be written: {error.strerror}", "change its permissions") from None
        yield


def _execute(removal: Removal, hub: Path, locked: frozenset[Path]) -> int:
    """Delete what is held; return the bytes that are free."""
    from huggingface_hub import DeleteCacheStrategy

    blobs = removal.blobs & locked
    real = {path: _size(path) for path in (Path(os.path.realpath(each)) for each in (*blobs, *removal.links))}
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
        if removal.whole and blobs == removal.blobs:
            DeleteCacheStrategy(
                0, frozenset(), frozenset(), frozenset({removal.folder}), frozenset(), cache_dir=hub
            ).execute()
    except OSError as error:
        message = f"{removal.repository} cannot be removed wholly: {error.strerror}: {error.filename}"
        raise EdgeLMError(message, "change the permissions and try again; what is left is whole") from None
    if left := [link for link in removal.links if os.path.lexists(link)]:
        raise EdgeLMError(f"{left[0]} could not be removed", "change the permissions of its folder")
    return sum(nbytes for path, nbytes in real.items() if not os.path.lexists(path))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
