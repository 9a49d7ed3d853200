"""How far a prompt is read, in words, and on the screen while the first token is awaited."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgelm.client.endpoint import ChatRequest
from edgelm.client.turns import FunctionTool, Turn
from edgelm.client.watching import Chunk
from edgelm.tui.transcript.prompt_progress import PromptProgress
from tests.tui.conftest import Open
from tests.tui.fake_endpoint import FakeEndpoint

CHUNK = Chunk(sequence=1, prompt=2000, cached=0, start=0, computed=500, drafted=0, forced=0, accepted=0, new=0)
TOOL = FunctionTool("look", "d" * 3000, {})


def test_words() -> None:
    progress = PromptProgress(ChatRequest("m", (Turn("user", "x" * 7000),)))
    assert progress.words(CHUNK, 2000.0) == "reading 25 % of 2,000 tokens, 6 s left"
    assert progress.words(replace(CHUNK, start=500, computed=1400), 5600.0) == "reading 95 % of 2,000 tokens"
    assert progress.words(replace(CHUNK, start=1900, computed=100), 400.0) == ""


def test_tools_are_named_where_they_are_much_of_the_prompt() -> None:
    progress = PromptProgress(ChatRequest("m", (Turn("user", "Hello"),), tools=(TOOL, TOOL)))
    assert "(2 tools: ~" in progress.first_words
    assert "tools" not in progress.words(replace(CHUNK, prompt=90_000), 1.0)


async def test_the_screen_says_how_far_the_prompt_is_read(
    open_chat: Open, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgelm.tui.transcript.prompt_progress.BEGIN_S", 0.0)
    monkeypatch.setattr("edgelm.client.endpoint.secrets.token_hex", lambda count: "7" * count)
    names = ("sequence", "prompt", "cached", "start", "computed", "drafted", "forced", "accepted", "new")
    chunk = {name: getattr(CHUNK, name) for name in names} | {"request_id": "req_" + "7" * 12, "tokens": []}
    step = {"step": 1, "at": 1.0, "ms": 20_000.0, "running": 1, "waiting": 0, "chunks": [chunk]}
    endpoint.events = [("step", step)]
    endpoint.first_token_s = 3600.0
    async with open_chat() as chat:
        await chat.ready()
        await chat.type("Hello")
        await chat.press("enter")
        await chat.sees("reading 25 % of 2,000 tokens, 1 min 0 s left")
        await chat.press("escape")
        await chat.answered()
