"""The events of a server that goes away."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from edgelm.base.errors import EngineError
from edgelm.client.watching import watch


async def test_a_reset_connection_has_a_reason() -> None:
    async def reset(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 99\r\n\r\n")
        await writer.drain()
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    async with await asyncio.start_server(reset, "127.0.0.1") as server:
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(EngineError, match=r"broke: \w"):
            async for _ in watch(address, {}, verify=True):
                pass
