"""Models that are on this machine: which there are, what each is called, and from what a person typed to a file.

Models are the starter, files that were given, what lies in the hub's cache, and in the folders of the settings: GGUFs
(the parts of a split one as one) and folders of safetensors. Knows names and places. Opens no model (describe.py
does), changes nothing, and knows nothing of the network.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from edgelm.errors import ModelError
from edgelm.library.catalog import entries, find_entry, name_of, near_names
from edgelm.library.files import CONFIG, group_ggufs, is_safetensors_folder
from edgelm.library.hub_cache import Repository, Snapshot, folder_name, names_in, read_repository, repositories
from edgelm.library.names import (
    STARTER,
    CatalogName,
    HubReference,
    LocalPath,
    Reference,
    StarterName,
    is_label,
    parse_name,
    shown,
)
from edgelm.library.selection import select_files

Place = Literal["built-in", "given", "hub", "folder"]
FORMATS = {"gguf": "GGUF", "safetensors": "safetensors"}
MAX_SAID = 6
SHORT_REVISION = 12  # digits of a commit, where two revisions have a file of one name


@dataclass(frozen=True)
class LocalModel:
    """A model that can be asked for by its name."""

    name: str
    path: Path  # the GGUF (its first part), or the folder
    place: Place = "given"
    format: Literal["gguf", "safetensors"] = "gguf"
    files: tuple[Path, ...] = ()  # all that belong to it
    quantization: str | None = None  # as the file's name says
    hub_name: str | None = None  # OWNER/NAME:…, for what lies in the hub's cache
    repository: str | None = None
    revision: str | None = None
    superseded: bool = False  # a newer revision has another file of its name

    @cached_property
    def identity(self) -> str:
        """The same for two names of the same bytes."""
        return os.path.realpath(self.path)

    def is_called(self, name: str) -> bool:
        """Tell whether a name is the model's own, or that of its place in the hub."""
        return name.casefold() in (each.casefold() for each in (self.name, self.hub_name) if each)

    def is_at(self, path: Path) -> bool:
        """Tell whether a path leads to this model."""
        return path == self.path or os.path.realpath(path) == self.identity


@dataclass(frozen=True, slots=True)
class Library:
    """What was found, and a line for each folder that could not be read."""

    models: list[LocalModel]
    problems: list[str]


def find_model(name: str, hub: Path | None = None, folders: Iterable[Path] = ()) -> Path:
    """Return the file or folder that a name stands for. Raises ModelError where there is none."""
    return find_local(name, hub, folders).path


def find_local(name: str, hub: Path | None = None, folders: Iterable[Path] = (), *, paths: bool = True) -> LocalModel:
    """Return the model that a name stands for: the starter, a path, or one of the library.

    Without `paths` no file is looked at outside of the library. Raises ModelError where there is none: with `edgelm
    pull` if the name is good, with near names if it is not.
    """
    reference: Reference | None = None
    try:
        reference = parse_name(name)
    except ModelError as error:
        refusal = error
    if isinstance(reference, StarterName):
        return _require_starter()
    if isinstance(reference, LocalPath):
        return _at_path(reference.path) if paths else _no_path(name)
    library = scan(hub, folders=folders)
    called = [model for model in library.models if model.is_called(name.strip())]
    if called:
        return next((model for model in called if name.strip() in (model.name, model.hub_name)), called[0])
    if reference is None:
        raise refusal  # no name that anybody gives, and no file here is called so
    if paths and os.path.exists(name):  # noqa: PTH110 - a name that no file can have is False
        return _at_path(name)
    if isinstance(reference, CatalogName):
        return _of_catalog(reference, hub, library)
    found = _in_cache(reference, hub)
    return found if found is not None else _raise_not_here(reference, str(reference), library)


def scan(hub: Path | None = None, given: Iterable[Path] = (), folders: Iterable[Path] = ()) -> Library:
    """Find the models that are here: the starter, the given files, those of the hub's cache, those of folders.

    Each file once: a given one that is of the library has its name there.
    """
    problems: list[str] = []
    cached = list(_hub_models(hub, problems)) if hub is not None else []
    own = list(_folder_models(folders, problems))
    starter = _starter()
    known = {model.identity: model for model in [*([_starter_model(starter)] if starter else []), *cached, *own]}
    first = [_given_model(path, known) for path in given]
    ordered = [*([_starter_model(starter)] if starter else []), *first, *cached, *own]
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


def runs_here(model: LocalModel) -> bool:
    """Whether an engine for this format is installed: a GGUF always runs, safetensors need torch."""
    return model.format == "gguf" or find_spec("torch") is not None


def require_runnable(model: LocalModel) -> LocalModel:
    """Return the model if an engine for it is installed. Raises ModelError."""
    if runs_here(model):
        return model
    near = _same_as_gguf(model)
    other = f"edgelm pull {near}, the same model as a GGUF" if near else "take a GGUF of the same model"
    raise ModelError(
        f"{shown(model.name)} is a folder of safetensors, which needs torch", f"pipx install 'edgelm[cuda]', or {other}"
    )


def require_gguf(model: LocalModel) -> LocalModel:
    """Return the model if llama.cpp can read it. Raises ModelError for a folder of safetensors."""
    if model.format == "gguf":
        return model
    near = _same_as_gguf(model)
    hint = f"edgelm pull {near} is the same model as a GGUF" if near else "take a GGUF of the same model"
    raise ModelError(f"{shown(model.name)} is a folder of safetensors, and this needs a GGUF", hint)


def require_whole(model: LocalModel) -> None:
    """Raise ModelError for a model of which files are missing, as far as their names tell."""
    named = {each.relative_to(_root(model)).as_posix(): 0 for each in model.files}
    if not named:
        raise ModelError(f"{shown(model.name)} has no files")
    file = model.path.name if model.format == "gguf" else None
    select_files(HubReference(shown(model.name), file=file), named)


def printable(text: str) -> str:
    """Return a file's name as text that can be shown and sent; bytes and characters that cannot are escaped."""
    clean = os.fsencode(text).decode("utf-8", "backslashreplace")
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in clean)


def _same_as_gguf(model: LocalModel) -> str:
    """Return the catalogue's name of the same model as a GGUF; empty: it has none."""
    near = (entry.name for entry in entries() if model.repository and _is_made_from(entry.repository, model.repository))
    return next(near, "")


def _is_made_from(converted: str, original: str) -> bool:
    return converted.rpartition("/")[2].casefold() == f"{original.rpartition('/')[2]}-GGUF".casefold()


# -- what a name means -----------------------------------------------------------------------------------------------


def _require_starter() -> LocalModel:
    if (path := _starter()) is None:
        raise ModelError("this installation has no starter model", "reinstall edgelm, or name another model")
    return _starter_model(path)


def _at_path(text: str) -> LocalModel:
    try:
        path = Path(os.path.abspath(Path(text).expanduser()))  # noqa: PTH100 - parts of a split lie beside the link
        if path.is_dir():
            return _folder_at(path, text)
        if path.exists():
            return LocalModel(path.stem, path, files=_parts_of(path))
    except (OSError, ValueError, RuntimeError):  # a name that no file can have; RuntimeError: ~ of nobody
        pass
    raise ModelError(f"{shown(text)} is not there", "give the path of a .gguf file or of a folder of safetensors")


def _no_path(text: str) -> LocalModel:
    raise ModelError(f"there is no model {shown(text)}")


def _folder_at(path: Path, text: str) -> LocalModel:
    names = names_in(path, [])
    if is_safetensors_folder(names):
        return _safetensors(path, printable(path.name), names)
    here = [group.first for group in group_ggufs(names)]
    hint = f"give the .gguf file in it: {', '.join(here[:MAX_SAID])}" if here else "give a .gguf file"
    raise ModelError(f"{shown(text)} is a folder without {CONFIG} and safetensors", printable(hint))


def _of_catalog(name: CatalogName, hub: Path | None, library: Library) -> LocalModel:
    try:
        entry = find_entry(name)
    except ModelError as error:
        own = [model.name for model in library.models]
        if near := [each for each in near_names(str(name), own) if each in own]:
            raise ModelError(error.message, f"did you mean {' or '.join(near)}?") from None
        raise
    found = _in_cache(entry.reference(name.quantization), hub)
    if found is not None:
        return found
    wanted = f"{entry.name}:{name.quantization}" if name.quantization else entry.name
    return _raise_not_here(HubReference(entry.repository), wanted, library)


def _in_cache(reference: HubReference, hub: Path | None) -> LocalModel | None:
    """Return what a reference means among the files that are here, as `edgelm pull` would choose them."""
    if hub is None:
        return None
    wanted = folder_name(reference.repository).casefold()
    for repository in (read_repository(hub / name) for name in names_in(hub, []) if name.casefold() == wanted):
        models = list(_repository_models(repository))
        for snapshot in repository.snapshots:
            if not repository.has_revision(snapshot, reference.revision):
                continue
            try:
                main = select_files(reference, _sizes(snapshot)).main
            except ModelError:
                continue
            path = snapshot.path / main if main else snapshot.path
            for model in models:
                if path in (model.path, *model.files) or model.identity == os.path.realpath(path):
                    return model
    return None


def _raise_not_here(reference: HubReference, name: str, library: Library) -> LocalModel:
    others = [model.name for model in library.models if model.repository and _same(model.repository, reference)]
    if others:
        also = f", or use {' or '.join(others[:MAX_SAID])}, which is here" if len(others) <= MAX_SAID else ""
        raise ModelError(f"{shown(name)} is not on this machine", f"edgelm pull {shown(name)}{also}")
    raise ModelError(f"{shown(name)} is not on this machine", f"edgelm pull {shown(name)}")


def _root(model: LocalModel) -> Path:
    return model.path if model.format == "safetensors" else model.path.parent


def _same(repository: str, reference: HubReference) -> bool:
    return repository.casefold() == reference.repository.casefold()


def _sizes(snapshot: Snapshot) -> dict[str, int]:
    sizes = {}
    for file in snapshot.files:
        try:
            sizes[file] = (snapshot.path / file).stat().st_size
        except OSError:
            continue  # it went meanwhile
    return sizes


# -- what there is ---------------------------------------------------------------------------------------------------


def _starter() -> Path | None:
    """Return the built-in model, where it is part of this installation."""
    path = Path(str(files("edgelm.models"))) / STARTER / f"{STARTER}.gguf"
    return path.resolve() if path.is_file() else None


def _starter_model(path: Path) -> LocalModel:
    return LocalModel(STARTER, path, "built-in", files=(path,))


def _given_model(path: Path, known: dict[str, LocalModel]) -> LocalModel:
    if (model := known.get(os.path.realpath(path))) is not None:
        return model
    return LocalModel(printable(path.stem), path, files=_parts_of(path))


def _parts_of(path: Path) -> tuple[Path, ...]:
    groups = [group for group in group_ggufs(names_in(path.parent, [])) if path.name in group.files]
    return tuple(path.with_name(name) for name in groups[0].files) if groups else (path,)


def _safetensors(path: Path, name: str, names: Iterable[str], place: Place = "given") -> LocalModel:
    found = tuple(path / each for each in sorted(names))
    return LocalModel(name, path, place, "safetensors", tuple(each for each in found if each.is_file()))


def _hub_models(hub: Path, problems: list[str]) -> Iterator[LocalModel]:
    for repository in repositories(hub, problems):
        yield from _repository_models(repository)


def _repository_models(repository: Repository) -> Iterator[LocalModel]:
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
        model = _safetensors(snapshot.path, repository.name, top, "hub")
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
            yield _safetensors(folder, printable(folder.name), names, "folder")
            continue
        plain = [name for name in names if not name.startswith(".")]
        for group in group_ggufs(name for name in plain if (folder / name).is_file()):
            found = tuple(folder / name for name in group.files)
            yield LocalModel(printable(group.stem), found[0], "folder", files=found, quantization=group.quantization)
        waiting += sorted((folder / name for name in plain if (folder / name).is_dir()), reverse=True)
