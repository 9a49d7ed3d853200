"""`edgelm watch`: a live picture of the steps of a running server's engine."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated

import typer

from edgelm.base.config import load_config
from edgelm.base.errors import EdgeLMError
from edgelm.commands.flags import Endpoint, EndpointKey, Json
from edgelm.commands.servers import Server, chosen_server


def watch_server(
    model: Annotated[
        str | None, typer.Argument(help="A loaded model; without it, the first.", show_default=False)
    ] = None,
    endpoint: Endpoint = None,
    api_key: EndpointKey = None,
    *,
    as_json: Json = False,
) -> None:
    """Show the steps of an engine until the user quits; as JSON, a line for an event.

    Raises EdgeLMError if there is no such server, or when it ends.
    """
    server = chosen_server(endpoint, api_key)
    if as_json:
        with suppress(KeyboardInterrupt):
            asyncio.run(_print_events(server, model))
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise EdgeLMError("edgelm watch draws in a terminal, and there is none", "add --json for lines of JSON")
    from edgelm.tui.inspector.app import WatchApp

    bandwidth = 0.0
    if server.is_own:
        from edgelm.commands.plan import read_machine

        config = load_config({})
        bandwidth = read_machine(config.settings, config.places).read_bytes_per_s
    error = WatchApp(server.address, server.headers, server.verify, model, bandwidth).run()
    if error is not None:
        raise error


async def _print_events(server: Server, model: str | None) -> None:
    from edgelm.client.watching import watch

    async for seen in watch(server.address, server.headers, server.verify, model):
        name = type(seen).__name__.removesuffix("Seen").lower()
        print(json.dumps({"event": name, **asdict(seen)}, ensure_ascii=False), flush=True)
