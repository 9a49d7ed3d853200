"""Many clients at once, and clients that send nothing or half a request, on a real front with few open files."""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import pytest

from edgelm.server.engines.process import KEPT_S
from edgelm.server.protocol import HEAD_LIMIT_S, KEEP_ALIVE_S
from tests.counts import Count
from tests.server.harness import Front, body, serving

CLIENTS = Count(test=150, soak=700)
SOFT_LIMIT = Count(test=128, soak=1024)  # on the open files of the front
IDLE = Count(test=60, soak=500)
BODY_LIMIT_S = 60
SLACK_S = 20.0
ANSWERS_LIMIT_S = 280.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
# What a client sends before it falls silent, and how long its connection may live.
SILENT = {
    "nothing": (b"", KEEP_ALIVE_S),
    "half a head": (HEAD.encode(), HEAD_LIMIT_S),
    "half a body": (f"{HEAD}content-length: 100\r\n\r\n{{".encode(), BODY_LIMIT_S + KEEP_ALIVE_S),
}


@contextmanager
def soft_limit(number: int) -> Iterator[None]:
    """Let programs started in the block begin with this limit on open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4 * CLIENTS:
        pytest.skip("the hard limit is too low")
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def front(own: dict[str, str], tmp_path: Path) -> Iterator[Front]:
    with ExitStack() as stack:
        with soft_limit(SOFT_LIMIT):
            running = stack.enter_context(serving(own, "starter", log=tmp_path / "log"))
        stack.enter_context(soft_limit(2 * CLIENTS + 100))  # for the clients
        yield running
    assert (tmp_path / "log").read_text() == ""


def open_files(pid: int) -> int:
    return len([*Path(f"/proc/{pid}/fd").iterdir()])


async def outcome(http: httpx2.AsyncClient, number: int) -> str:
    """Ask once; return the status, or how the stream ended."""
    stream = number % 2 == 0
    wanted = body("starter", f"client {number}", max_tokens=8, stream=stream)
    async with http.stream("POST", "/v1/chat/completions", json=wanted) as answer:
        text = (await answer.aread()).decode()
    if answer.status_code != 200 or not stream:
        return str(answer.status_code)
    return "200" if text.endswith("data: [DONE]\n\n") else f"broken stream: {text[-300:]}"


@pytest.mark.timeout(400)
async def test_more_clients_than_files_are_answered_or_told_to_come_back(front: Front) -> None:
    await asyncio.to_thread(front.chat, "starter")
    engine = front.ps("starter")["pid"]
    before = open_files(front.process.pid), open_files(engine)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    started = time.monotonic()
    async with httpx2.AsyncClient(
        base_url=front.address, limits=limits, timeout=ANSWERS_LIMIT_S, trust_env=False
    ) as http:
        outcomes = Counter(await asyncio.gather(*(outcome(http, number) for number in range(CLIENTS))))
    print(f"{CLIENTS} clients in {time.monotonic() - started:.1f} s: {dict(outcomes)}")
    assert outcomes.keys() <= {"200", "429"}
    assert outcomes["200"] >= min(CLIENTS, 200)
    assert front.ps("starter")["pid"] == engine
    await asyncio.sleep(KEPT_S + 1)
    # The next request closes the kept connections that are too old.
    assert (await asyncio.to_thread(front.chat, "starter")).status_code == 200
    after = open_files(front.process.pid), open_files(engine)
    print(f"open files of front and engine: {before}, then {after}")
    assert after[0] <= before[0] + 4
    assert after[1] <= before[1] + 4


async def life_s(port: int, sent: bytes) -> float:
    """Return how long a connection lives on which nothing more comes."""
    started = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    await reader.read()
    writer.close()
    await writer.wait_closed()
    return time.monotonic() - started


@pytest.mark.skipif(not Count(test=0, soak=1), reason="two minutes: with --soak")
@pytest.mark.timeout(300)
async def test_silent_connections_end(front: Front) -> None:
    await asyncio.to_thread(front.chat, "starter")
    before = open_files(front.process.pid)
    port = int(front.address.rpartition(":")[2])
    kinds = [*SILENT] * (IDLE // len(SILENT))
    lives = asyncio.gather(*(life_s(port, SILENT[kind][0]) for kind in kinds))
    await asyncio.sleep(5)
    during = open_files(front.process.pid)
    assert (await asyncio.to_thread(front.chat, "starter")).status_code == 200
    ended = [*zip(kinds, await lives, strict=True)]
    for kind, (_, limit_s) in SILENT.items():
        lengths = [length for other, length in ended if other == kind]
        print(f"{len(lengths)} connections with {kind}: ended after {min(lengths):.1f} to {max(lengths):.1f} s")
        assert max(lengths) < limit_s + SLACK_S
    await asyncio.sleep(1)
    after = open_files(front.process.pid)
    print(f"open files of the front: {before}, then {during}, at the end {after}")
    assert during >= before + len(kinds)
    assert after <= before + 4
