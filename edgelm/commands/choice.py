"""From the name of a model on the command line to the model, for all commands that use one that is here."""

from __future__ import annotations

from pathlib import Path

from edgelm.config import Config
from edgelm.library.local import LocalModel, find_local, require_runnable


def chosen_model(name: str, config: Config) -> LocalModel:
    """Return the model to run. Raises ModelError where it is not here, or nothing here can run it."""
    return require_runnable(any_model(name, config))


def any_model(name: str, config: Config) -> LocalModel:
    """Return the model of that name, of whatever format. Raises ModelError where it is not here."""
    return find_local(name, config.places.hub, model_dirs(config))


def model_dirs(config: Config) -> list[Path]:
    """Return the user's own folders of models."""
    return [Path(each) for each in config.settings.model_dirs]
