"""The tables `[tools."NAME"]` of config.toml: the servers whose tools a chat may use.

Owns their keys and checks. Knows nothing of processes and connections.

A server starts in the user's home folder. `cwd` names another: an absolute one, one below `~`, or one relative to the
folder that edgelm was started in, which is itself used only where `cwd = "."` says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from edgelm.base.errors import UsageError
from edgelm.base.places import expand_home

TIMEOUT_S = 60.0
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
KEYS = {
    "command": "the program of a server on this machine",
    "args": "its arguments",
    "env": "variables of its environment",
    "cwd": "the folder it starts in; without it your home folder",
    "url": "the address of a server that speaks HTTP",
    "headers": "headers of the requests to it",
    "timeout": "seconds that a call may take",
    "enabled": "false: it is kept, but not offered",
}
OF_COMMAND, OF_URL = ("args", "env", "cwd"), ("headers",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolServer:
    """One server: a program that speaks MCP on its standard input and output, or an address that does over HTTP."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)  # in addition to a minimal environment
    cwd: str = ""  # as written, with ~ expanded; empty: the home folder
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S

    @property
    def transport(self) -> list[object]:
        """Return the server's part of a consent's fingerprint: its command or address, without secret values."""
        return [self.url] if self.url else [self.command, *self.args, sorted(self.env), self.cwd]

    @property
    def words(self) -> str:
        """Return the command or address, as a person reads it."""
        return self.url or " ".join((self.command, *self.args))


def parse_servers(tables: object, source: str) -> dict[str, ToolServer]:
    """Return the enabled servers of `[tools]` by their names. Raises UsageError."""
    if not isinstance(tables, Mapping):
        raise UsageError(f"{source}: tools is no table", 'write [tools."NAME"], with a command or a url')
    servers = {}
    for name, table in tables.items():
        if not NAME.fullmatch(name):
            raise UsageError(
                f"{source}: {name!r} is no name for a server of tools", "give up to 32 letters, digits, - and _"
            )
        place = f'{source}: [tools."{name}"]'
        if not isinstance(table, Mapping):
            raise UsageError(f"{place} is no table", "give it a command or a url")
        server = _parse(name, table, place)
        if _checked(table, "enabled", bool, True, place, "true or false"):
            servers[name] = server
    return servers


def _parse(name: str, table: Mapping[str, Any], place: str) -> ToolServer:
    for key in table:
        if key not in KEYS:
            raise UsageError(f"{place} has no key {key}", "its keys are " + ", ".join(KEYS))
    if ("command" in table) == ("url" in table):
        raise UsageError(f"{place} needs a command or a url, and not both")
    other, kind = (OF_URL, "url") if "command" in table else (OF_COMMAND, "command")
    for key in other:
        if key in table:
            raise UsageError(f"{place}: {key} is for a server with a {kind}", f"remove it, or give a {kind}")
    args = _checked(table, "args", list, [], place, "a list of texts")
    if not all(isinstance(item, str) for item in args):
        raise UsageError(f"{place}: args is {args!r}", "give a list of texts")
    server = ToolServer(
        name=name,
        command=expand_home(_checked(table, "command", str, "", place, "the name or path of a program")),
        args=tuple(args),
        env=_texts(table, "env", place),
        cwd=expand_home(_checked(table, "cwd", str, "", place, "a folder")),
        url=_checked(table, "url", str, "", place, "an address"),
        headers=_texts(table, "headers", place),
        timeout_s=_seconds(table, place),
    )
    for key, text in (("command", server.command), ("cwd", server.cwd), *(("args", text) for text in server.args)):
        if "\0" in text:
            raise UsageError(f"{place}: {key} holds a NUL character", "remove it")
    if "command" in table and not server.command:
        raise UsageError(f"{place}: command is empty", "give the name or path of a program")
    if "url" in table:
        _check_url(server.url, place)
    return server


def _check_url(url: str, place: str) -> None:
    try:
        parts = urlsplit(url)
        is_fit = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_fit = False
    if not is_fit:
        raise UsageError(f"{place}: url is {url!r}", "give an address such as http://127.0.0.1:8000/mcp")


def _checked(table: Mapping[str, Any], key: str, kind: type, default: Any, place: str, values: str) -> Any:
    value = table.get(key, default)
    if not isinstance(value, kind):
        raise UsageError(f"{place}: {key} is {value!r}", f"give {values}")
    return value


def _texts(table: Mapping[str, Any], key: str, place: str) -> Mapping[str, str]:
    value: Mapping[str, Any] = _checked(table, key, Mapping, {}, place, 'texts, such as { NAME = "text" }')
    for name, text in value.items():
        if not isinstance(text, str) or re.search(r"[\0\r\n]", name + text) or not name or "=" in name:
            raise UsageError(
                f"{place}: {key} has a wrong {name!r}", 'give texts on one line, such as { NAME = "text" }'
            )
    return dict(value)


def _seconds(table: Mapping[str, Any], place: str) -> float:
    value = table.get("timeout", TIMEOUT_S)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 3600:
        raise UsageError(f"{place}: timeout is {value!r}", "give 1 to 3600 seconds")
    return float(value)
