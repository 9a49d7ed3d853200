"""One file over several connections: each byte once, resumed exactly, and right whatever the server does."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from edgelm.base.errors import EdgeLMError
from edgelm.library import download
from edgelm.library import pull as pull_module
from edgelm.library.hub import RefusedError
from edgelm.library.hub_cache import all_unfinished
from edgelm.library.names import HubReference
from edgelm.library.progress import Retrying, Wrong
from edgelm.library.pull import pull
from tests.library.conftest import Puller
from tests.library.hub_server import Fault, HubServer

NAME = "o/m-GGUF"
FILE = "m-Q4_K_M.gguf"
SEGMENT = 100_000
SIZE = 10 * SEGMENT + 12_345
CONNECTIONS = 4


@pytest.fixture
def content(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> bytes:
    for module in (download, pull_module):
        monkeypatch.setattr(module, "SEGMENT_BYTES", SEGMENT)
    data = random.Random(1).randbytes(SIZE)
    server.add(NAME, {FILE: data})
    return data


def fetch(puller: Puller, connections: int = CONNECTIONS) -> Path:
    return pull(HubReference(NAME), puller.hub, puller.events.append, connections=connections).path


def test_a_large_file_comes_over_several_connections(server: HubServer, puller: Puller, content: bytes) -> None:
    server.together = CONNECTIONS  # no answer begins before so many are asked for
    assert fetch(puller).read_bytes() == content
    assert server.sent_bytes() == SIZE
    assert sorted(sent.start for sent in server.sent) == list(range(0, SIZE, SEGMENT))
    assert puller.parts() == []


def test_one_connection_asks_the_hub_once(server: HubServer, puller: Puller, content: bytes) -> None:
    assert fetch(puller, 1).read_bytes() == content
    assert [path for _, path, _ in server.requests if "/resolve/" in path] == [f"/{NAME}/resolve/{'c' * 40}/{FILE}"]
    assert [sent.start for sent in server.sent] == list(range(0, SIZE, SEGMENT))


def test_gaps_are_filled_by_a_later_run_and_nothing_else_is_fetched(
    server: HubServer, puller: Puller, content: bytes
) -> None:
    server.together = CONNECTIONS
    server.order(FILE, *(Fault("close", count) for count in (80_000, *[10_000] * CONNECTIONS)))
    server.order(FILE, Fault("status", status=503, times=99))
    with pytest.raises(EdgeLMError, match="the downloaded part is kept"):
        fetch(puller)
    assert server.sent_bytes() == 120_000
    (left,) = all_unfinished(puller.cache)
    assert left.nbytes == 120_000
    server.faults.clear()
    assert fetch(puller).read_bytes() == content
    assert server.sent_bytes() == SIZE
    assert not puller.events_of(Wrong)
    assert puller.parts() == []


def test_a_part_of_an_earlier_version_is_resumed(server: HubServer, puller: Puller, content: bytes) -> None:
    """It has no gaps, and no map."""
    blobs = puller.cache / "models--o--m-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{server.repos[NAME].files[FILE].blob}.part").write_bytes(content[: 2 * SEGMENT + 50_000])
    assert fetch(puller).read_bytes() == content
    assert server.sent_bytes() == SIZE - 2 * SEGMENT - 50_000


@pytest.mark.parametrize("note", [b"", b"1234567", b"\xff" * 96, b"\x00" * 96])
def test_a_damaged_map_is_no_worse_than_none(server: HubServer, puller: Puller, content: bytes, note: bytes) -> None:
    blobs = puller.cache / "models--o--m-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    part = blobs / f"{server.repos[NAME].files[FILE].blob}.part"
    part.write_bytes(content[:SEGMENT])
    part.with_name(part.name + ".map").write_bytes(note)
    assert fetch(puller).read_bytes() == content
    assert server.sent_bytes() == SIZE - SEGMENT


def test_a_server_that_limits_connections_costs_no_byte(server: HubServer, puller: Puller, content: bytes) -> None:
    server.at_most = 1
    assert fetch(puller).read_bytes() == content
    assert server.sent_bytes() == SIZE


def test_a_refused_second_connection_leaves_the_first_one_alone(
    puller: Puller, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some mirrors answer it with 403."""
    fetch_segment, refused = download.Download._fetch, threading.Event()

    def fetch_or_refuse(self: download.Download, part: download.PartialFile, segment: download.Segment) -> None:
        if segment.is_helper:
            refused.set()
            raise RefusedError("the hub forbids access", "")
        assert segment.index < 5 or refused.wait(30)  # after the check of the first bytes
        fetch_segment(self, part, segment)

    monkeypatch.setattr(download.Download, "_fetch", fetch_or_refuse)
    assert fetch(puller).read_bytes() == content


@pytest.mark.parametrize("begun", [False, True])
def test_a_server_without_ranges_sends_the_file_once_more_at_most(
    server: HubServer, puller: Puller, content: bytes, begun: bool
) -> None:
    if begun:
        server.together = CONNECTIONS
        server.order(FILE, *(Fault("close", count) for count in (80_000, *[10_000] * CONNECTIONS)))
    server.order(FILE, Fault("whole", times=99))
    assert fetch(puller).read_bytes() == content
    assert not puller.events_of(Wrong)


def test_wrong_bytes_in_a_later_segment_are_caught(server: HubServer, puller: Puller, content: bytes) -> None:
    server.order(FILE, *(Fault("flip", SIZE - 5) for _ in range(11)))
    assert fetch(puller).read_bytes() == content
    assert puller.events_of(Wrong) == [Wrong(FILE)]
    assert server.sent_bytes() == 2 * SIZE


def test_breaks_of_all_connections_are_resumed(server: HubServer, puller: Puller, content: bytes) -> None:
    rng = random.Random()
    faults = [Fault(rng.choice(["reset", "close"]), rng.randrange(20_000, SEGMENT)) for _ in range(12)]
    server.order(FILE, *faults)
    assert fetch(puller).read_bytes() == content
    assert puller.events_of(Retrying) or server.begun_answers > 11
    assert not puller.events_of(Wrong)
