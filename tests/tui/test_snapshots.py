"""Pictures of the chat, compared with those in `__snapshots__`; `pytest --snapshot-update` takes them anew."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from edgelm.chats.model import Chat, Message
from edgelm.chats.store import Store
from edgelm.client.endpoint import AnswerStats, stats_to_json
from edgelm.tui.app import ChatApp
from edgelm.tui.link import Link
from edgelm.tui.screen import ChatScreen, Wishes
from edgelm.tui.status import StatusLine
from tests.tui.fake_endpoint import ANSWER, FakeEndpoint

MARCH_2025 = 1_741_000_000.0
STATS = AnswerStats(
    prompt_tokens=38, completion_tokens=212, first_token_ms=214.0, tokens_per_second=41.3, drafted=96, accepted=71,
    context_used=250, context_size=4096, engine="llama", device="cpu",
)  # fmt: skip
OTHERS = (
    ("Sourdough for beginners", "How much water for 500 g of flour?", "About **350 g** of water: 70 % hydration."),
    ("Why is the sky blue?", "Why is the sky blue?", "Air scatters *short* waves more: Rayleigh scattering."),
    ("Regular expression for dates", "Match 2025-03-07", "```\n\\d{4}-\\d{2}-\\d{2}\n```"),
    ("Packing list for Norway", "What do I pack?", "Rain clothes. Water is everywhere."),
)


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Path]:
    """Return a runtime folder in which a front is found."""
    started, ended = threading.Event(), threading.Event()

    async def serve() -> None:
        async with FakeEndpoint().serve() as endpoint:
            document = {"pid": os.getpid(), "address": endpoint.address}
            (tmp_path / "front.json").write_text(json.dumps(document))
            started.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(30)
    yield tmp_path
    ended.set()
    thread.join()


def fill(path: Path) -> None:
    store = Store(path)
    for i, (title, question, answer) in enumerate((*OTHERS, ("Quicksort in Python", "Explain quicksort", ANSWER))):
        moment = MARCH_2025 + i * 86_400
        chat = Chat(title=title, created=moment, changed=moment)
        asked = Message(chat=chat.id, parent=None, role="user", text=question)
        first = Message(chat=chat.id, parent=asked.id, role="assistant", text="Sort it.", model="starter")
        answered = Message(
            chat=chat.id, parent=asked.id, role="assistant", text=answer, model="starter", stats=stats_to_json(STATS)
        )
        chat.leaf = answered.id
        store.put_chat(chat)
        for message in (asked, first, answered):
            store.put_message(message)
    store.close()


@pytest.fixture
def app(front: Path) -> ChatApp:
    link = Link(endpoint=None, api_key=None, runtime=front, log=front / "log")
    return ChatApp(front / "chats.db", link, Wishes())


def keys(*groups: str, theme: str = "textual-dark") -> Any:
    """Return what is done before the picture: keys, each group when the screen has come to rest."""

    async def run(pilot: Pilot[None]) -> None:
        screen = pilot.app.screen
        assert isinstance(screen, ChatScreen)
        while not screen.query(StatusLine):  # it is called before there is a screen
            await pilot.pause(0.02)
        await pilot.pause()
        pilot.app.theme = theme
        screen.prompt.cursor_blink = False
        while screen.status.status.activity != "ready" or screen.workers:
            await pilot.pause(0.02)
        for group in groups:
            await pilot.press(*group.split())
            while len(pilot.app.screen_stack) == 1 and screen.workers:
                await pilot.pause(0.02)
            await pilot.pause(0.2)

    return run


OPEN_QUICKSORT = "ctrl+f down enter"


def test_the_first_start(app: ChatApp, snap_compare: Any) -> None:
    assert snap_compare(app, terminal_size=(100, 30), run_before=keys())


def test_a_chat_with_code(app: ChatApp, front: Path, snap_compare: Any) -> None:
    fill(front / "chats.db")
    assert snap_compare(app, terminal_size=(110, 34), run_before=keys(OPEN_QUICKSORT))


def test_a_chat_in_a_light_theme(app: ChatApp, front: Path, snap_compare: Any) -> None:
    fill(front / "chats.db")
    assert snap_compare(app, terminal_size=(110, 34), run_before=keys(OPEN_QUICKSORT, theme="textual-light"))


def test_a_chat_in_16_colours(app: ChatApp, front: Path, snap_compare: Any) -> None:
    fill(front / "chats.db")
    assert snap_compare(app, terminal_size=(110, 34), run_before=keys(OPEN_QUICKSORT, theme="ansi-dark"))


def test_search(app: ChatApp, front: Path, snap_compare: Any) -> None:
    fill(front / "chats.db")
    assert snap_compare(app, terminal_size=(100, 30), run_before=keys("ctrl+f w a t e r"))


def test_small(app: ChatApp, front: Path, snap_compare: Any) -> None:
    fill(front / "chats.db")
    assert snap_compare(app, terminal_size=(60, 20), run_before=keys(OPEN_QUICKSORT))


def test_small_list_of_chats(app: ChatApp, front: Path, snap_compare: Any) -> None:
    fill(front / "chats.db")
    assert snap_compare(app, terminal_size=(60, 20), run_before=keys("ctrl+b"))


def test_commands(app: ChatApp, snap_compare: Any) -> None:
    assert snap_compare(app, terminal_size=(80, 24), run_before=keys("/ s down"))


def test_help(app: ChatApp, snap_compare: Any) -> None:
    assert snap_compare(app, terminal_size=(100, 50), run_before=keys("f1"))


def test_parameters(app: ChatApp, snap_compare: Any) -> None:
    assert snap_compare(app, terminal_size=(80, 24), run_before=keys("/ p a r a m s enter", "9 9 9 enter"))


def test_models(app: ChatApp, snap_compare: Any) -> None:
    assert snap_compare(app, terminal_size=(80, 24), run_before=keys("ctrl+o"))


def test_a_selected_message(app: ChatApp, front: Path, snap_compare: Any) -> None:
    fill(front / "chats.db")
    assert snap_compare(app, terminal_size=(80, 24), run_before=keys(OPEN_QUICKSORT, "shift+tab"))
