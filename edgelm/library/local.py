"""From a model name as typed to a model on this machine, and whether it can run here.

Owns the meaning of names, and the error lines for names without a model. scan.py finds the models. Opens no model,
changes nothing, and knows nothing of the network.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from edgelm.base.config import Config, Settings
from edgelm.base.errors import ModelError, RequestError
from edgelm.library.catalog import entries, find_entry, near_names, stand_in
from edgelm.library.hub_cache import Snapshot, folder_name, names_in, read_repository
from edgelm.library.names import CatalogName, HubReference, LocalPath, Reference, StarterName, parse_name, shown
from edgelm.library.projectors import find_projector
from edgelm.library.scan import (
    Library,
    LocalModel,
    gguf_at,
    printable,
    repository_models,
    safetensors_at,
    scan,
    starter_model,
)
from edgelm.library.selection import CONFIG, PICKLED, group_ggufs, is_safetensors_folder, select_files

MAX_LISTED = 6
SEEING = "gemma3:4b"  # of the catalogue: a model that reads pictures
SAFETENSORS = (".safetensors", ".safetensors.index.json")
ADAPTER = "adapter_config.json"
WHOLE_FOLDER = "download all files of the model into one folder"


def find_local(name: str, hub: Path | None = None, folders: Iterable[Path] = (), *, paths: bool = True) -> LocalModel:
    """Return the model with this name: the starter, a path, or a model of the library.

    `paths=False` looks at no file outside of the library. Raises ModelError if there is no such model; its hint is
    `edgelm pull` for a valid name, and similar names for others.
    """
    reference: Reference | None = None
    try:
        reference = parse_name(name)
    except ModelError as error:
        refusal = error
    if isinstance(reference, StarterName):
        return _require_starter()
    if isinstance(reference, LocalPath):
        if not paths:
            raise ModelError(f"there is no model {shown(name)}")
        return _at_path(reference.path)
    library = scan(hub, folders=folders)
    matches = [model for model in library.models if model.is_called(name.strip())]
    if matches:
        return next((model for model in matches if name.strip() in (model.name, model.hub_name)), matches[0])
    if reference is None:
        raise refusal  # not a valid name, and no file here has it
    if paths and os.path.exists(name):  # noqa: PTH110 - False for a name that no file can have
        return _at_path(name)
    if isinstance(reference, CatalogName):
        return _of_catalog(reference, name.strip(), hub, library)
    model = _in_cache(reference, hub)
    if model is None:
        raise _not_here(reference, str(reference), library)
    return model


def installed_model(name: str, config: Config) -> LocalModel:
    """Return the model with this name on this machine, of any format. Raises ModelError."""
    return find_local(config.model_name(name), config.places.hub, config.model_folders)


def runnable_model(name: str, config: Config) -> LocalModel:
    """Return the model with this name, if an engine for it is installed. Raises ModelError."""
    return require_runnable(installed_model(name, config))


def model_config(model: LocalModel, config: Config) -> Config:
    """Return the settings for a model: its table in config.toml beats the settings for all."""
    return config.for_model(*model.names)


def find_draft_model(settings: Settings, hub: Path) -> LocalModel | None:
    """Return the model of --draft; None: no model drafts. Raises ModelError if it is not on this machine."""
    name = settings.draft_model
    return find_local(name, hub, settings.model_folders) if name else None


def require_sight(model: LocalModel, config: Config) -> None:
    """Raise RequestError for a model that reads no pictures; the hint names those on this machine that do."""
    if find_projector(config.settings, model.path) is not None:
        return
    others = [other.name for other in scan(config.places.hub, folders=config.model_folders).models if other.projector]
    if config.settings.mmproj == "off":
        raise RequestError("--mmproj off: no pictures are read", "omit it")
    pull = f"edgelm pull {SEEING} gets one that does, or name the model's projector by --mmproj"
    hint = f"these here do: {', '.join(others[:MAX_LISTED])}" if others else pull
    raise RequestError(f"{shown(model.name)} reads no pictures", hint)


def runs_here(model: LocalModel) -> bool:
    """Return whether an engine for it is installed: a GGUF and a BERT always run, other safetensors need torch."""
    if model.format == "gguf" or find_spec("torch") is not None:
        return True
    from edgelm.checkpoints.encoder import is_encoder_folder  # `edgelm run` of a GGUF needs no reader of configurations

    return is_encoder_folder(model.path)


def require_runnable(model: LocalModel) -> LocalModel:
    """Return the model if an engine for it is installed. Raises ModelError."""
    if runs_here(model):
        return model
    from edgelm.base.machine.llama_build import extra_command  # as above

    twin = _gguf_twin(model)
    other = f"edgelm pull {twin}, the same model as a GGUF" if twin else "use a GGUF of the same model"
    raise ModelError(
        f"{shown(model.name)} is a folder of safetensors, which needs torch", f"{extra_command('cuda')}, or {other}"
    )


def require_gguf(model: LocalModel) -> LocalModel:
    """Return the model if llama.cpp can read it. Raises ModelError for a folder of safetensors."""
    if model.format == "gguf":
        return model
    twin = _gguf_twin(model)
    hint = f"edgelm pull {twin} is the same model as a GGUF" if twin else "use a GGUF of the same model"
    raise ModelError(f"{shown(model.name)} is a folder of safetensors, and this needs a GGUF", hint)


def require_whole(model: LocalModel) -> None:
    """Raise ModelError for a model with missing files, as far as the file names show it."""
    root = model.path if model.format == "safetensors" else model.path.parent
    sizes = {file.relative_to(root).as_posix(): 0 for file in model.files}
    if not sizes:
        raise ModelError(f"{shown(model.name)} has no files")
    file = model.path.name if model.format == "gguf" else None
    select_files(HubReference(shown(model.name), file=file), sizes)


def _gguf_twin(model: LocalModel) -> str:
    """Return the catalogue's name of the same model as a GGUF, "" if it has none."""
    if not model.repository:
        return ""
    converted = f"{model.repository.rpartition('/')[2]}-GGUF".casefold()
    twins = (entry.name for entry in entries() if entry.repository.rpartition("/")[2].casefold() == converted)
    return next(twins, "")


def _require_starter() -> LocalModel:
    if (model := starter_model()) is None:
        raise ModelError("this installation has no starter model", "reinstall edgelm, or name another model")
    return model


def _at_path(text: str) -> LocalModel:
    try:
        path = Path(os.path.abspath(Path(text).expanduser()))  # noqa: PTH100 - shards lie beside the link
        if path.is_dir():
            return _folder_at(path, text)
        if path.exists():
            return _file_at(path)
    except (OSError, ValueError, RuntimeError):  # a name that no file can have; RuntimeError: ~ of an unknown user
        pass
    raise ModelError(f"{shown(text)} does not exist", "give the path of a .gguf file or of a folder of safetensors")


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
    """Return the error for a folder without config and safetensors: what it holds instead, and what to do."""
    if ggufs := [group.first for group in group_ggufs(names)]:
        hint = f"give the .gguf file in it: {', '.join(ggufs[:MAX_LISTED])}"
        return ModelError(f"{folder} is a folder without {CONFIG} and safetensors", printable(hint))
    if ADAPTER in names:
        hint = "name that model as a GGUF with --lora and this folder, or merge both: edgelm convert --lora"
        return ModelError(f"{folder} holds an adapter (LoRA), not the model that it was made for", hint)
    if any(name.endswith(SAFETENSORS) for name in names):
        return ModelError(f"{folder} holds safetensors without {CONFIG}", WHOLE_FOLDER)
    if any(name.endswith(PICKLED) for name in names):
        hint = "use the model's safetensors, or a GGUF of it"
        return ModelError(f"{folder} holds pickled PyTorch files, which can run code and are not read", hint)
    return ModelError(f"{folder} is a folder without {CONFIG} and safetensors", "give a .gguf file")


def _of_catalog(name: CatalogName, typed: str, hub: Path | None, library: Library) -> LocalModel:
    try:
        entry = find_entry(name, typed)
    except ModelError as error:
        own = [model.name for model in library.models]
        near = near_names(str(name), own)
        if here := [similar for similar in near if similar in own]:
            raise ModelError(error.message, f"did you mean {' or '.join(here)}?") from None
        if near and not any(entry.family == name.family for entry in entries()):  # or else the error lists its sizes
            hint = f"did you mean {' or '.join(near)}? It is not on this machine: edgelm pull {near[0]}"
            raise ModelError(error.message, hint) from None
        raise
    model = _in_cache(entry.reference(name.quantization), hub)
    if model is not None:
        return model
    full_name = f"{entry.name}:{name.quantization}" if name.quantization else entry.name
    if (other := stand_in(str(name))) and (model := _in_cache(other, hub)) is not None:
        raise ModelError(
            f"{full_name} is not on this machine", f"edgelm pull {full_name}, or use {model.name}, which is here"
        )
    raise _not_here(HubReference(entry.repository), full_name, library)


def _in_cache(reference: HubReference, hub: Path | None) -> LocalModel | None:
    """Return the cached model that a reference selects, by the same choice as `edgelm pull`."""
    if hub is None:
        return None
    folder = folder_name(reference.repository).casefold()
    for repository in (read_repository(hub / name) for name in names_in(hub, []) if name.casefold() == folder):
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


def _not_here(reference: HubReference, name: str, library: Library) -> ModelError:
    repository = reference.repository.casefold()
    others = [model.name for model in library.models if model.repository and model.repository.casefold() == repository]
    also = f", or use {' or '.join(others)}, which is here" if 0 < len(others) <= MAX_LISTED else ""
    return ModelError(f"{shown(name)} is not on this machine", f"edgelm pull {shown(name)}{also}")


def _sizes(snapshot: Snapshot) -> dict[str, int]:
    sizes = {}
    for file in snapshot.files:
        try:
            sizes[file] = (snapshot.path / file).stat().st_size
        except OSError:
            continue  # deleted in the meantime
    return sizes
