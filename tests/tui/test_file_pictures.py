"""Pictures of the list of files and of the files above the prompt, compared with those in `__snapshots__`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from edgelm.chats.attachments import Attachment
from edgelm.chats.history import Chat, Message
from edgelm.chats.store import Store
from edgelm.tui.app import ChatApp
from edgelm.tui.screen import ChatScreen
from tests.tui.test_snapshots import FILL_MS, MARCH_2025, app, front, keys, no_guide, settle, until_text

__all__ = ["app", "front", "no_guide"]  # fixtures
SMALL = (60, 20)
LOOKS = pytest.mark.parametrize(
    ("theme", "size"), [("textual-dark", (100, 24)), ("textual-light", (100, 24)), ("ansi-dark", SMALL)]
)
CODE = "def add(a: int, b: int) -> int:\n    return a + b\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    for name in ("src/adder.py", "src/reader.py", "docs/reading.md", "README.md", "build/reader.o"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(CODE)
    (folder / ".gitignore").write_text("build/\n")
    (folder / "long.txt").write_text("word " * 6000)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.usefixtures("folder")
@LOOKS
def test_the_list_of_files(app: ChatApp, theme: str, size: tuple[int, int], snap_compare: Any) -> None:
    async def run(pilot: Pilot[None]) -> None:
        await keys("a space @ r e a d down", theme=theme)(pilot)
        await until_text(pilot, "src/reader.py")
        await settle(pilot)

    assert snap_compare(app, terminal_size=size, run_before=run)


@pytest.mark.usefixtures("folder")
@LOOKS
def test_attached(app: ChatApp, theme: str, size: tuple[int, int], snap_compare: Any) -> None:
    long = size == SMALL

    async def run(pilot: Pilot[None]) -> None:
        await keys("E x p l a i n", theme=theme)(pilot)
        screen = pilot.app.screen
        assert isinstance(screen, ChatScreen)
        for name in ("src/adder.py", "src", *(("long.txt",) if long else ())):
            screen.files.add_path(str(Path.cwd() / name))
        screen.files.add_text("1\n" * 50)
        await until_text(pilot, "56 tokens", "too long" if long else "left")
        await pilot.press(*(() if long else ("shift+tab",)))
        await settle(pilot)

    assert snap_compare(app, terminal_size=size, run_before=run)


def fill(path: Path, file: Path) -> None:
    """Write a chat with attached files, one of which has changed since."""
    store = Store(path, busy_ms=FILL_MS)
    chat = Chat(title="Adding", created=MARCH_2025, changed=MARCH_2025)
    store.put_chat(chat)
    code = Attachment(kind="text", name="src/adder.py", path=str(file), text=CODE, digest="0", size=9, tokens=31)
    picture = Attachment(kind="image", name="plot.png", data=b"\x89PNG", media_type="image/png", size=83_000)
    user = Message(chat=chat.id, parent=None, role="user", text="Does it add?", attachments=(code, picture))
    answer = Message(chat=chat.id, parent=user.id, role="assistant", text="It does.", model="starter")
    store.put_message(user)
    store.put_message(answer)
    chat.leaf = answer.id
    store.put_chat(chat)
    store.close()


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light"])
def test_a_changed_file(app: ChatApp, front: Path, folder: Path, theme: str, snap_compare: Any) -> None:
    fill(front / "chats.db", folder / "src" / "adder.py")

    async def run(pilot: Pilot[None]) -> None:
        await keys("ctrl+f down enter", theme=theme)(pilot)
        await until_text(pilot, "has changed")
        await pilot.press("shift+tab", "shift+tab", "up", "enter")
        await until_text(pilot, "return a + b")
        await settle(pilot)

    assert snap_compare(app, terminal_size=(80, 24), run_before=run)
