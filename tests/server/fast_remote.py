"""An endpoint that counts, as a process of its own: `python -m tests.server.fast_remote PORT [PAUSE_S]`.

A request with `max_tokens: 3` gets "0 1 2 ". It is killed in tests, and fast enough to measure what stands before it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"%d "},"finish_reason":null}]}\n\n'
END = (
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":%d}}\n\ndata: [DONE]\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n%s\r\n\r\n"


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pause_s: float) -> None:
    with closing(writer):
        while head := await _head(reader):
            size = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0)
            body = await reader.readexactly(size)
            if head.startswith(b"GET"):
                models = b'{"data": [{"id": "counter"}]}'
                writer.write(HEAD % (b"application/json", b"content-length: %d" % len(models)) + models)
                continue
            count = json.loads(body).get("max_tokens", 8)
            writer.write(HEAD % (b"text/event-stream", b"transfer-encoding: chunked"))
            for number in range(count):
                _chunk(writer, CHUNK % number)
                if pause_s:
                    await asyncio.sleep(pause_s)
                else:
                    await writer.drain()
                    await asyncio.sleep(0)
            _chunk(writer, END % count)
            writer.write(b"0\r\n\r\n")
            await writer.drain()


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


async def main(port: int, pause_s: float) -> None:
    """Serve until killed; a line of standard output tells that it listens."""
    server = await asyncio.start_server(lambda *pair: _answer(*pair, pause_s), "127.0.0.1", port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class Counter:
    """One such process, which can be killed and started again at the same port."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self.port = 0
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.server.fast_remote", str(self.port), str(self._pause_s)]
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root)
        assert self.process.stdout
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()


@contextmanager
def counting(pause_s: float = 0.0) -> Iterator[Counter]:
    """Run one while the block runs."""
    counter = Counter(pause_s)
    try:
        yield counter
    finally:
        counter.kill()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
