"""A local hub, and a separate cache for each test."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgelm.library.hub import Hub, RetryPolicy
from edgelm.library.names import HubReference
from edgelm.library.progress import Event
from edgelm.library.pull import pull
from tests.library.hub_server import HubServer

QUICK = RetryPolicy(stall_s=1.0, first_wait_s=0.01, max_wait_s=0.05, max_retry_after_s=2.0, max_failures=4)


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as running:
        yield running


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", "")  # the developer may be logged in
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "no-tokens"))
    return tmp_path / "hub"


class Puller:
    """Pulls from a server into a cache, and keeps the events."""

    def __init__(self, server: HubServer, cache: Path, retry: RetryPolicy = QUICK) -> None:
        self.hub = Hub(server.url, cache, retry)
        self.cache = cache
        self.events: list[Event] = []
        self.cancelled = threading.Event()

    def pull(self, repository: str, quantization: str | None = None, **more: str) -> Path:
        reference = HubReference(repository, quantization, **more)
        self.cancelled = threading.Event()
        return pull(reference, self.hub, self.events.append, cancelled=self.cancelled).path

    def events_of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    def parts(self) -> list[Path]:
        return sorted(self.cache.glob("*/blobs/*.part*"))


def wait_for_part(cache: Path, size: int) -> None:
    """Wait until so many bytes are on disk: those that the server has sent may be on their way still."""
    deadline = time.monotonic() + 60
    while [part.stat().st_size for part in cache.glob("*/blobs/*.part")] != [size]:
        assert time.monotonic() < deadline, "nothing was downloaded"
        time.sleep(0.01)


@pytest.fixture
def puller(server: HubServer, cache: Path) -> Puller:
    return Puller(server, cache)
