"""The presets of the user's config.toml, for the commands with `--preset`."""

from __future__ import annotations

import os
from pathlib import Path

from edgelm.chats.presets import Preset, Presets, parse_presets
from edgelm.config import Config


def read_presets(config: Config) -> Presets:
    """Return the presets of the user's own config.toml; no file of a working directory is read. Raises UsageError."""
    from edgelm.tui.params import PARAMS  # most runs have no preset

    parsers = {param.name: param.parse for param in PARAMS}
    return parse_presets(config.tables, config.places.config / "config.toml", parsers)


def start_preset(presets: Presets, name: str | None, config: Config) -> Preset | None:
    """Return the preset that a chat begins with: the named one, or the one of the working directory.

    Flags and variables of the environment beat it. Raises UsageError for a name that does not exist.
    """
    preset = presets.find(name) if name is not None else presets.of_folder(_working_folder())
    if preset is None:
        return None
    return preset.without(
        [setting for setting, source in config.sources.items() if source.startswith(("--", "EDGELM_"))]
    )


def _working_folder() -> Path:
    try:
        return Path.cwd()
    except OSError:  # it is gone
        return Path(os.sep)
