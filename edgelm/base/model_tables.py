"""The tables `[models."NAME"]` of config.toml: settings of one model, its other names, how long it stays loaded; or
where it runs, for a model of another server.

Owns their form and their errors. config.py owns the settings themselves, and which table beats which source.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgelm.base.durations import parse_keep_alive
from edgelm.base.errors import UsageError

OWN_KEYS = ("alias", "keep_alive")  # beside the settings
REMOTE_KEYS = ("model", "api_key_file", "headers", "ca_file", "connect_timeout", "timeout")  # beside `endpoint`
Parse = Callable[[object], Any]


@dataclass(frozen=True, slots=True)
class RemoteTable:
    """Where a model runs that another server has. The server checks addresses and files when it starts."""

    endpoints: tuple[str, ...]
    model: str  # its name there
    api_key_file: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca_file: str | None = None
    connect_timeout_s: float = 5.0
    timeout_s: float = 600.0  # without a byte of the answer


@dataclass(frozen=True, slots=True)
class ModelTable:
    """The settings of one model."""

    name: str  # as the user wrote it
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    keep_alive_s: float | None = None  # infinity: it stays loaded; None: as idle_timeout says
    remote: RemoteTable | None = None  # None: it runs here


def parse_tables(
    document: object, file: str, parsers: Mapping[str, Parse], of_server: Collection[str] = ()
) -> tuple[ModelTable, ...]:
    """Return the tables of the key `models`; `parsers` has the settings that a model can have of its own.

    `of_server` are the other settings, which stand above the tables. Raises UsageError for an unknown key, a value
    that does not fit, or an alias that another model has too.
    """
    if not isinstance(document, dict):
        raise UsageError(f"{file}: models is no table", 'write [models."NAME"] and the settings below it')
    tables = tuple(_table(name, entries, file, parsers, of_server) for name, entries in document.items())
    owners = {table.name.casefold(): table.name for table in tables}
    for table in tables:
        for alias in table.aliases:
            if owners.setdefault(alias.casefold(), table.name) != table.name:
                message = f"{table.source}: alias {alias!r} is a name of {owners[alias.casefold()]!r} too"
                raise UsageError(message, "give each name to one model")
    return tables


def meant(name: str, known: Sequence[str]) -> str:
    """Return the hint for a setting that there is not: those with a similar name, or else all."""
    import difflib  # not at each start

    near = difflib.get_close_matches(name, known, 3, cutoff=0.7)
    return f"did you mean {' or '.join(near)}?" if near else f"the settings are {', '.join(known)}"


def table_of(tables: Iterable[ModelTable], names: Iterable[str]) -> ModelTable | None:
    """Return the table of the model that has these names."""
    known = {name.casefold() for name in names}
    return next((table for table in tables if table.name.casefold() in known), None)


def owner_of(tables: Iterable[ModelTable], alias: str) -> str | None:
    """Return the model with an alias; None: it is no alias."""
    wanted = alias.strip().casefold()
    return next((table.name for table in tables if wanted in (own.casefold() for own in table.aliases)), None)


def _table(
    name: str, entries: object, file: str, parsers: Mapping[str, Parse], of_server: Collection[str]
) -> ModelTable:
    source = f'{file} [models."{name}"]'
    if not isinstance(entries, dict):
        raise UsageError(f"{file}: models.{name} is no table", f'write [models."{name}"] and the settings below it')
    if "endpoint" in entries:
        return _remote_table(name, entries, source)
    settings: dict[str, Any] = {}
    for key, value in entries.items():
        if key in OWN_KEYS:
            continue
        if key not in parsers:
            raise UsageError(f"{source}: a model has no setting {key}", _place_of(key, parsers, of_server))
        settings[key] = _parsed(key, value, source, parsers[key])
    keep_alive_s = entries.get("keep_alive")
    return ModelTable(
        name,
        source,
        settings,
        _parsed("alias", entries.get("alias", []), source, _parse_names),
        None if keep_alive_s is None else _parsed("keep_alive", keep_alive_s, source, parse_keep_alive),
    )


def _place_of(key: str, parsers: Mapping[str, Parse], of_server: Collection[str]) -> str:
    """Return the hint for a key that no model of this machine has: where it belongs, or what may be meant."""
    if key in REMOTE_KEYS:
        return "it needs an endpoint"
    if key in of_server:
        return f"{key} is a setting of the whole server: write it above the tables"
    return meant(key, [*OWN_KEYS, *parsers])


def _remote_table(name: str, entries: Mapping[str, Any], source: str) -> ModelTable:
    """Return the table of a model that runs elsewhere: it has no settings of models here."""
    parsers: dict[str, Parse] = {
        "alias": _parse_names,
        "endpoint": _parse_names,
        "model": _parse_text,
        "api_key_file": _parse_text,
        "headers": _parse_headers,
        "ca_file": _parse_text,
        "connect_timeout": _parse_seconds,
        "timeout": _parse_seconds,
    }
    if unknown := [key for key in entries if key not in parsers]:
        hint = f"beside an endpoint stand {', '.join(['alias', *REMOTE_KEYS])}"
        raise UsageError(f"{source}: a model that runs elsewhere has no setting {unknown[0]}", hint)
    read = {key: _parsed(key, value, source, parsers[key]) for key, value in entries.items()}
    if not read["endpoint"]:
        raise UsageError(f"{source}: endpoint is empty", "give an address such as http://box:8000/v1")
    times = {f"{key}_s": read[key] for key in ("connect_timeout", "timeout") if key in read}
    rest = {key: read[key] for key in ("api_key_file", "headers", "ca_file") if key in read}
    remote = RemoteTable(read["endpoint"], read.get("model", name), **rest, **times)
    return ModelTable(name, source, aliases=read.get("alias", ()), remote=remote)


def _parsed(key: str, value: object, source: str, parse: Parse) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        shown = f" is {value!r}" if key != "headers" else ""  # it may hold a key
        raise UsageError(f"{source}: {key}{shown}", f"give {error}") from None


def _parse_names(value: object) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or any(not isinstance(name, str) for name in names):
        raise ValueError("a name, or a list of names")
    if any(not name.strip() or not name.isprintable() or name != name.strip() for name in names):
        raise ValueError("printable names")
    return tuple(names)


def _parse_text(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError("a printable text")
    return value


def _parse_seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86_400:
        raise ValueError("seconds, more than 0 and at most 86400")
    return float(value)


def _parse_headers(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError('a table such as { X-Team = "a" }')  # noqa: TRY004 - as the others here
    for name, text in value.items():
        is_token = bool(name) and name.isascii() and name.replace("-", "").replace("_", "").isalnum()
        if not is_token or not isinstance(text, str) or not (text.isascii() and text.isprintable()):
            raise ValueError("names of headers, each with a text of printable ASCII")
    return dict(value)
