"""Models that are on this machine: which there are, and from what a person typed to a file.

Knows names and places. Opens no model (describe.py does), and knows nothing of the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from edgelm.errors import ModelError

STARTER = "starter"
LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
QUANTIZATION = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d+\w*|TQ\d_\d|MXFP4\w*|BF16|F16|F32))(?=[-.]|$)", re.IGNORECASE)


class LocalModel(NamedTuple):
    """A model that can be asked for by its name."""

    name: str
    path: Path


def find_model(name: str, hub: Path | None = None) -> Path:
    """Return the GGUF that `name` stands for: the starter, a path, or a model in the hub's cache folder.

    Raises ModelError where there is none.
    """
    if name == STARTER and (starter := _starter()) is not None:
        return starter
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            raise ModelError(f"{name} is a folder", "give the .gguf file in it")
        if path.exists():
            return path.resolve()
    except (OSError, ValueError, RuntimeError):  # a name that no file can have; RuntimeError: ~ of nobody
        pass
    for model in _hub_models(hub) if hub is not None else ():
        if model.name.casefold() == name.casefold():
            return model.path
    raise ModelError(f"{name} is not there", "give the path of a .gguf file")


def installed(hub: Path | None = None, given: Iterable[Path] = ()) -> list[LocalModel]:
    """Return the models that are here: the starter, the given files, then those in the hub's cache folder."""
    models: dict[str, Path] = {}
    if (starter := _starter()) is not None:
        models[STARTER] = starter
    for path in given:
        name = path.stem if models.get(path.stem, path) == path else str(path)
        models[name] = path
    for model in _hub_models(hub) if hub is not None else ():
        if model.path not in models.values():
            models.setdefault(model.name, model.path)
    return [LocalModel(name, path) for name, path in models.items()]


def _starter() -> Path | None:
    """Return the built-in model, where it is part of this installation."""
    path = Path(str(files("edgelm.models"))) / STARTER / f"{STARTER}.gguf"
    return path.resolve() if path.is_file() else None


def _hub_models(hub: Path) -> list[LocalModel]:
    """Return the GGUFs of the hub's cache: models--OWNER--NAME/snapshots/REVISION/FILE, newest revision first."""
    found: dict[str, Path] = {}
    for repository in sorted(hub.glob("models--*--*")):
        _, owner, name = repository.name.split("--", 2)
        snapshots = repository / "snapshots"
        revisions = sorted(snapshots.glob("*"), key=lambda each: each.stat().st_mtime, reverse=True)
        for path in (path for revision in revisions for path in sorted(revision.rglob("*.gguf"))):
            if LATER_PART.search(path.name) or path.name.startswith("mmproj") or not path.exists():
                continue
            quantization = QUANTIZATION.search(path.stem)
            full = f"{owner}/{name}:{quantization[1] if quantization else path.stem}"
            found.setdefault(full, path)
    return [LocalModel(name, path) for name, path in found.items()]
