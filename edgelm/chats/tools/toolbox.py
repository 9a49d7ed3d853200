"""All servers of tools in the settings, with what the user has always allowed.

Owns which connection a name has, and the end of all of them. Knows nothing of chats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edgelm.base.errors import RequestError
from edgelm.base.places import Places
from edgelm.chats.tools.connection import Connection
from edgelm.chats.tools.consents import Consents
from edgelm.chats.tools.settings import ToolServer, parse_servers


@dataclass
class Toolbox:
    """The servers by their names, and the tools that may always run."""

    consents: Consents
    servers: Mapping[str, ToolServer] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)  # of the user; a server gets a few variables of it
    logs: Path = Path()
    connections: dict[str, Connection] = field(default_factory=dict, init=False)

    def connection(self, name: str) -> Connection:
        """Return the connection to a server. Raises RequestError for a name that the settings do not have."""
        if name not in self.servers:
            raise RequestError(f"there is no server of tools {name}", f'config.toml has no [tools."{name}"]')
        if name not in self.connections:
            log = self.logs / f"{name}.log"
            self.connections[name] = Connection(self.servers[name], self.environment, log)
        return self.connections[name]

    async def close(self) -> None:
        """End all servers."""
        await asyncio.gather(*(connection.close() for connection in self.connections.values()))


def make_toolbox(tables: object, places: Places) -> Toolbox:
    """Return the toolbox of the table `[tools]` of config.toml. Raises UsageError."""
    return Toolbox(
        Consents(places.data / "tool_consents.json"),
        parse_servers(tables, str(places.config / "config.toml")),
        places.environment,
        places.cache / "tools",
    )
