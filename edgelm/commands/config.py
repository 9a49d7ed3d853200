"""`edgelm config`: every setting, its value, and where that comes from."""

from __future__ import annotations

import json
from dataclasses import fields

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgelm.config import Config, Settings, load_config

SECRETS = {"api_key"}


def show_config(as_json: bool) -> None:
    """Print the settings in force. Raises EdgeLMError for a file or variable that does not fit."""
    config = load_config({})
    if as_json:
        rows = {name: {"value": value, "source": source} for name, value, source, _ in settings_of(config)}
        print(json.dumps({"file": str(config.places.config / "config.toml"), "settings": rows}))
        return
    table = Table(
        caption=escape(f"{config.places.config / 'config.toml'}  <  EDGELM_…  <  flags"), caption_justify="left"
    )
    for column in ("setting", "value", "from", "what it does"):
        table.add_column(column)
    for name, value, source, what in settings_of(config):
        table.add_row(name, "" if value is None or value == [] else escape(str(value)), escape(source), what)
    Console().print(table)


def settings_of(config: Config) -> list[tuple[str, object, str, str]]:
    """Return name, value, source and help of each setting; a secret's value is hidden."""
    rows = []
    for each in fields(Settings):
        value = getattr(config.settings, each.name)
        shown = "hidden" if each.name in SECRETS and value else list(value) if isinstance(value, tuple) else value
        rows.append((each.name, shown, config.sources[each.name], str(each.metadata["help"])))
    return rows
