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
from textual._context import active_app
from textual.pilot import Pilot

from edgelm.client.link import Link
from edgelm.client.session import Session
from edgelm.tui.answers import Answer
from edgelm.tui.app import ChatApp
from edgelm.tui.prompt.box import Prompt
from edgelm.tui.screen import ChatScreen
from edgelm.tui.transcript.widget import Transcript
from edgelm.tui.workspace import ChatDefaults
from tests.tui.fake_endpoint import FakeEndpoint

SHORT_S = 0.01
MANY_TURNS = 10_000  # of an event loop


class Driver:
    """A running chat: sends keys to it and reads its screen."""

    def __init__(self, app: ChatApp, pilot: Pilot[None], endpoint: FakeEndpoint) -> None:
        self.app = app
        self.pilot = pilot
        self.endpoint = endpoint
        self.patience_s = 60.0

    @property
    def screen(self) -> ChatScreen:
        screen = self.app.screen_stack[0]
        assert isinstance(screen, ChatScreen)
        return screen

    @property
    def prompt(self) -> Prompt:
        return self.screen.pane.prompt

    @property
    def transcript(self) -> Transcript:
        return self.screen.pane.transcript

    @property
    def session(self) -> Session:
        return self.screen.workspace.session

    @property
    def answer(self) -> Answer | None:
        return self.screen.workspace.answer

    @property
    def text(self) -> str:
        """Return the screen as text."""
        strips = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text.rstrip() for strip in strips)

    @property
    def turns(self) -> list[tuple[str, str]]:
        """Return role and text of the messages of the branch on screen."""
        return [(message.role, message.text) for message in self.session.tree.path()]

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def type(self, text: str) -> None:
        """Type a text; a newline breaks the line."""
        names = {"\n": "ctrl+j", " ": "space"}
        await self.pilot.press(*(names.get(character, character) for character in text))

    async def until(self, condition: Callable[[], Any], description: str = "") -> None:
        """Wait until a condition holds."""
        for _ in range(round(self.patience_s / 0.01)):
            if condition():
                await self.pilot.pause()
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"timeout: {description or 'the condition does not hold'}; on the screen:\n{self.text}")

    async def sees(self, *words: str) -> None:
        """Wait until the screen shows all of these."""
        await self.until(lambda: all(word in self.text for word in words), " and ".join(words))

    async def hears(self, *words: str) -> None:
        """Wait until one notification contains all of these, wherever its lines are broken."""
        notifications = self.app._notifications
        await self.until(
            lambda: any(all(word in note.message for word in words) for note in notifications), " and ".join(words)
        )

    async def ready(self) -> None:
        await self.until(lambda: self.screen.status.status.activity == "ready", "ready")

    async def answered(self) -> None:
        """Wait until the answer has ended and its last frame is drawn."""
        await self.until(lambda: self.answer is None and not self.transcript._has_frame, "the end of the answer")

    async def ask(self, text: str) -> None:
        """Send a message and wait for its answer."""
        await self.ask_only(text)
        await self.answered()

    async def ask_only(self, text: str) -> None:
        """Send a message."""
        self.prompt.put(text)
        await self.press("enter")
        await self.until(lambda: self.prompt.text == "", "sending")


async def settled(min_sleep: float = 0.0, max_sleep: float = 0.0) -> None:
    """Return when the event loop has nothing to do and the screen shows what it should.

    In place of Textual's own wait until the process uses little processor time, which is long and proves nothing.
    """
    loop: Any = asyncio.get_running_loop()
    for pause_s in (min_sleep, SHORT_S, SHORT_S):  # threads and sockets answer meanwhile
        await asyncio.sleep(pause_s)
        for _ in range(MANY_TURNS):
            if not loop._ready:
                break
            await asyncio.sleep(0)
        app = active_app.get(None)
        if app is not None and app._running and app._screen_stack:
            app.screen._on_timer_update()  # as at the next tick


@pytest.fixture
def quick_pilot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pilot go on as soon as a key is handled. Pictures wait longer, by Textual's own rule."""
    for module in ("textual.app", "textual.pilot"):
        monkeypatch.setattr(f"{module}.wait_for_idle", settled)


Open = Callable[..., Any]


@pytest.fixture
async def endpoint() -> AsyncIterator[FakeEndpoint]:
    async with FakeEndpoint().serve() as fake:
        yield fake


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let endpoints be as those of another machine."""
    monkeypatch.setattr("edgelm.client.link.is_loopback", lambda _: False)


@pytest.fixture
def open_chat(endpoint: FakeEndpoint, tmp_path: Path, quick_pilot: None) -> Open:
    """Return a context manager that runs the chat; all its calls in one test use the same file of chats."""

    @asynccontextmanager
    async def run(
        size: tuple[int, int] = (100, 32),
        defaults: ChatDefaults | None = None,
        address: str | None = None,
        pulling: Sequence[str] | None = None,  # the command of the pull worker; the endpoint is a local front
    ) -> AsyncIterator[Driver]:
        runtime = tmp_path / "run"
        address = address or endpoint.address
        if pulling is not None:
            runtime.mkdir(exist_ok=True)
            (runtime / "front.json").write_text(json.dumps({"pid": os.getpid(), "address": address}))
        link = Link(endpoint=None if pulling else address, api_key=None, runtime=runtime, log=tmp_path / "serve.log")
        app = ChatApp(tmp_path / "chats.db", link, defaults or ChatDefaults(), pulling or ("false",))
        async with app.run_test(size=size, notifications=True) as pilot:
            yield Driver(app, pilot, endpoint)

    return run
