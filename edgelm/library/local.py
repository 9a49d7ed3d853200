"""From what a person typed to a model on this machine, and whether it can run here.

Owns the meaning of names, and what is said where a name means nothing. Which models there are is scan.py's. Opens no
model, changes nothing, and knows nothing of the network.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from edgelm.errors import ModelError
from edgelm.library.catalog import entries, find_entry, near_names
from edgelm.library.files import CONFIG, group_ggufs, is_safetensors_folder
from edgelm.library.hub_cache import Snapshot, folder_name, names_in, read_repository
from edgelm.library.local_model import LocalModel, printable
from edgelm.library.names import CatalogName, HubReference, LocalPath, Reference, StarterName, parse_name, shown
from edgelm.library.scan import (
    Library,
    gguf_at,
    installed,
    repository_models,
    safetensors_at,
    scan,
    starter_model,
)
from edgelm.library.selection import select_files

__all__ = [
    "Library",
    "LocalModel",
    "find_local",
    "find_model",
    "installed",
    "printable",
    "require_gguf",
    "require_runnable",
    "require_whole",
    "runs_here",
    "scan",
]

MAX_SAID = 6
SAFETENSORS = (".safetensors", ".safetensors.index.json")
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
ADAPTER = "adapter_config.json"
WHOLE_FOLDER = "download all files of the model into one folder"


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


def _same_as_gguf(model: LocalModel) -> str:
    """Return the catalogue's name of the same model as a GGUF; empty: it has none."""
    near = (entry.name for entry in entries() if model.repository and _is_made_from(entry.repository, model.repository))
    return next(near, "")


def _is_made_from(converted: str, original: str) -> bool:
    return converted.rpartition("/")[2].casefold() == f"{original.rpartition('/')[2]}-GGUF".casefold()


# -- what a name means -----------------------------------------------------------------------------------------------


def _require_starter() -> LocalModel:
    if (model := starter_model()) is None:
        raise ModelError("this installation has no starter model", "reinstall edgelm, or name another model")
    return model


def _at_path(text: str) -> LocalModel:
    try:
        path = Path(os.path.abspath(Path(text).expanduser()))  # noqa: PTH100 - parts of a split lie beside the link
        if path.is_dir():
            return _folder_at(path, text)
        if path.exists():
            return _file_at(path)
    except (OSError, ValueError, RuntimeError):  # a name that no file can have; RuntimeError: ~ of nobody
        pass
    raise ModelError(f"{shown(text)} is not there", "give the path of a .gguf file or of a folder of safetensors")


def _no_path(text: str) -> LocalModel:
    raise ModelError(f"there is no model {shown(text)}")


def _file_at(path: Path) -> LocalModel:
    if not path.name.endswith(SAFETENSORS):
        return gguf_at(path)
    name = shown(printable(path.name))
    if is_safetensors_folder(names_in(path.parent, [])):
        raise ModelError(f"{name} is one file of a model", f"give its folder: {printable(str(path.parent))}")
    raise ModelError(f"{name} is one file of a model, and {CONFIG} is missing beside it", WHOLE_FOLDER)


def _folder_at(path: Path, text: str) -> LocalModel:
    names = names_in(path, [])
    if is_safetensors_folder(names):
        return safetensors_at(path, names)
    raise _no_model_in(shown(text), names)


def _no_model_in(folder: str, names: list[str]) -> ModelError:
    """Return what is in a folder instead of a configuration with its safetensors, and what to do about it."""
    if here := [group.first for group in group_ggufs(names)]:
        hint = f"give the .gguf file in it: {', '.join(here[:MAX_SAID])}"
        return ModelError(f"{folder} is a folder without {CONFIG} and safetensors", printable(hint))
    if ADAPTER in names:
        hint = "merge the two, and give the folder of the result"
        return ModelError(f"{folder} holds an adapter (LoRA), not the model that it was made for", hint)
    if any(name.endswith(SAFETENSORS) for name in names):
        return ModelError(f"{folder} holds safetensors without {CONFIG}", WHOLE_FOLDER)
    if any(name.endswith(PICKLED) for name in names):
        hint = "take the model's safetensors, or a GGUF of it"
        return ModelError(f"{folder} holds PyTorch's own files, which are programs and not read", hint)
    return ModelError(f"{folder} is a folder without {CONFIG} and safetensors", "give a .gguf file")


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
        models = list(repository_models(repository))
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
