"""The models of an endpoint as a user names them, and as a list shows them.

Knows nothing of widgets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from edgelm.base.errors import RequestError
from edgelm.client.endpoint import ModelEntry
from edgelm.library.catalog import hub_reference
from edgelm.library.progress import size_text
from edgelm.tui.pulls import Pull

MAX_SCANNED = 5000  # entries of a folder
_LATER_PART = re.compile(r"-0*([2-9]|[1-9]\d+)-of-\d+\.gguf$", re.IGNORECASE)  # the first part stands for all


def is_path(model: str) -> bool:
    """Tell whether a model is named by the path of its file or folder."""
    return model.startswith(("/", "~/", "./", "../")) or ("/" in model and model.endswith(".gguf"))


def find_model(models: Sequence[ModelEntry], name: str, *, can_pull: bool) -> str:
    """Return the one model that is called so, or has the name in its own. Raises RequestError where it is not one."""
    matches = [model.id for model in models if name.lower() in model.id.lower()]
    exact = [match for match in matches if match == name]
    if not matches and can_pull:
        hub_reference(name)  # raises with similar names where this one is misspelt
        raise RequestError(f"{name} is not on this machine", f"/pull {name} gets it")
    if len(exact or matches) != 1:
        count = "no model" if not matches else f"{len(matches)} models"
        raise RequestError(f"{count} called {name}", "/model shows all")
    return (exact or matches)[0]


def existing(paths: Sequence[str]) -> list[str]:
    """Return the paths at which there is a file or folder."""
    return [path for path in paths if Path(path).exists()]


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """A model or a folder in a folder of the user."""

    name: str
    is_model: bool
    detail: str = ""


def model_entries(folder: str) -> list[FolderEntry]:
    """Return the models in a folder, and the folders, in which there may be some; none where it cannot be read."""
    entries = []
    try:
        for entry in islice(os.scandir(Path(folder).expanduser()), MAX_SCANNED):
            if entry.name.startswith(".") or not entry.name.isprintable():
                continue
            if entry.is_dir():
                is_model = Path(entry.path, "config.json").is_file()
                entries.append(FolderEntry(entry.name, is_model, "folder of a model" if is_model else ""))
            elif entry.name.lower().endswith(".gguf") and not _LATER_PART.search(entry.name):
                entries.append(FolderEntry(entry.name, is_model=True, detail=size_text(entry.stat().st_size)))
    except (OSError, RuntimeError):  # RuntimeError: a home that is not known
        pass
    return sorted(entries, key=lambda entry: (not entry.is_model, entry.name.lower()))


def find_pulled(models: Sequence[ModelEntry], pull: Pull) -> str | None:
    """Return the endpoint's name of a pulled model."""
    path = os.path.realpath(pull.path)
    return next((model.id for model in models if model.path and os.path.realpath(model.path) == path), None)


def describe_model(model: ModelEntry) -> list[str]:
    """Return architecture, quantization, size and context of a model, as far as they are known."""
    size = ""
    if model.bytes:
        size = f"{model.bytes / 1e9:.1f} GB" if model.bytes >= 1e9 else f"{model.bytes / 1e6:.0f} MB"
    context = f"{model.context:,} tokens" if model.context else ""
    loaded = f"runs at {model.remote}" if model.remote else "loaded" if model.loaded else ""
    return [part for part in (model.architecture, model.quantization, size, context, loaded) if part]
