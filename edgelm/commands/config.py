"""`edgelm config`: print every setting, its value and its source."""

from __future__ import annotations

import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgelm.base.config import SETTINGS, Config, load_config
from edgelm.base.durations import keep_alive_text
from edgelm.base.model_tables import ModelTable
from edgelm.commands.flags import Json
from edgelm.commands.presets import read_looks, read_presets

PLAIN_TABLES = ("keys", "themes")  # shown as they stand in the file


def show_config(as_json: Json = False) -> None:
    """Print the settings in force. Raises EdgeLMError for an invalid file or variable."""
    config = load_config({})
    presets = read_presets(config)
    read_looks(config)
    if as_json:
        rows = {name: {"value": value, "source": source} for name, value, source, _ in settings_of(config)}
        models = {table.name: _own(table) for table in config.models}
        tables = {
            "presets": {preset.name: dict(preset.lines()) for preset in presets.by_name.values()},
            "folders": presets.folders,
            **{name: config.tables.get(name, {}) for name in PLAIN_TABLES},
        }
        file = str(config.places.config / "config.toml")
        print(json.dumps({"file": file, "settings": rows, "models": models} | tables, default=str))
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
        _print_line(f'[models."{own.name}"] {settings}')
    for preset in presets.by_name.values():
        values = ", ".join(f"{name} = {' '.join(value.split())}" for name, value in preset.lines())
        _print_line(f'[presets."{preset.name}"] {values}')
    for folder, name in presets.folders.items():
        _print_line(f"[folders] {folder} = {name}")
    for table_name in PLAIN_TABLES:
        for name, value in config.tables.get(table_name, {}).items():
            _print_line(f"[{table_name}] {name} = {json.dumps(value, ensure_ascii=False, default=str)}")


def _print_line(text: str) -> None:
    shown = "".join(character if character.isprintable() else "\ufffd" for character in text)
    Console(highlight=False).print(escape(shown), soft_wrap=True)


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
