"""The files of adapters: of the setting `lora`, for those who must see that one changed, and of a pulled repository.

Opens none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgelm.base.places import expand_home
from edgelm.base.setting_checks import split_scale
from edgelm.library.hub_cache import folder_name, names_in, read_repository
from edgelm.library.names import HubReference
from edgelm.library.scan import LocalModel

FILES = ("adapter_config.json", "adapter_model.safetensors")  # of PEFT's folder


def adapter_files(lora: Sequence[str]) -> list[Path]:
    """Return the files of adapters, whether or not they exist."""
    paths = [Path(expand_home(split_scale(text)[0])) for text in lora]
    return [file for path in paths for file in _files(path)]


def adapters_identity(lora: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return the setting, and size and time of its files, to see whether results with it still hold."""
    identity = [(text, 0, 0) for text in lora]
    for file in adapter_files(lora):
        try:
            status = file.stat()
        except (OSError, ValueError):
            continue
        identity.append((str(file), status.st_size, status.st_mtime_ns))
    return identity


def pulled_adapter(reference: HubReference, hub: Path) -> LocalModel | None:
    """Return the adapter in a repository of the hub's cache, to remove it: the library lists models only."""
    folder = folder_name(reference.repository).casefold()
    for repository in (read_repository(hub / name) for name in names_in(hub, []) if name.casefold() == folder):
        for snapshot in repository.snapshots:
            if set(FILES) <= set(snapshot.files) and repository.has_revision(snapshot, reference.revision):
                files = tuple(snapshot.path / name for name in FILES)
                name, revision = repository.name, snapshot.revision
                return LocalModel(name, snapshot.path, "hub", "safetensors", files, repository=name, revision=revision)
    return None


def _files(path: Path) -> list[Path]:
    if path.name.endswith(".gguf"):
        return [path]
    folder = path.parent if path.name in FILES else path
    return [folder / name for name in FILES]
