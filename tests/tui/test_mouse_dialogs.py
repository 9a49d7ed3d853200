"""Every dialog is used and cancelled with the mouse, in the smallest terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from textual.widgets import Input, TextArea

from edgelm.tui.dialogs.basic import LineScreen, PickScreen, TextScreen
from edgelm.tui.dialogs.params import ParamsScreen
from edgelm.tui.dialogs.picker import PickerScreen
from edgelm.tui.prompt.shortening import ShortenScreen
from tests.tui.conftest import Driver, Open
from tests.tui.test_mouse import click, opens


async def ask(chat: Driver, command: str, screen: type[Any]) -> None:
    """Open a dialog with a command."""
    chat.prompt.put(command)
    await click(chat, "Enter run")
    await opens(chat, screen)


async def closed(chat: Driver) -> None:
    await chat.until(lambda: len(chat.app.screen_stack) == 1, "the dialog is closed")


async def test_dialogs_are_used_with_the_mouse(open_chat: Open) -> None:
    async with open_chat(size=(60, 20)) as chat:
        await chat.ready()
        await chat.ask("Explain quicksort")

        await ask(chat, "/title", LineScreen)
        chat.app.screen.query_one(Input).value = "Renamed"
        await click(chat, "Enter saves")
        await chat.until(lambda: chat.session.chat.title == "Renamed", "the title")

        await ask(chat, "/system", TextScreen)
        chat.app.screen.query_one(TextArea).text = "Be brief."
        await click(chat, "Ctrl+S saves")
        await chat.until(lambda: chat.session.chat.system == "Be brief.", "the system prompt")

        await ask(chat, "/params", ParamsScreen)
        await chat.sees("0 always takes the likeliest token")
        chat.app.screen.query_one("#seed", Input).value = "7"
        await click(chat, "Enter saves")
        await chat.until(lambda: chat.session.chat.sampling == {"seed": 7}, "the parameters")

        await ask(chat, "/theme", PickScreen)
        await click(chat, "nord")
        await chat.until(lambda: chat.app.theme == "nord", "the theme")

        await ask(chat, "/theme", PickScreen)
        await click(chat, "Enter keeps")
        await closed(chat)
        assert chat.app.theme == "nord"

        await chat.ask("And now?")
        await ask(chat, "/shorten", ShortenScreen)
        await click(chat, "Explain quicksort")
        await chat.sees("All messages are sent.")  # a click shows what it would do
        await click(chat, "And now?")
        await chat.sees("2 messages are left out")
        await click(chat, "Enter goes on")
        await closed(chat)
        assert chat.session.tree.path()[-1].sent_from is not None

        await ask(chat, "/model", PickerScreen)
        await click(chat, "qwen3-4b-q4_k_m")
        await chat.until(lambda: chat.screen.workspace.model == "qwen3-4b-q4_k_m.gguf", "the model")


@pytest.mark.parametrize(
    ("command", "screen"),
    [("/title", LineScreen), ("/system", TextScreen), ("/params", ParamsScreen), ("/theme", PickScreen),
     ("/model", PickerScreen), ("/shorten", ShortenScreen)],
)  # fmt: skip
async def test_dialogs_are_cancelled_with_the_mouse(open_chat: Open, command: str, screen: type[Any]) -> None:
    async with open_chat(size=(60, 20)) as chat:
        await chat.ready()
        await chat.ask("Explain quicksort")
        await chat.ask("And now?")
        before = replace(chat.session.chat)
        await ask(chat, command, screen)
        await click(chat, "Esc cancels")
        await closed(chat)
        assert chat.session.chat == before
