"""The tables `[models."NAME"]` of config.toml: settings of one model, its other names, and how long it stays loaded.

Owns their form and their errors. config.py owns the settings themselves, and which table beats which source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgelm.base.durations import parse_keep_alive
from edgelm.base.errors import UsageError

OWN_KEYS = ("alias", "keep_alive")  # beside the settings
Parse = Callable[[object], Any]


@dataclass(frozen=True, slots=True)
class ModelTable:
    """The settings of one model."""

    name: str  # as the user wrote it
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    keep_alive_s: float | None = None  # infinity: it stays loaded; None: as idle_timeout says


def parse_tables(document: object, file: str, parsers: Mapping[str, Parse]) -> tuple[ModelTable, ...]:
    """Return the tables of the key `models`; `parsers` has the settings that a model can have of its own.

    Raises UsageError for an unknown key, a value that does not fit, or an alias that another model has too.
    """
    if not isinstance(document, dict):
        raise UsageError(f"{file}: models is no table", 'write [models."NAME"] and the settings below it')
    tables = tuple(_table(name, entries, file, parsers) for name, entries in document.items())
    owners = {table.name.casefold(): table.name for table in tables}
    for table in tables:
        for alias in table.aliases:
            if owners.setdefault(alias.casefold(), table.name) != table.name:
                message = f"{table.source}: alias {alias!r} is a name of {owners[alias.casefold()]!r} too"
                raise UsageError(message, "give each name to one model")
    return tables


def table_of(tables: Iterable[ModelTable], names: Iterable[str]) -> ModelTable | None:
    """Return the table of the model that has these names."""
    known = {name.casefold() for name in names}
    return next((table for table in tables if table.name.casefold() in known), None)


def owner_of(tables: Iterable[ModelTable], alias: str) -> str | None:
    """Return the model with an alias; None: it is no alias."""
    wanted = alias.strip().casefold()
    return next((table.name for table in tables if wanted in (own.casefold() for own in table.aliases)), None)


def _table(name: str, entries: object, file: str, parsers: Mapping[str, Parse]) -> ModelTable:
    source = f'{file} [models."{name}"]'
    if not isinstance(entries, dict):
        raise UsageError(f"{file}: models.{name} is no table", f'write [models."{name}"] and the settings below it')
    settings: dict[str, Any] = {}
    for key, value in entries.items():
        if key in OWN_KEYS:
            continue
        if key not in parsers:
            known = ", ".join([*OWN_KEYS, *parsers])
            raise UsageError(f"{source}: a model has no setting {key}", f"its settings are {known}")
        settings[key] = _parsed(key, value, source, parsers[key])
    keep_alive_s = entries.get("keep_alive")
    return ModelTable(
        name,
        source,
        settings,
        _parsed("alias", entries.get("alias", []), source, _parse_aliases),
        None if keep_alive_s is None else _parsed("keep_alive", keep_alive_s, source, parse_keep_alive),
    )


def _parsed(key: str, value: object, source: str, parse: Parse) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        raise UsageError(f"{source}: {key} is {value!r}", f"give {error}") from None


def _parse_aliases(value: object) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or any(not isinstance(name, str) for name in names):
        raise ValueError("a name, or a list of names")
    if any(not name.strip() or not name.isprintable() or name != name.strip() for name in names):
        raise ValueError("printable names")
    return tuple(names)
