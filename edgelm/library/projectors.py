"""Where the other parts of a model are: the GGUF beside it that reads pictures, its projector, and the one that drafts.

    a GGUF in a folder                 mmproj-….gguf in the same folder, with the model's name or with no other model's
    a GGUF in the hub's cache          the same, at any level of its revision: `edgelm pull` takes it along
    a blob in Ollama's store           the blob of the kind "projector" in the model's manifest
    --mmproj FILE                      this one; off: none

The heads that draft, mtp-….gguf, lie beside it by the same names; `--draft FILE` names others. Ollama has none.

Owns these rules. Opens no file: backends/projectors.py does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from edgelm.base.config import Settings
from edgelm.base.errors import ModelError
from edgelm.base.places import expand_home
from edgelm.library.hub_cache import names_in
from edgelm.library.names import shown
from edgelm.library.ollama_store import BLOBS, is_store, projector_blob
from edgelm.library.selection import heads_among, projector_among

SNAPSHOTS = "snapshots"


def find_projector(settings: Settings, model: Path) -> Path | None:
    """Return the projector that a model is loaded with; None: it reads no pictures. Raises ModelError."""
    if settings.mmproj == "off":
        return None
    if settings.mmproj == "auto":
        return projector_of(model)
    path = Path(os.path.abspath(expand_home(settings.mmproj)))  # noqa: PTH100 - links are kept as they are
    if not path.is_file():
        raise ModelError(
            f"--mmproj {shown(settings.mmproj)} does not exist", "give the file mmproj-….gguf of the model"
        )
    return path


def projector_of(path: Path) -> Path | None:
    """Return the projector that belongs to the model at a path by its name or place; None: there is none."""
    store = path.parent.parent
    if path.parent.name == BLOBS and is_store(store):
        return projector_blob(store, path)
    return _beside(path, projector_among)


def heads_of(path: Path) -> Path | None:
    """Return the file of the heads that draft for the model at a path; None: there is none beside it."""
    return _beside(path, heads_among)


def _beside(path: Path, choose: Callable[..., str | None]) -> Path | None:
    if not path.name.casefold().endswith(".gguf"):
        return None
    revision = next((folder for folder in path.parents if folder.parent.name == SNAPSHOTS), None)
    root = revision or path.parent
    inside = path.relative_to(root)
    folders = [root.joinpath(*inside.parts[:depth]) for depth in range(len(inside.parts))]
    names = [
        (folder / name).relative_to(root).as_posix()
        for folder in folders
        for name in names_in(folder, [])
        if (folder / name).is_file()
    ]
    name = choose(names, inside.as_posix(), one_family=revision is not None)
    return None if name is None else root / name
