"""Pictures of calls of tools: the questions, the list of servers, and an answer with calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from edgelm.chats.history import Chat, Message
from edgelm.chats.store import Store
from edgelm.chats.tool_calls import ToolCall
from edgelm.chats.tools.consents import Consents
from edgelm.chats.tools.listing import Listing, Tool
from edgelm.chats.tools.settings import ToolServer
from edgelm.chats.tools.toolbox import Toolbox
from edgelm.client.answer_stream import stats_to_json
from edgelm.client.tool_runner import CallQuestion
from edgelm.tui.app import ChatApp
from edgelm.tui.dialogs.tools import CallScreen, ServerEntry, ToolsScreen
from tests.tui import test_snapshots
from tests.tui.test_snapshots import MARCH_2025, OPEN_QUICKSORT, STATS, keys

app, front, no_guide = test_snapshots.app, test_snapshots.front, test_snapshots.no_guide


@pytest.fixture
def toolbox(tmp_path: Path) -> Toolbox:
    servers = {
        "git": ToolServer(name="git", command="mcp-server-git", args=("--repository", "/srv/notes")),
        "time": ToolServer(name="time", url="https://time.example/mcp"),
    }
    return Toolbox(Consents(tmp_path / "tool_consents.json"), servers)


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light"])
def test_the_question_before_a_call(app: ChatApp, toolbox: Toolbox, theme: str, snap_compare: Any) -> None:
    claims = "it only reads"
    tool = Tool("git", "git_log", "Shows the commit logs", {}, claims, "git/git_log:1")
    arguments = json.dumps({"repo_path": "/srv/notes", "max_count": 3, "author": "a\u202eb"})

    async def run(pilot: Pilot[None]) -> None:
        await keys(theme=theme)(pilot)
        question = CallQuestion("The frobnicator", toolbox.servers["git"], tool, arguments, changed=True)
        pilot.app.push_screen(CallScreen(question))
        await pilot.pause(0.2)

    assert snap_compare(app, terminal_size=(80, 24), run_before=run)


def fill_calls(path: Path) -> None:
    """Write a chat with an answer that has made calls, in every state."""
    store = Store(path)
    chat = Chat(title="The last release", created=MARCH_2025, changed=MARCH_2025, tools=("git",))
    store.put_chat(chat)
    user = Message(chat=chat.id, parent=None, role="user", text="What is new since the last release?")
    first, second = "I look at the *log*.", "It needs the tags, too."
    made = (
        ToolCall(
            id="1", server="git", tool="git_log", arguments='{"repo_path": "/srv/notes", "max_count": 3}',
            at=len(first), state="done", result="Commit: 1f0c\nMessage: Faster start", took_s=0.31,
        ),
        ToolCall(
            id="2", server="git", tool="git_show", arguments='{"revision": "v9"}', at=len(first), state="failed",
            result="fatal: bad object v9", took_s=0.1,
        ),
        ToolCall(id="3", server="git", tool="git_tag", arguments="{}", at=len(first + second), state="refused"),
        ToolCall(id="4", server="git", tool="git_diff", arguments="{}", at=len(first + second), state="running"),
        ToolCall(id="5", server="git", tool="git_diff", arguments="{}", at=len(first + second), state="asked"),
    )  # fmt: skip
    answer = Message(
        chat=chat.id, parent=user.id, role="assistant", model="starter", calls=made, stats=stats_to_json(STATS),
        text=first + second + "The start is **faster**.",
    )  # fmt: skip
    store.put_message(user)
    store.put_message(answer)
    chat.leaf = answer.id
    store.put_chat(chat)
    store.close()


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light"])
@pytest.mark.parametrize("pressed", [(), ("shift+tab enter",)], ids=["folded", "unfolded"])
def test_an_answer_with_calls(
    app: ChatApp, front: Path, pressed: tuple[str, ...], theme: str, snap_compare: Any
) -> None:
    fill_calls(front / "chats.db")
    run = keys(OPEN_QUICKSORT, *pressed, theme=theme)
    assert snap_compare(app, terminal_size=(80, 34 if pressed else 24), run_before=run)


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light"])
def test_the_servers_of_a_chat(app: ChatApp, toolbox: Toolbox, theme: str, snap_compare: Any) -> None:
    tools = tuple(
        Tool("git", name, words, {}, "", "")
        for name, words in (("git_status", "Shows the working tree status"), ("git_log", "Shows the commit logs"))
    )
    entries = (
        ServerEntry(
            toolbox.servers["git"], True, Listing(tools, ("huge is left out: its schema is too large",)), "", 1
        ),
        ServerEntry(toolbox.servers["time"], False, Listing(), "time cannot be reached: connection refused", 0),
    )

    async def run(pilot: Pilot[None]) -> None:
        await keys(theme=theme)(pilot)
        pilot.app.push_screen(ToolsScreen(entries))
        await pilot.pause(0.2)

    assert snap_compare(app, terminal_size=(80, 24), run_before=run)
