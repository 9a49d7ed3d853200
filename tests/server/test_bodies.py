"""How many bytes of bodies are held at one time, who waits for room, and that the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import AsyncExitStack

import pytest
from starlette.requests import Request
from starlette.types import Message

from edgelm.base.errors import BusyError
from edgelm.server import bodies as module
from edgelm.server.api.errors import ApiError
from edgelm.server.bodies import SMALL_BYTES, Bodies

LIMIT_S = 30
MIB = 2**20


class Client:
    """A client that sends so many bytes, and the rest when it is told to."""

    def __init__(self, nbytes: int, *, declared: int | None = None, now: int | None = None, key: str = "") -> None:
        self._left = nbytes
        self._now = nbytes if now is None else now
        self._rest = asyncio.Event()
        length = [] if declared is None else [(b"content-length", str(declared).encode())]
        self.request = Request({"type": "http", "headers": length, "key": key}, self._receive)

    def send_rest(self) -> None:
        self._now = self._left
        self._rest.set()

    async def _receive(self) -> Message:
        if self._now == 0:
            await self._rest.wait()
        piece = min(self._now, SMALL_BYTES)
        self._now -= piece
        self._left -= piece
        return {"type": "http.request", "body": b"x" * piece, "more_body": self._left > 0}


async def sent(bodies: Bodies, client: Client, stack: AsyncExitStack) -> int:
    return len(await stack.enter_async_context(bodies.read(client.request)))


async def turns() -> None:
    """Let every task go on as far as it can."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_large_bodies_wait_for_room_and_small_ones_do_not() -> None:
    bodies = Bodies(MIB, 2 * MIB)
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as first, AsyncExitStack() as others:
        assert await sent(bodies, Client(MIB, declared=MIB), first) == MIB
        waiting = asyncio.create_task(sent(bodies, Client(MIB, declared=MIB), others))
        assert await sent(bodies, Client(SMALL_BYTES, declared=SMALL_BYTES), others) == SMALL_BYTES
        assert not waiting.done()
        await first.aclose()
        assert await waiting == MIB


async def test_one_key_does_not_take_the_whole_room() -> None:
    bodies = Bodies(MIB, 2 * MIB, owner=lambda request: request.scope["key"])
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as first, AsyncExitStack() as others:
        assert await sent(bodies, Client(MIB, declared=MIB, key="a"), first) == MIB
        waiting = asyncio.create_task(sent(bodies, Client(MIB, declared=MIB, key="a"), others))
        await turns()
        assert await sent(bodies, Client(MIB // 2, declared=MIB // 2, key="b"), others) == MIB // 2
        assert not waiting.done()
        await first.aclose()
        assert await waiting == MIB


@pytest.mark.parametrize("declared", [MIB, None], ids=["a length", "chunked"])
async def test_a_body_that_is_only_declared_keeps_no_room(declared: int | None) -> None:
    """Two sockets that said 16 MiB and sent 65 KiB shut out all bodies over 64 KiB, of every key, for a minute."""
    bodies = Bodies(MIB, 2 * MIB)
    idle = [Client(MIB, declared=declared, now=SMALL_BYTES + 1) for _ in range(6)]
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
        reading = [asyncio.create_task(sent(bodies, client, stack)) for client in idle]
        await turns()
        for nbytes in (SMALL_BYTES + 1, MIB // 4, MIB // 2):
            async with AsyncExitStack() as one:
                assert await sent(bodies, Client(nbytes, declared=declared and nbytes), one) == nbytes
        assert not any(task.done() for task in reading)
        for task in reading:
            task.cancel()


async def test_a_body_that_was_read_counts_as_long_as_it_is() -> None:
    bodies = Bodies(MIB, 2 * MIB)
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
        for _ in range(6):
            assert await sent(bodies, Client(SMALL_BYTES + 1), stack) == SMALL_BYTES + 1
        assert await sent(bodies, Client(MIB // 2, declared=MIB // 2), stack) == MIB // 2


@pytest.mark.parametrize("seed", range(8))
async def test_bodies_of_all_lengths_and_keys_become_complete(seed: int) -> None:
    """However far each of them is when the room is full."""
    rng = random.Random(seed)
    bodies = Bodies(MIB, 2 * MIB, owner=lambda request: request.scope["key"])
    clients = []
    for _ in range(24):
        nbytes = rng.randrange(SMALL_BYTES + 1, MIB + 1)
        declared = rng.choice([nbytes, None])
        clients.append(Client(nbytes, declared=declared, now=rng.randrange(nbytes), key=rng.choice("aaab")))

    async def read(client: Client) -> None:
        async with bodies.read(client.request):
            await asyncio.sleep(0)

    async with asyncio.timeout(LIMIT_S):
        reading = [asyncio.create_task(read(client)) for client in clients]
        await turns()
        for client in rng.sample(clients, len(clients)):
            client.send_rest()
            await asyncio.sleep(0)
        await asyncio.gather(*reading)


async def test_bodies_that_arrive_together_do_not_block_one_another() -> None:
    bodies = Bodies(MIB, 2 * MIB)
    clients = [Client(MIB, declared=MIB, now=MIB // 2) for _ in range(8)]

    async def read(client: Client) -> int:
        async with AsyncExitStack() as stack:
            return await sent(bodies, client, stack)

    async with asyncio.timeout(LIMIT_S):
        reading = [asyncio.create_task(read(client)) for client in clients]
        await asyncio.sleep(0.01)
        for client in clients:
            client.send_rest()
        assert await asyncio.gather(*reading) == [MIB] * 8


async def test_without_room_for_long_the_client_shall_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOM_LIMIT_S", 0.05)
    bodies = Bodies(MIB, MIB)
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as first, AsyncExitStack() as second:
        await sent(bodies, Client(MIB, declared=MIB), first)
        with pytest.raises(BusyError):
            await sent(bodies, Client(MIB, declared=MIB), second)
        await first.aclose()
        assert await sent(bodies, Client(MIB, declared=MIB), second) == MIB


async def test_a_body_that_stops_in_the_middle_gives_its_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BODY_LIMIT_S", 0.05)
    bodies = Bodies(MIB, MIB)
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
        with pytest.raises(ApiError) as caught:
            await sent(bodies, Client(MIB, declared=MIB, now=MIB // 2), stack)
        assert caught.value.status == 408
        assert await sent(bodies, Client(MIB, declared=MIB), stack) == MIB


async def test_the_loop_goes_on_while_large_bodies_are_parsed_one_after_the_other() -> None:
    bodies = Bodies()
    running = most = turns = 0

    def parse(body: bytes) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        begun, deadline = turns, time.monotonic() + LIMIT_S / 5
        while turns < begun + 10 and time.monotonic() < deadline:
            time.sleep(0.001)
        running -= 1
        return len(body)

    async with asyncio.timeout(LIMIT_S):
        parsing = [asyncio.create_task(bodies.parse(b"x" * (SMALL_BYTES + 1), parse)) for _ in range(4)]
        while not all(task.done() for task in parsing):
            await asyncio.sleep(0.001)
            turns += 1
        assert [task.result() for task in parsing] == [SMALL_BYTES + 1] * 4
    assert most == 1
    assert turns >= 40
    with pytest.raises(json.JSONDecodeError):
        await bodies.parse(b"{" * (SMALL_BYTES + 1), json.loads)
