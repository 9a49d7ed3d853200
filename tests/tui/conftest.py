"""The chat without a terminal, and an endpoint for it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from edgelm.tui.app import ChatApp
from edgelm.tui.link import Link
from edgelm.tui.open_chat import Wishes
from edgelm.tui.screen import ChatScreen
from tests.tui.fake_endpoint import FakeEndpoint


class Driver:
    """A running chat, its keys and its picture."""

    def __init__(self, app: ChatApp, pilot: Pilot[None], endpoint: FakeEndpoint) -> None:
        self.app = app
        self.pilot = pilot
        self.endpoint = endpoint
        self.patience_s = 15.0

    @property
    def chat(self) -> ChatScreen:
        screen = self.app.screen_stack[0]
        assert isinstance(screen, ChatScreen)
        return screen

    @property
    def text(self) -> str:
        """Return the picture as text."""
        strips = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text.rstrip() for strip in strips)

    @property
    def said(self) -> list[tuple[str, str]]:
        """Return role and text of the branch on screen."""
        return [(message.role, message.text) for message in self.chat.session.tree.path()]

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def type(self, text: str) -> None:
        """Type a text; a newline breaks the line."""
        await self.pilot.press(*("ctrl+j" if each == "\n" else "space" if each == " " else each for each in text))

    async def until(self, condition: Callable[[], Any], what: str = "") -> None:
        """Wait for something to become true."""
        for _ in range(round(self.patience_s / 0.01)):
            if condition():
                await self.pilot.pause()
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{what or 'it'} does not come; on the screen:\n{self.text}")

    async def sees(self, *words: str) -> None:
        """Wait until these stand on the screen."""
        await self.until(lambda: all(word in self.text for word in words), " and ".join(words))

    async def hears(self, *words: str) -> None:
        """Wait until one of the short messages says these, wherever its lines are broken."""
        heard = self.app._notifications
        await self.until(
            lambda: any(all(each in note.message for each in words) for note in heard), " and ".join(words)
        )

    async def ready(self) -> None:
        await self.until(lambda: self.chat.status.status.activity == "ready", "ready")

    async def answered(self) -> None:
        """Wait for the end of the answer."""
        await self.until(lambda: self.chat.answer is None, "the end of the answer")

    async def ask(self, text: str) -> None:
        """Send a message and wait for its answer."""
        self.chat.prompt.put(text)
        await self.press("enter")
        await self.until(lambda: self.chat.prompt.text == "", "sending")
        await self.answered()


Open = Callable[..., Any]


@pytest.fixture
async def endpoint() -> AsyncIterator[FakeEndpoint]:
    async with FakeEndpoint().serve() as found:
        yield found


@pytest.fixture
def open_chat(endpoint: FakeEndpoint, tmp_path: Path) -> Open:
    """Return a context manager that runs the chat; the same file of chats each time in one test."""

    @asynccontextmanager
    async def run(
        size: tuple[int, int] = (100, 30),
        wishes: Wishes | None = None,
        address: str | None = None,
        pulling: Sequence[str] | None = None,  # the endpoint is a front of this machine, and this pulls
    ) -> AsyncIterator[Driver]:
        runtime, named = tmp_path / "run", address or endpoint.address
        if pulling is not None:
            runtime.mkdir(exist_ok=True)
            (runtime / "front.json").write_text(json.dumps({"pid": os.getpid(), "address": named}))
        link = Link(endpoint=None if pulling else named, api_key=None, runtime=runtime, log=tmp_path / "serve.log")
        app = ChatApp(tmp_path / "chats.db", link, wishes or Wishes(), pulling or ("false",))
        async with app.run_test(size=size, notifications=True) as pilot:
            yield Driver(app, pilot, endpoint)

    return run
