"""Unfinished downloads: how they are named and resumed, and that a running pull loses nothing."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from edgelm.base.errors import EdgeLMError
from edgelm.library.hub_cache import all_unfinished, free_unfinished, unfinished_of
from edgelm.library.names import parse_name
from tests.library.conftest import Puller
from tests.library.hub_server import Fault, HubServer

NAME = "o/m-GGUF"
FILE = "big/m-Q4_K_M.gguf"
SIZE = 2_000_000


@pytest.fixture
def content(server: HubServer) -> bytes:
    data = random.Random(1).randbytes(SIZE)
    server.add(NAME, {FILE: data})
    return data


def test_an_unfinished_download_has_the_name_that_resumes_it(server: HubServer, puller: Puller, content: bytes) -> None:
    server.order(FILE, Fault("close", 700_000), Fault("status", status=503, times=4))
    with pytest.raises(EdgeLMError, match="the downloaded part is kept"):
        puller.pull(NAME)
    (left,) = all_unfinished(puller.cache)
    assert (left.repository, left.file, left.nbytes, left.name) == (NAME, FILE, 700_000, f"{NAME}:Q4_K_M")
    assert unfinished_of(parse_name(left.name), puller.cache) == [left]
    assert puller.pull(NAME).read_bytes() == content
    assert all_unfinished(puller.cache) == []
    assert puller.parts() == []


def test_a_download_without_a_byte_leaves_nothing(server: HubServer, puller: Puller, content: bytes) -> None:
    server.order(FILE, Fault("status", status=503, times=4))
    with pytest.raises(EdgeLMError):
        puller.pull(NAME)
    assert puller.parts() == []


def test_a_running_pull_loses_nothing(server: HubServer, puller: Puller, content: bytes) -> None:
    server.rate = 4e6
    pulled: list[Path] = []
    thread = threading.Thread(target=lambda: pulled.append(puller.pull(NAME)))
    thread.start()
    server.wait_for_bytes(300_000)
    assert free_unfinished(all_unfinished(puller.cache), puller.cache) == []
    thread.join(60)
    assert pulled[0].read_bytes() == content
    assert server.sent_bytes(FILE) == SIZE


@pytest.mark.parametrize("written", [b"", b"\xff", b"a\x1b[2Jb", b"x" * 9000])
def test_an_invalid_note_beside_a_part_is_ignored(cache: Path, written: bytes) -> None:
    blobs = cache / "models--o--m" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "1234.part").write_bytes(b"half")
    (blobs / "1234.part.path").write_bytes(written)
    (left,) = all_unfinished(cache)
    assert left.name == "o/m"
