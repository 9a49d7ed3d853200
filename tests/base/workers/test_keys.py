"""Keys in the environment: a worker starts without those that it does not need."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from edgelm.base.config import API_KEYS, Settings
from edgelm.base.places import HUB_TOKENS
from edgelm.base.workers.parent import Worker
from edgelm.client.local import OwnFront

KEYS = {"EDGELM_API_KEY": "the key of the server", "HF_TOKEN": "hf_1", "HUGGING_FACE_HUB_TOKEN": "hf_2"}
WORKERS = [
    "edgelm.server.engine_process.worker",
    "edgelm.jobs.worker",
    "edgelm.jobs.reader",
    "edgelm.backends.probe_worker",
    "edgelm.backends.llama.canary",
    "edgelm.text.template_worker",
    "edgelm.library.pull_worker",
]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user whose shell has keys."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    for kind in ("CONFIG", "DATA", "CACHE", "RUNTIME"):
        monkeypatch.setenv(f"EDGELM_{kind}_DIR", str(tmp_path / kind.lower()))


def variables(pid: int) -> dict[str, str]:
    environment = Path(f"/proc/{pid}/environ")
    deadline = time.monotonic() + 10
    # Linux tells the parent of a successful exec a moment before it publishes the new environment.
    while not (text := environment.read_text()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return dict(line.split("=", 1) for line in text.split("\0") if line)


def keys_of(pid: int) -> set[str]:
    return KEYS.keys() & variables(pid).keys()


@pytest.mark.parametrize("module", WORKERS)
def test_a_worker_of_each_kind_has_no_key(module: str) -> None:
    with Worker(module, replies=()) as worker:
        assert not keys_of(worker.pid)
        assert variables(worker.pid)["PATH"] == os.environ["PATH"]


def test_a_worker_has_the_keys_that_it_needs() -> None:
    with Worker("edgelm.library.pull_worker", replies=(), keys=HUB_TOKENS) as worker:
        assert keys_of(worker.pid) == {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}
    with Worker("edgelm.library.pull_worker", replies=(), keys=API_KEYS) as worker:
        assert keys_of(worker.pid) == {"EDGELM_API_KEY"}


async def test_the_front_of_a_chat_has_the_key_that_its_clients_must_send(tmp_path: Path) -> None:
    front = OwnFront([], tmp_path / "serve.log")
    await front.start()
    try:
        assert front._worker
        assert keys_of(front._worker.pid) == {"EDGELM_API_KEY"}
    finally:
        await front.stop()


def test_settings_for_a_worker_have_no_key() -> None:
    settings = Settings(api_key="secret", ctx=512)
    assert settings.without_keys == Settings(ctx=512)


def test_a_default_does_not_override_the_users_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with Worker("edgelm.jobs.reader", replies=(), defaults={"OMP_NUM_THREADS": "1", "OTHER": "2"}) as worker:
        assert variables(worker.pid)["OMP_NUM_THREADS"] == "3"
        assert variables(worker.pid)["OTHER"] == "2"
