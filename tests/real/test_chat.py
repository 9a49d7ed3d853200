"""A conversation in the chat with a real model, over an endpoint of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgelm.client.link import Link
from edgelm.tui.app import ChatApp
from edgelm.tui.workspace import ChatDefaults
from tests.tui.conftest import Driver
from tests.tui.fake_endpoint import FakeEndpoint

TEXT = "The sea is wide and deep, and many animals live in it. " * 30  # a short conversation is not kept on the disk


@pytest.fixture(autouse=True)
def places(own: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in own.items():
        if name.startswith("EDGELM_"):
            monkeypatch.setenv(name, value)


@pytest.mark.timeout(600)
async def test_a_conversation(smollm2: Path, tmp_path: Path, own: dict[str, str]) -> None:
    """Regenerate, edit into a branch, stop, and the same chat again after a restart of everything."""
    sampling = {"max_tokens": 160, "temperature": 0.8, "seed": 1}

    def app() -> ChatApp:
        link = Link(
            endpoint=None, api_key=None, runtime=Path(own["EDGELM_RUNTIME_DIR"]), log=tmp_path / "serve.log",
            arguments=[str(smollm2)],
        )  # fmt: skip
        return ChatApp(tmp_path / "chats.db", link, ChatDefaults(str(smollm2), sampling=sampling))

    first = app()
    async with first.run_test(size=(100, 32), notifications=True) as pilot:
        chat = Driver(first, pilot, FakeEndpoint())
        await chat.ready()
        await chat.ask(f"{TEXT} Name three animals that live in the sea.")
        one = chat.turns[-1][1]
        assert len(one) > 10, chat.text
        await chat.press("ctrl+r")
        await chat.sees("2/2")
        await chat.answered()
        assert len(chat.turns) == 2
        await chat.ask("And three birds?")
        assert len(chat.turns) == 4
        await chat.ask_only("Write a very long story about a whale.")
        await chat.until(lambda: chat.turns[-1][0] == "assistant" and chat.turns[-1][1], "a beginning")
        await chat.press("escape")
        await chat.answered()
        assert chat.session.tree.path()[-1].state == "stopped"
        turns = chat.turns
    second = app()
    async with second.run_test(size=(100, 32), notifications=True) as pilot:
        chat = Driver(second, pilot, FakeEndpoint())
        await chat.ready()
        await chat.press("ctrl+f")
        await chat.type("whale")
        await chat.until(lambda: chat.screen.sidebar.typed and not chat.screen.workers, "the chats with that word")
        await chat.press("enter", "enter")
        await chat.until(lambda: chat.turns == turns, "the chat of before")
        chat.prompt.focus()
        await chat.ask("What was the question before the story?")
        assert len(chat.turns) == len(turns) + 2
        stats = json.loads(chat.session.tree.path()[-1].stats)
        assert stats["cached_tokens"] > stats["prompt_tokens"] / 2, stats
