"""`edgelm config`: print every setting, its value and its source."""

from __future__ import annotations

import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgelm.config import SETTINGS, Config, load_config
from edgelm.durations import keep_alive_text
from edgelm.model_tables import ModelTable


def show_config(as_json: bool) -> None:
    """Print the settings in force. Raises EdgeLMError for an invalid file or variable."""
    config = load_config({})
    if as_json:
        rows = {name: {"value": value, "source": source} for name, value, source, _ in settings_of(config)}
        models = {table.name: _own(table) for table in config.models}
        print(json.dumps({"file": str(config.places.config / "config.toml"), "settings": rows, "models": models}))
        return
    table = Table(
        caption=escape(f"{config.places.config / 'config.toml'}  <  EDGELM_…  <  flags"), caption_justify="left"
    )
    for column in ("setting", "value", "from", "what it does"):
        table.add_column(column)
    for name, value, source, text in settings_of(config):
        table.add_row(name, "" if value is None or value == [] else escape(str(value)), escape(source), escape(text))
    Console().print(table)
    for own in config.models:
        settings = ", ".join(f"{name} = {value}" for name, value in _own(own).items())
        Console(highlight=False).print(escape(f'[models."{own.name}"] {settings}'), soft_wrap=True)


def _own(table: ModelTable) -> dict[str, object]:
    """Return the settings of one model."""
    own: dict[str, object] = {"alias": list(table.aliases)} if table.aliases else {}
    if table.keep_alive_s is not None:
        own["keep_alive"] = keep_alive_text(table.keep_alive_s)
    return own | dict(table.settings)


def settings_of(config: Config) -> list[tuple[str, object, str, str]]:
    """Return name, value, source and help of each setting; the value of a secret is hidden."""
    rows = []
    for name, setting in SETTINGS.items():
        value = getattr(config.settings, name)
        shown = "hidden" if setting.secret and value else list(value) if isinstance(value, tuple) else value
        rows.append((name, shown, config.sources[name], setting.help))
    return rows
