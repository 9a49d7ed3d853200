"""The user's own presets, keys and themes, from config.toml, for the commands that use or show them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from edgelm.base.config import Config
from edgelm.chats.presets import Preset, Presets, parse_presets

if TYPE_CHECKING:
    from textual.theme import Theme

    from edgelm.tui.commands.keymap import KeyMap


def read_presets(config: Config) -> Presets:
    """Return the presets of the user's own config.toml; no file of a working directory is read. Raises UsageError."""
    from edgelm.tui.dialogs.params import PARAMS  # most runs have no preset

    parsers = {param.name: param.parse for param in PARAMS}
    return parse_presets(config.tables, config.places.config / "config.toml", parsers)


def read_looks(config: Config) -> tuple[KeyMap, tuple[Theme, ...]]:
    """Return the keys and themes of the user's own config.toml. Raises UsageError."""
    from edgelm.tui.commands.keymap import parse_keys
    from edgelm.tui.dialogs.themes import parse_themes

    file = config.places.config / "config.toml"
    return parse_keys(config.tables.get("keys", {}), file), parse_themes(config.tables.get("themes", {}), file)


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
