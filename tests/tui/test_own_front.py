"""The chat with an endpoint of its own: the real `edgelm serve` and the built-in model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from edgelm.client.link import Link
from edgelm.tui.app import ChatApp
from edgelm.tui.workspace import ChatDefaults
from tests.tui.conftest import Driver
from tests.tui.fake_endpoint import FakeEndpoint

STARTER = Path(__file__).resolve().parents[2] / "models" / "starter" / "starter.gguf"
pytestmark = pytest.mark.skipif(not STARTER.exists(), reason="the built-in model is not here")


async def test_engine_and_front_die_and_the_next_message_works(
    tmp_path: Path, measured_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(measured_cache, tmp_path / "cache")
    for name in ("CONFIG", "DATA", "CACHE", "RUNTIME"):
        monkeypatch.setenv(f"EDGELM_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    link = Link(endpoint=None, api_key=None, runtime=tmp_path / "none", log=tmp_path / "serve.log")
    app = ChatApp(tmp_path / "chats.db", link, ChatDefaults(sampling={"temperature": 0, "max_tokens": 20}))

    def ask_front(path: str) -> dict[str, Any]:
        assert link.connected is not None
        with urllib.request.urlopen(link.connected.address + path, timeout=60) as reply:
            state: dict[str, Any] = json.load(reply)
            return state

    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        chat = Driver(app, pilot, FakeEndpoint())
        chat.patience_s = 90.0  # a front and an engine start, beside whatever else runs there
        await chat.until(lambda: chat.screen.status.status.activity == "ready", "ready")
        await chat.ask("What is edgelm?")
        assert len(chat.turns[-1][1]) > 20, chat.text
        await chat.sees("starter · ready · ")

        (model,) = [model for model in ask_front("/edgelm/ps")["models"] if model["state"] == "ready"]
        os.kill(model["pid"], signal.SIGKILL)
        await chat.ask("What is a token?")
        if chat.session.tree.path()[-1].state == "failed":  # it died during the request
            await chat.ask("What is a token?")
        assert len(chat.turns[-1][1]) > 20, chat.text

        os.kill(ask_front("/edgelm/ps")["pid"], signal.SIGKILL)
        await chat.ask("What is GGUF?")
        assert len(chat.turns[-1][1]) > 20, chat.text
        front = ask_front("/edgelm/ps")["pid"]
    with pytest.raises(ProcessLookupError):
        os.kill(front, 0)
