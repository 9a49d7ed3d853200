"""The way to an endpoint: the one that was named, a front that runs, or one that is started and ends with us.

Owns when each is looked for again. Knows nothing of chats and widgets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from edgelm.client.endpoint import Client, ModelEntry
from edgelm.client.failures import UnreachableError
from edgelm.client.local import OwnFront, find_front


class Link:
    """Gives a connected client. Every method raises EdgeLMError."""

    def __init__(
        self,
        *,
        endpoint: str | None,
        api_key: str | None,
        runtime: Path,
        log: Path,
        arguments: Sequence[str] = (),
        share: bool = True,
    ) -> None:
        self._endpoint = endpoint
        self._api_key = api_key
        self._runtime = runtime
        self._share = share  # use a front that runs already
        self._own = OwnFront(arguments, log)
        self._client: Client | None = None
        self._models: list[ModelEntry] | None = None
        self._lock = asyncio.Lock()

    @property
    def remote(self) -> str | None:
        """Return the address that the user named."""
        return self._endpoint

    async def client(self) -> Client:
        """Return the client, connected now if it is not."""
        async with self._lock:
            if self._own.died:
                await self._forget()
            if self._client is None:
                self._client = await self._connect()
            return self._client

    @property
    def connected(self) -> Client | None:
        """Return the client if there is a connection already."""
        return self._client

    async def models(self, *, again: bool = False) -> list[ModelEntry]:
        """Return the models that the endpoint offers; `again` asks anew."""
        client = await self.client()
        if self._models is None or again:
            self._models = await client.models()
        return self._models

    async def lost(self) -> None:
        """Say that nothing answers any more: the next call connects again."""
        async with self._lock:
            await self._forget()

    async def close(self) -> None:
        """Close the connection, and end the front that is ours."""
        async with self._lock:
            await self._forget()
            await self._own.stop()

    async def _connect(self) -> Client:
        if self._endpoint is not None:
            return await self._try(self._endpoint)
        if self._share and (address := find_front(self._runtime)) is not None:
            try:
                return await self._try(address)
            except UnreachableError:
                pass  # a front that ended without removing its file
        await self._own.stop()
        return await self._try(await self._own.start())

    async def _try(self, address: str) -> Client:
        client = Client(address, self._api_key)
        try:
            await client.connect()
        except BaseException:
            await client.close()
            raise
        return client

    async def _forget(self) -> None:
        client, self._client = self._client, None
        self._models = None
        if client is not None:
            await client.close()
