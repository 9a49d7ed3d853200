"""The models that `edgelm eval` compares: from names, folders of GGUFs and `NAME:all` to models on this machine.

Owns the meaning of these names for several models. Opens no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from edgelm.base.config import Config
from edgelm.base.errors import ModelError
from edgelm.commands.running import model_or_served
from edgelm.library.catalog import find_entry
from edgelm.library.hub_cache import names_in
from edgelm.library.local import require_runnable
from edgelm.library.names import CatalogName, HubReference, parse_name, shown
from edgelm.library.scan import LocalModel, gguf_at, scan
from edgelm.library.selection import group_ggufs, is_safetensors_folder

ALL = (":all", ":*")  # after the name of a repository: all that is here of it


def is_several(names: Sequence[str]) -> bool:
    """Return whether names may stand for several models."""
    return len(names) > 1 or any(name.endswith(ALL) or _in_folder(name) for name in names)


def find_models(names: Iterable[str], config: Config) -> list[LocalModel]:
    """Return the models with these names, each once, in their order. Raises ModelError."""
    models: dict[str, LocalModel] = {}
    for name in names:
        for model in _models_of(name, config):
            models.setdefault(model.identity, model)
    return list(models.values())


def _models_of(name: str, config: Config) -> list[LocalModel]:
    for suffix in ALL:
        if name.endswith(suffix):
            return _all_of(name.removesuffix(suffix), config)
    return _in_folder(name) or [model_or_served(name, config)]


def _in_folder(name: str) -> list[LocalModel]:
    """Return the GGUFs of a folder that is no model itself; none for any other name."""
    try:
        folder = Path(name).expanduser()
        names = names_in(folder, []) if folder.is_dir() else []
    except (OSError, ValueError, RuntimeError):  # a name that no file can have; RuntimeError: ~ of an unknown user
        return []
    if is_safetensors_folder(names):
        return []
    visible = [file for file in names if not file.startswith(".")]
    return [gguf_at(folder.absolute() / group.first) for group in group_ggufs(visible)]


def _all_of(name: str, config: Config) -> list[LocalModel]:
    reference = parse_name(config.model_name(name))
    if isinstance(reference, CatalogName):
        repository = find_entry(reference).repository
    elif isinstance(reference, HubReference):
        repository = reference.repository
    else:
        raise ModelError(f"{shown(name)} is no repository of the hub", "name its files, or the folder with them")
    library = scan(config.places.hub, folders=config.model_folders)
    models = [
        require_runnable(model)
        for model in library.models
        if model.repository and model.repository.casefold() == repository.casefold() and not model.is_superseded
    ]
    if not models:
        raise ModelError(f"nothing of {shown(repository)} is on this machine", f"edgelm pull {shown(name)}")
    return models
