"""Which models are on this machine, and what each is called.

Models are the starter, files that were given, what lies in the hub's cache, and in the folders of the settings: GGUFs
(the parts of a split one as one) and folders of safetensors. Knows names and places. Opens no model (describe.py
does), changes nothing, and knows nothing of the network.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from edgelm.library.catalog import name_of
from edgelm.library.files import group_ggufs, is_safetensors_folder
from edgelm.library.hub_cache import Repository, Snapshot, names_in, repositories
from edgelm.library.local_model import LocalModel, Place, printable
from edgelm.library.names import STARTER, HubReference, is_label

SHORT_REVISION = 12  # digits of a commit, where two revisions have a file of one name


@dataclass(frozen=True, slots=True)
class Library:
    """What was found, and a line for each folder that could not be read."""

    models: list[LocalModel]
    problems: list[str]


def scan(hub: Path | None = None, given: Iterable[Path] = (), folders: Iterable[Path] = ()) -> Library:
    """Find the models that are here: the starter, the given files, those of the hub's cache, those of folders.

    Each file once: a given one that is of the library has its name there.
    """
    problems: list[str] = []
    cached = list(_hub_models(hub, problems)) if hub is not None else []
    own = list(_folder_models(folders, problems))
    built_in = [starter] if (starter := starter_model()) else []
    known = {model.identity: model for model in [*built_in, *cached, *own]}
    first = [_given_model(path, known) for path in given]
    ordered = [*built_in, *first, *cached, *own]
    models: dict[str, LocalModel] = {}
    seen: set[str] = set()
    for model in ordered:
        if model.identity in seen:
            continue
        seen.add(model.identity)
        name = model.name if model.name.casefold() not in models else printable(str(model.path))
        models.setdefault(name.casefold(), replace(model, name=name))
    return Library(list(models.values()), problems)


def installed(hub: Path | None = None, given: Iterable[Path] = (), folders: Iterable[Path] = ()) -> list[LocalModel]:
    """Return the models that `scan` finds, each in its newest revision."""
    return [model for model in scan(hub, given, folders).models if not model.superseded]


def starter_model() -> LocalModel | None:
    """Return the built-in model, where it is part of this installation."""
    path = _starter()
    return None if path is None else LocalModel(STARTER, path, "built-in", files=(path,))


def gguf_at(path: Path) -> LocalModel:
    """Return the model that a file is, with the other parts of a split one."""
    groups = [group for group in group_ggufs(names_in(path.parent, [])) if path.name in group.files]
    parts = tuple(path.with_name(name) for name in groups[0].files) if groups else (path,)
    return LocalModel(printable(path.stem), path, files=parts)


def safetensors_at(path: Path, names: Iterable[str], name: str | None = None, place: Place = "given") -> LocalModel:
    """Return the model that a folder of these names is."""
    found = tuple(path / each for each in sorted(names))
    files = tuple(each for each in found if each.is_file())
    return LocalModel(name or printable(path.name), path, place, "safetensors", files)


def _starter() -> Path | None:
    path = Path(str(files("edgelm.models"))) / STARTER / f"{STARTER}.gguf"
    return path.resolve() if path.is_file() else None


def _given_model(path: Path, known: dict[str, LocalModel]) -> LocalModel:
    if (model := known.get(os.path.realpath(path))) is not None:
        return model
    return safetensors_at(path, names_in(path, [])) if path.is_dir() else gguf_at(path)


def _hub_models(hub: Path, problems: list[str]) -> Iterator[LocalModel]:
    for repository in repositories(hub, problems):
        yield from repository_models(repository)


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
                dated = f"{model.hub_name}@{snapshot.revision[:SHORT_REVISION]}"
                model = replace(model, name=dated, hub_name=dated, superseded=True)
            names.add(model.name)
            yield model


def _snapshot_models(repository: Repository, snapshot: Snapshot) -> Iterator[LocalModel]:
    groups = group_ggufs(snapshot.files)
    labels = [(group.quantization or group.stem).upper() for group in groups]
    for group, label in zip(groups, labels, strict=True):
        alone = labels.count(label) == 1 and is_label(label)
        choice = group.quantization if alone else None
        if alone:
            hub_name = f"{repository.name}:{choice or group.stem}"
        else:
            hub_name = str(HubReference(repository.name, file=_printable_file(group.first)))
        yield LocalModel(
            name=name_of(repository.name, choice) or hub_name,
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


def _printable_file(file: str) -> str:
    return file if file.isprintable() else printable(file)


def _folder_models(folders: Iterable[Path], problems: list[str]) -> Iterator[LocalModel]:
    """Yield what lies in the user's own folders, also deep in them, hidden ones left out."""
    seen: set[tuple[int, int]] = set()
    for folder in folders:
        root = Path(os.path.abspath(folder.expanduser()))  # noqa: PTH100 - links are kept as they are
        if not root.is_dir():
            problems.append(f"{root} of the setting model_dirs is not there")
            continue
        taken: set[str] = set()
        for model in _walk(root, seen, problems):
            inside = model.path.relative_to(root)
            name = model.name if model.name.casefold() not in taken else printable(str(inside.with_suffix("")))
            taken.add(name.casefold())
            yield replace(model, name=name)


def _walk(root: Path, seen: set[tuple[int, int]], problems: list[str]) -> Iterator[LocalModel]:
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            status = folder.stat()
        except OSError as error:
            problems.append(f"{folder} cannot be read: {error.strerror}")
            continue
        if (status.st_dev, status.st_ino) in seen:  # a link in a circle, or a folder named twice
            continue
        seen.add((status.st_dev, status.st_ino))
        names = names_in(folder, problems)
        if is_safetensors_folder(names):
            yield safetensors_at(folder, names, place="folder")
            continue
        plain = [name for name in names if not name.startswith(".")]
        for group in group_ggufs(name for name in plain if (folder / name).is_file()):
            found = tuple(folder / name for name in group.files)
            yield LocalModel(printable(group.stem), found[0], "folder", files=found, quantization=group.quantization)
        waiting += sorted((folder / name for name in plain if (folder / name).is_dir()), reverse=True)
