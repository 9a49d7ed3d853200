"""A server of any make that `bench` and `eval` measure: one that --endpoint names, or that a table of config.toml has.

Owns which key goes there, and what its errors are in our words.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from edgelm.base.config import Config
from edgelm.base.errors import EngineError, UsageError
from edgelm.base.model_tables import ModelTable, RemoteTable
from edgelm.server.remotes.boxes import Box, BoxError
from edgelm.server.remotes.models import boxes_of


class Endpoint:
    """A model of such a server."""

    def __init__(self, model: str, box: Box) -> None:
        self.model = model  # its name there
        self.box = box

    @property
    def where(self) -> str:
        return self.box.base_url

    async def chunks(self, path: str, fields: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of an answer; optional fields that the server refuses are omitted. Raises EngineError."""
        while True:
            omitted = self.box.omitted
            body = {name: value for name, value in {"model": self.model, **fields}.items() if name not in omitted}
            try:
                async with aclosing(self.box.chunks(path, body, 0)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except BoxError as error:
                if error.kind != "refused" or self.box.omitted == omitted:
                    raise EngineError(str(error)) from None


def endpoint_of(
    model: str, endpoint: str | None, api_key: str | None, flags: Mapping[str, object], config: Config
) -> Endpoint:
    """Return the server that runs a model. Raises UsageError for settings of an engine here."""
    table = config.remote_model(model)
    if endpoint is not None:
        table = ModelTable(model, "--endpoint", remote=RemoteTable((endpoint,), model))
        if api_key is None and config.sources["api_key"].startswith("EDGELM_"):
            api_key = config.settings.api_key  # the key in config.toml is for our own server
    elif api_key is not None or table is None:
        raise UsageError("--api-key is for the server of --endpoint", "add --endpoint URL")
    assert table.remote
    if given := [name for name, value in flags.items() if value is not None]:
        name = given[0].replace("_", "-")
        raise UsageError(f"--{name} is for engines of this machine, and {model} runs on another server", "omit it")
    return Endpoint(table.remote.model, boxes_of(table, api_key)[0])


def require_none(used: Mapping[str, bool], model: str) -> None:
    """Raise UsageError for a flag that needs an engine of this machine."""
    for flag, is_used in used.items():
        if is_used:
            raise UsageError(f"{flag} needs the engine, and {model} runs on another server", f"omit {flag}")
