"""The models of an endpoint as a user names them, and as a list shows them.

Knows nothing of widgets.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from edgelm.base.errors import RequestError
from edgelm.client.endpoint import ModelEntry
from edgelm.library.catalog import hub_reference
from edgelm.tui.pulls import Pull


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
    loaded = "loaded" if model.loaded else ""
    return [part for part in (model.architecture, model.quantization, size, context, loaded) if part]
