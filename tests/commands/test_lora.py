"""`--lora`: an adapter changes the answers of its model, and the chat gives it to its server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgelm.commands import chat
from tests.adapters import write_adapter
from tests.commands.test_run import Edgelm
from tests.tiny import write_tiny

LAYER = "model.layers.0.mlp.down_proj"


def test_an_adapter_changes_the_answers_of_its_model(edgelm: Edgelm, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", width=64, ffn=96)
    adapter = write_adapter(tmp_path / "adapter", {LAYER: (64, 96)}, size=2.0)

    def answer(*flags: str) -> str:
        done = edgelm("run", model, "Once", "--raw", "--json", "--temperature", "0", "--max-tokens", "8", *flags)
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["text"])

    assert answer("--lora", str(adapter)) != answer()


def test_the_chat_gives_adapters_to_its_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A flag that may be given several times reaches the server as often."""
    started: dict[str, Any] = {}

    class StoppedError(Exception):
        pass

    def link(**options: Any) -> None:
        started.update(options)
        raise StoppedError

    monkeypatch.setattr("edgelm.client.link.Link", link)
    monkeypatch.setenv("EDGELM_CONFIG_DIR", str(tmp_path))
    with pytest.raises(StoppedError):
        chat.open_chat(None, None, {"lora": ["a:0.5", "b"], "ctx": "512", "graphs": False}, plain=True)
    assert started["arguments"] == ["--lora=a:0.5", "--lora=b", "--ctx=512", "--no-graphs"]
    assert not started["share"]
