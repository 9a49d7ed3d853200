"""The connection to an endpoint: a named one, a running front of this machine, or one that is started and ends with us.

Owns when the connection is made again. Knows nothing of chats and widgets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from edgelm.base.errors import EdgeLMError
from edgelm.base.runtime import FrontRecord, find_front, find_fronts
from edgelm.client.addresses import is_loopback, is_same_server
from edgelm.client.endpoint import Client, ModelEntry
from edgelm.client.failures import UnreachableError
from edgelm.client.local import OwnFront


class Link:
    """Makes connected clients. `share`: use a running front of this library. Every method raises EdgeLMError."""

    def __init__(
        self,
        *,
        endpoint: str | None,
        api_key: str | None,
        runtime: Path,
        log: Path,
        arguments: Sequence[str] = (),
        share: bool = True,
        library: str = "",
    ) -> None:
        self.remote = endpoint  # the address that the user named
        self._api_key = api_key
        self._runtime = runtime
        self._share = share
        self._library = library
        self._own = OwnFront(arguments, log)
        self._client: Client | None = None
        self._models: list[ModelEntry] | None = None
        self.unused_gpu: dict[str, str] = {}  # by model: the line about it; empty: there is none
        self._lock = asyncio.Lock()

    async def learn_gpu(self, model: str) -> None:
        """Ask once whether the machine has a GPU that a model's engine does not use."""
        if self._client is not None and model not in self.unused_gpu:
            with suppress(EdgeLMError):
                self.unused_gpu[model] = await self._client.unused_gpu(model)

    async def client(self) -> Client:
        """Return the client; connect first if it is not connected."""
        async with self._lock:
            if self._own.died:
                await self._forget()
            if self._client is None:
                self._client = await self._connect()
            return self._client

    @property
    def connected(self) -> Client | None:
        """Return the client if it is connected already."""
        return self._client

    @property
    def is_ready(self) -> bool:
        """Return whether the endpoint has listed its models; one that refuses the key has not."""
        return self._client is not None and self._models is not None

    @property
    def listed(self) -> list[str]:
        """Return the names of the models that the endpoint has listed."""
        return [model.id for model in self._models or []]

    def entry(self, model: str) -> ModelEntry | None:
        """Return what is known of a model since the last list."""
        return next((entry for entry in self._models or () if entry.id == model), None)

    async def models(self, *, again: bool = False) -> list[ModelEntry]:
        """Return the models that the endpoint offers; `again` requests a new list."""
        client = await self.client()
        if self._models is None or again:
            self._models = await client.models()
        return self._models

    @property
    def is_here(self) -> bool:
        """Return whether the endpoint has an address of this machine, perhaps of a tunnel that the user made."""
        return self.remote is None or is_loopback(self.remote)

    async def destination(self, model: str) -> str:
        """Return which other machine reads what a model is sent, by its address; empty: none does.

        The servers behind a front of this machine have the models of others.
        """
        if not self.is_here:
            return self.remote or ""
        with suppress(EdgeLMError):  # the request will tell it
            await self.models()
        entry = self.entry(model)
        hosts = entry.remote.split(", ") if entry is not None and entry.remote else []
        return ", ".join(host for host in hosts if not is_loopback(f"http://{host}"))

    async def is_own(self) -> bool:
        """Return whether the endpoint is a front of this user on this machine; a tunnel to another machine is not."""
        if self.remote is None:
            return True
        fronts = await asyncio.to_thread(find_fronts, self._runtime)
        return is_loopback(self.remote) and any(is_same_server(self.remote, front.address) for front in fronts)

    async def lost(self) -> None:
        """Drop a broken connection: the next call connects again."""
        async with self._lock:
            await self._forget()

    async def close(self) -> None:
        """Close the connection, and end the front that was started here."""
        async with self._lock:
            await self._forget()
            await self._own.stop()

    async def _connect(self) -> Client:
        if self.remote is not None:
            return await self._try(Client(self.remote, self._api_key))
        front = find_front(self._runtime, self._library) if self._share else None
        if front is not None and front.serves(self._library):
            try:
                return await self._try(self._client_of(front))
            except UnreachableError:
                pass  # the front ended without removing its file
        await self._own.stop()
        return await self._try(self._client_of(await self._own.start()))

    def _client_of(self, front: FrontRecord) -> Client:
        return Client(front.address, front.key or self._api_key, verify=front.tls())

    async def _try(self, client: Client) -> Client:
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


async def sees(link: Link, model: str) -> bool:
    """Return whether a model reads pictures, as far as the endpoint tells.

    A list that says no is renewed: its projector may be here now. Raises EdgeLMError.
    """
    client = await link.client()
    if not client.is_edgelm:
        return True
    for again in (False, True):
        entries = await link.models(again=again)
        named = [entry for entry in entries if entry.id == model]
        if not named:  # a path, or another name; of a file that is gone, the answer to the message tells
            described = await client.described(model) if model else None
            return described is None or bool(described.pictures or described.remote)
        if any(entry.pictures or entry.remote for entry in named):  # a remote one may see
            return True
    return False
