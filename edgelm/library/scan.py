"""The models on this machine: their names, their files, and when each was last used.

A model is the starter, or a GGUF (all shards of a split one) or a folder of safetensors: at a path named by the user,
in the hub's cache, in a folder of the settings, or in Ollama's store. Opens no model, and knows nothing of the network.
The notes of last use are the only files that it writes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Literal

from edgelm.library.catalog import name_of
from edgelm.library.hub_cache import Repository, Snapshot, names_in, repositories
from edgelm.library.names import STARTER, HubReference, is_label
from edgelm.library.ollama_store import is_store, stored_models
from edgelm.library.projectors import heads_of, projector_of
from edgelm.library.selection import group_ggufs, is_safetensors_folder

SHORT_COMMIT_LEN = 12  # digits of a commit, to tell revisions apart
USED_FOLDER = "used"

Place = Literal["built-in", "given", "hub", "folder", "ollama"]


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine."""

    name: str
    path: Path  # the GGUF (its first shard), or the folder
    place: Place = "given"
    format: Literal["gguf", "safetensors"] = "gguf"
    files: tuple[Path, ...] = ()  # all files of the model
    quantization: str | None = None  # from the file name
    hub_name: str | None = None  # OWNER/NAME:…, for a model in the hub's cache
    repository: str | None = None
    revision: str | None = None
    other_names: tuple[str, ...] = ()  # of a model in Ollama's store
    is_superseded: bool = False  # a newer revision has another file of the same name

    @cached_property
    def identity(self) -> str:
        """The real path: two names of the same bytes have the same one."""
        return os.path.realpath(self.path)

    @cached_property
    def projector(self) -> Path | None:
        """The part of the model that reads pictures, a file beside it."""
        return projector_of(self.path)

    @property
    def all_files(self) -> tuple[Path, ...]:
        """The files of the model, with its projector and its heads."""
        return (*self.files, *filter(None, (self.projector, heads_of(self.path))))

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which config.toml may have settings for it."""
        return tuple(name for name in (self.name, self.hub_name, str(self.path)) if name)

    def is_called(self, name: str) -> bool:
        """Return whether a name is the model's own, its name in the hub's cache, or another of its names."""
        return name.casefold() in (own.casefold() for own in (self.name, self.hub_name, *self.other_names) if own)

    def is_at(self, path: Path) -> bool:
        """Return whether a path leads to this model."""
        return path == self.path or os.path.realpath(path) == self.identity

    def has_bytes_of(self, other: LocalModel) -> bool:
        """Return whether both are loaded from the same bytes: their paths differ in two revisions of a repository."""
        return _bytes_of(self) == _bytes_of(other)


@dataclass(frozen=True, slots=True)
class Library:
    """All models found, and a line for each folder that could not be read."""

    models: list[LocalModel]
    problems: list[str]


def printable(text: str) -> str:
    """Return a file name as text that can be shown and sent; other bytes and characters are escaped."""
    clean = os.fsencode(text).decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in clean)


def scan(hub: Path | None = None, paths: Iterable[Path] = (), folders: Iterable[Path] = ()) -> Library:
    """Find the models here: the starter, the models at `paths`, those in the hub's cache and in folders.

    Each file appears once: a path into the library has its name there.
    """
    problems: list[str] = []
    return Library(list(each_model(hub, paths, folders, problems)), problems)


def each_model(
    hub: Path | None, paths: Iterable[Path], folders: Iterable[Path], problems: list[str]
) -> Iterator[LocalModel]:
    """Yield the models that `scan` finds, in its order; a folder is read when its turn comes: its disk may be slow."""
    cached = list(_hub_models(hub, problems)) if hub is not None else []
    built_in = [starter] if (starter := starter_model()) else []
    own: Iterable[LocalModel] = _folder_models(folders, problems)
    by_path = {model.path: model for model in (*built_in, *cached)}
    paths, by_identity = list(paths), dict[str, LocalModel]()
    if any(path not in by_path for path in paths):  # one may be in a folder, and has its name there
        own = list(own)
        by_identity = {model.identity: model for model in (*built_in, *cached, *own)}
    given = [by_path.get(path) or _model_at(path, by_identity) for path in paths]
    names: set[str] = set()
    seen: set[str] = set()
    for model in chain(built_in, given, cached, own):
        if model.identity in seen:
            continue
        seen.add(model.identity)
        name = model.name if model.name.casefold() not in names else printable(str(model.path))
        if name.casefold() not in names:
            names.add(name.casefold())
            yield replace(model, name=name)


def installed(hub: Path | None = None, paths: Iterable[Path] = (), folders: Iterable[Path] = ()) -> list[LocalModel]:
    """Return the models that `scan` finds, each in its newest revision."""
    return [model for model in scan(hub, paths, folders).models if not model.is_superseded]


def starter_model() -> LocalModel | None:
    """Return the built-in model, None if this installation lacks it."""
    path = _starter()
    return None if path is None else LocalModel(STARTER, path, "built-in", files=(path,))


def gguf_at(path: Path) -> LocalModel:
    """Return the model in a file; of a split one also where another shard than the first is named."""
    groups = [group for group in group_ggufs(names_in(path.parent, [])) if path.name in group.files]
    if groups and path.exists():
        path = path.with_name(groups[0].first)
    shards = tuple(path.with_name(name) for name in groups[0].files) if groups else (path,)
    return LocalModel(printable(path.stem), path, files=shards)


def safetensors_at(path: Path, names: Iterable[str], name: str | None = None, place: Place = "given") -> LocalModel:
    """Return the model in a folder that holds these file names."""
    paths = (path / file for file in sorted(names))
    return LocalModel(
        name or printable(path.name), path, place, "safetensors", tuple(file for file in paths if file.is_file())
    )


def repository_models(repository: Repository) -> Iterator[LocalModel]:
    """Yield the models of all revisions, each file once: under its plain name in the newest revision that has it."""
    names: set[str] = set()
    blobs: set[Path] = set()
    for snapshot in repository.snapshots:
        for model in _snapshot_models(repository, snapshot):
            blob = snapshot.blob(model.path.relative_to(snapshot.path).as_posix())
            if blob in blobs:
                continue
            blobs.add(blob)
            if model.name in names:
                dated = f"{model.hub_name}@{snapshot.revision[:SHORT_COMMIT_LEN]}"
                model = replace(model, name=dated, hub_name=dated, is_superseded=True)
            names.add(model.name)
            yield model


def note_use(data: Path, model: Path) -> None:
    """Record that a model is used now, as the time of a small file: many disks keep no access times.

    An unwritable folder loses only this record.
    """
    with suppress(OSError):
        file = _use_file(data, model)
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as out:
            out.write(os.fsencode(os.path.realpath(model)) + b"\n")  # for whoever opens the folder
        os.utime(file)


def last_use(data: Path, model: Path) -> float | None:
    """Return when a model was last used, in seconds since 1970; None if there is no record."""
    try:
        return _use_file(data, model).stat().st_mtime
    except OSError:
        return None


def forget_use(data: Path, model: Path) -> None:
    """Remove the record of a model. Call it while the file exists: its real path is the key."""
    with suppress(OSError):
        _use_file(data, model).unlink()


def _bytes_of(model: LocalModel) -> set[str]:
    """Return the real paths of the files that an engine reads: all but the README, which changes most often."""
    return {os.path.realpath(file) for file in model.all_files if file.suffix != ".md"}


def _use_file(data: Path, model: Path) -> Path:
    key = hashlib.sha256(os.fsencode(os.path.realpath(model))).hexdigest()
    return data / USED_FOLDER / key[:32]


def _starter() -> Path | None:
    path = Path(str(files("edgelm.models"))) / STARTER / f"{STARTER}.gguf"
    return path.resolve() if path.is_file() else None


def _model_at(path: Path, by_identity: dict[str, LocalModel]) -> LocalModel:
    if (model := by_identity.get(os.path.realpath(path))) is not None:
        return model
    return safetensors_at(path, names_in(path, [])) if path.is_dir() else gguf_at(path)


def _hub_models(hub: Path, problems: list[str]) -> Iterator[LocalModel]:
    for repository in repositories(hub, problems):
        yield from repository_models(repository)


def _snapshot_models(repository: Repository, snapshot: Snapshot) -> Iterator[LocalModel]:
    groups = group_ggufs(snapshot.files)
    labels = [(group.quantization or group.stem).upper() for group in groups]
    for group, label in zip(groups, labels, strict=True):
        is_unique = labels.count(label) == 1 and is_label(label)
        quantization = group.quantization if is_unique else None
        if is_unique:
            hub_name = f"{repository.name}:{quantization or group.stem}"
        else:
            file = group.first if group.first.isprintable() else printable(group.first)
            hub_name = str(HubReference(repository.name, file=file))
        yield LocalModel(
            name=name_of(repository.name, quantization) or hub_name,
            path=snapshot.path / group.first,
            place="hub",
            files=tuple(snapshot.path / file for file in group.files),
            quantization=group.quantization,
            hub_name=hub_name,
            repository=repository.name,
            revision=snapshot.revision,
        )
    top = [file for file in snapshot.files if "/" not in file]
    if is_safetensors_folder(top):
        model = safetensors_at(snapshot.path, top, repository.name, "hub")
        yield replace(model, hub_name=repository.name, repository=repository.name, revision=snapshot.revision)


def _folder_models(folders: Iterable[Path], problems: list[str]) -> Iterator[LocalModel]:
    """Yield the models in the user's own folders and their subfolders, except hidden ones; and in Ollama's store."""
    seen: set[tuple[int, int]] = set()
    for folder in folders:
        root = Path(os.path.abspath(folder.expanduser()))  # noqa: PTH100 - links are kept as they are
        if not root.is_dir():
            problems.append(f"{root} of the setting model_dirs does not exist")
            continue
        if is_store(root):
            for stored in stored_models(root, problems):
                files = (stored.blob,)
                yield LocalModel(stored.name, stored.blob, "ollama", files=files, other_names=stored.other_names)
            continue
        taken: set[str] = set()
        for model in _walk(root, seen, problems):
            inside = model.path.relative_to(root)
            name = model.name if model.name.casefold() not in taken else printable(str(inside.with_suffix("")))
            taken.add(name.casefold())
            yield replace(model, name=name)


def _walk(root: Path, seen: set[tuple[int, int]], problems: list[str]) -> Iterator[LocalModel]:
    pending = [root]
    while pending:
        folder = pending.pop()
        try:
            status = folder.stat()
        except OSError as error:
            problems.append(f"{folder} cannot be read: {error.strerror}")
            continue
        if (status.st_dev, status.st_ino) in seen:  # links in a circle, or a folder named twice
            continue
        seen.add((status.st_dev, status.st_ino))
        names = names_in(folder, problems)
        if is_safetensors_folder(names):
            yield safetensors_at(folder, names, place="folder")
            continue
        plain = [name for name in names if not name.startswith(".")]
        for group in group_ggufs(name for name in plain if (folder / name).is_file()):
            paths = tuple(folder / name for name in group.files)
            yield LocalModel(printable(group.stem), paths[0], "folder", files=paths, quantization=group.quantization)
        pending += sorted((folder / name for name in plain if (folder / name).is_dir()), reverse=True)
