"""Presets: a system prompt, a model, sampling and tools under a name, and the folders whose new chats begin with one.

Owns the tables `[presets."NAME"]` and `[folders]` of config.toml, their errors, and what a preset changes in a chat.
Only the user's own config.toml is read: nothing in a working directory. preset_file.py writes the tables.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgelm.base.errors import UsageError
from edgelm.base.places import expand_home
from edgelm.chats.history import Chat

OWN_KEYS = ("system", "model", "tools")  # beside the sampling parameters
MAX_NAME_LEN = 60

Value = float | int | str
Parse = Callable[[object], Any]


@dataclass(frozen=True, slots=True)
class Preset:
    """Values of a chat. A value that a preset does not set stays as the chat has it."""

    name: str
    system: str | None = None
    model: str = ""
    sampling: Mapping[str, Value] = field(default_factory=dict)
    tools: tuple[str, ...] | None = None  # servers of tools, by their names in the settings

    def lines(self) -> list[tuple[str, str]]:
        """Return the names and values of this preset, as text to show."""
        lines = [("model", self.model)] if self.model else []
        for name, value in self.sampling.items():
            lines.append((name, f"{value:g}" if isinstance(value, float) else str(written_value(name, value))))
        if self.tools is not None:
            lines.append(("tools", ", ".join(self.tools) or "none"))
        if self.system is not None:
            lines.append(("system prompt", self.system or "none"))
        return lines

    def without(self, names: Collection[str]) -> Preset:
        """Return it without some values, by the names of settings, and `model`."""
        sampling = {name: value for name, value in self.sampling.items() if name not in names}
        return replace(self, model="" if "model" in names else self.model, sampling=sampling)


@dataclass(slots=True)
class Presets:
    """The presets of the user, and the folders with a default. `file` is where they stand."""

    file: Path = Path("config.toml")
    by_name: dict[str, Preset] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)  # by the real path of a folder
    tools: tuple[str, ...] = ()  # the servers of tools that are configured
    parsers: Mapping[str, Parse] = field(default_factory=dict)  # of the sampling parameters

    def check(self, preset: Preset) -> Preset:
        """Return a preset as the file may hold it: without tools that are not configured. Raises UsageError."""
        if preset.tools is not None:
            preset = replace(preset, tools=tuple(name for name in preset.tools if name in self.tools) or None)
        for name, value in preset.sampling.items():
            if name not in self.parsers:  # of an imported chat
                raise UsageError(f"{name!r} is no parameter of a preset", "/params shows what this chat sets")
            _parsed(name, written_value(name, value), f"the preset {preset.name}", self.parsers[name])
        return preset

    def find(self, name: str) -> Preset:
        """Return a preset. Raises UsageError."""
        if (preset := self.by_name.get(name)) is None:
            known = f"the presets are {', '.join(self.by_name)}" if self.by_name else "/preset save NAME makes one"
            raise UsageError(f"there is no preset {name}", known)
        return preset

    def of_folder(self, folder: Path) -> Preset | None:
        """Return the default of the nearest folder at or above this one that has one."""
        real = Path(os.path.realpath(folder))
        name = next((self.folders[str(above)] for above in (real, *real.parents) if str(above) in self.folders), None)
        return self.by_name.get(name) if name is not None else None


def parse_presets(tables: Mapping[str, Any], file: Path, parsers: Mapping[str, Parse]) -> Presets:
    """Return the presets of the tables of config.toml; `parsers` are those of the sampling parameters.

    Raises UsageError for an unknown key or name, and a value that does not fit.
    """
    tools = tables.get("tools")
    servers = tuple(tools) if isinstance(tools, dict) else ()
    document = tables.get("presets", {})
    if not isinstance(document, dict):
        raise UsageError(f"{file}: presets is no table", 'write [presets."NAME"] and its values below it')
    by_name = {name: _preset(name, entries, file, parsers, servers) for name, entries in document.items()}
    presets = Presets(file, by_name, tools=servers, parsers=parsers)
    presets.folders = _folders(tables.get("folders", {}), presets)
    return presets


def check_name(name: str) -> str:
    """Return a name for a preset without spaces around it. Raises UsageError."""
    name = name.strip()
    if not name or len(name) > MAX_NAME_LEN or not name.isprintable() or name in ("off", "save", "folder"):
        hint = f"give 1 to {MAX_NAME_LEN} printable characters, and none of off, save and folder"
        raise UsageError(f"{name!r} cannot be the name of a preset", hint)
    return name


def apply_preset(chat: Chat, preset: Preset | None, before: Preset | None = None) -> None:
    """Put the values of a preset into a chat; None: of no preset.

    What `before`, the preset that the chat had, did set goes with it, unless the user has changed it since.
    """
    before = before or Preset("")
    chosen = preset or Preset("")
    if chosen.system is not None:
        chat.system = chosen.system
    elif before.system is not None and chat.system == before.system:
        chat.system = ""
    if chosen.tools is not None:
        chat.tools = chosen.tools
    elif before.tools is not None and chat.tools == before.tools:
        chat.tools = ()
    if chosen.model:
        chat.model = chosen.model
    elif before.model and before.model.lower() in chat.model.lower():  # the chat has the endpoint's name for it
        chat.model = ""
    kept = {name: value for name, value in chat.sampling.items() if before.sampling.get(name) != value}
    chat.sampling = {**kept, **chosen.sampling}
    chat.preset = chosen.name


def written_value(name: str, value: Value) -> Value:
    """Return a value as the user writes it: the API's `none` for the effort of reasoning is `off`."""
    return "off" if (name, value) == ("reasoning_effort", "none") else value


def preset_of(chat: Chat, name: str, model: str) -> Preset:
    """Return the values of a chat under a name, without empty ones; `model` is the one that answers it."""
    return Preset(name, chat.system or None, model, dict(chat.sampling), chat.tools or None)


def _preset(name: str, entries: object, file: Path, parsers: Mapping[str, Parse], servers: Collection[str]) -> Preset:
    source = f'{file} [presets."{name}"]'
    try:
        check_name(name)
    except UsageError as error:
        raise UsageError(f"{file}: {error.message}", error.hint) from None
    if not isinstance(entries, dict):
        raise UsageError(f"{file}: presets.{name} is no table", f'write [presets."{name}"] and its values below it')
    sampling: dict[str, Value] = {}
    for key, value in entries.items():
        if key in OWN_KEYS:
            continue
        if key not in parsers:
            raise UsageError(f"{source}: {key} sets nothing", "a preset has " + ", ".join([*OWN_KEYS, *parsers]))
        if (parsed := _parsed(key, value, source, parsers[key])) is not None:
            sampling[key] = parsed
    tools = None if "tools" not in entries else _parsed("tools", entries["tools"], source, _parse_tools)
    for server in tools or ():
        if server not in servers:
            known = f"the servers are {', '.join(servers)}" if servers else f'[tools."{server}"] would be the place'
            raise UsageError(f"{source}: there is no server of tools {server}", known)
    system = None if "system" not in entries else _parsed("system", entries["system"], source, _parse_system)
    model = _parsed("model", entries.get("model", ""), source, _parse_model)
    return Preset(name, system, model, sampling, tools)


def _folders(document: object, presets: Presets) -> dict[str, str]:
    file = presets.file
    if not isinstance(document, dict):
        raise UsageError(f"{file}: folders is no table", 'write [folders] and below it "/a/folder" = "NAME"')
    folders = {}
    for folder, name in document.items():
        expanded = expand_home(folder)
        if not Path(expanded).is_absolute() or "\0" in expanded:
            raise UsageError(f"{file} [folders]: {folder} is no absolute path", "begin it with / or ~")
        if not isinstance(name, str) or name not in presets.by_name:
            known = f"the presets are {', '.join(presets.by_name)}" if presets.by_name else "there are no presets yet"
            raise UsageError(f"{file} [folders]: {folder} has the preset {name!r}, which does not exist", known)
        folders[os.path.realpath(expanded)] = name
    return folders


def _parsed(key: str, value: object, source: str, parse: Parse) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        raise UsageError(f"{source}: {key} is {value!r}", f"give {error}") from None


def _parse_system(value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("a text")
    return value.strip()


def _parse_model(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable() or value != value.strip():
        raise ValueError("the name of a model, or the path of its file")
    return value


def _parse_tools(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or any(not isinstance(name, str) for name in value):
        raise ValueError('a list of names of [tools], such as ["files"]')
    return tuple(value)
