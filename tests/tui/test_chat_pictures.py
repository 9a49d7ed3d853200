"""Pictures of the list of chats and of the statistics, compared with those in `__snapshots__`."""

from __future__ import annotations

import json
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from edgelm.chats.history import Chat, Message
from edgelm.chats.statistics import Statistics, summarize
from edgelm.chats.store import Store
from edgelm.tui.app import ChatApp
from edgelm.tui.dialogs.statistics import StatsScreen
from tests.tui.test_snapshots import FILL_MS, MARCH_2025, OTHERS, app, front, keys, no_guide, settle

__all__ = ["app", "front", "no_guide"]  # fixtures

TODAY = date(2025, 3, 14)
MODELS = ("qwen3:4b", "gemma3:1b", "/models/llama-3.2-1b-instruct-q8_0.gguf")


def fill(path: Path) -> None:
    """Save chats: one pinned, some with tags, two in the archive, one deleted."""
    fields: tuple[dict[str, Any], ...] = (
        {"pinned": True, "tags": ("home", "recipes")}, {}, {"tags": ("code",)}, {"archived": True},
        {"archived": True, "tags": ("work",)}, {"deleted": MARCH_2025 * 2}, {"title": "Leaves in autumn"},
    )  # fmt: skip
    store = Store(path, busy_ms=FILL_MS)
    for i, values in enumerate(fields):
        title, question, _ = OTHERS[i % len(OTHERS)]
        moment = MARCH_2025 - i * 9 * 86_400
        chat = Chat(**{"title": title, "created": moment, "changed": moment, **values})
        message = Message(chat=chat.id, parent=None, role="user", text=question)
        chat.leaf = message.id
        store.put_chat(chat)
        store.put_message(message)
    store.close()


def statistics() -> Statistics:
    """Return the statistics of 40 days."""
    rows = []
    for i in range(80):
        moment = datetime.combine(TODAY - timedelta(days=i * i % 40), time(12)).timestamp()
        values = {
            "prompt_tokens": 300 + 37 * i % 900, "cached_tokens": 170 * i % 600, "completion_tokens": 90 + 53 * i % 400,
            "first_token_ms": 300 + 7.0 * i, "tokens_per_second": 20 + i % 13, "drafted": 60, "accepted": 40,
        }  # fmt: skip
        rows.append((MODELS[i % 3], moment, json.dumps(values)))
    return summarize(rows, TODAY)


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light"])
def test_the_list_with_pins_tags_and_archive(app: ChatApp, front: Path, snap_compare: Any, theme: str) -> None:
    fill(front / "chats.db")
    pressed = keys("ctrl+f down", "end enter", "up up", theme=theme)
    assert snap_compare(app, terminal_size=(110, 26), run_before=pressed)


def test_the_list_in_a_narrow_terminal(app: ChatApp, front: Path, snap_compare: Any) -> None:
    fill(front / "chats.db")
    assert snap_compare(app, terminal_size=(60, 20), run_before=keys("ctrl+b", "down delete"))


@pytest.mark.parametrize(
    ("theme", "size", "key"),
    [("textual-dark", (110, 36), ""), ("textual-light", (110, 36), "m"), ("ansi-dark", (110, 36), ""),
     ("textual-dark", (60, 20), "")],
    ids=["dark", "light, by model", "16 colours", "small"],
)  # fmt: skip
def test_the_statistics(app: ChatApp, snap_compare: Any, theme: str, size: tuple[int, int], key: str) -> None:
    async def show(pilot: Pilot[None]) -> None:
        await keys(theme=theme)(pilot)
        await pilot.app.push_screen(StatsScreen(statistics(), 40))
        await pilot.press(*filter(None, [key]))
        await settle(pilot)

    assert snap_compare(app, terminal_size=size, run_before=show)
