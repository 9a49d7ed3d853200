"""The user's own keys and themes: `[keys]` and `[themes]` of config.toml, from their check to the screen."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.color import Color

from edgelm.base.errors import UsageError
from edgelm.client.link import Link
from edgelm.tui.app import ChatApp
from edgelm.tui.commands.keymap import PREFIXES, parse_keys, rows_by_name
from edgelm.tui.commands.table import COMMANDS, KEY_GROUPS, HelpScreen
from edgelm.tui.dialogs.themes import ThemeScreen, parse_themes
from edgelm.tui.palette import MIN_CONTRAST, contrast
from edgelm.tui.workspace import ChatDefaults
from tests.tui.conftest import Driver
from tests.tui.fake_endpoint import FakeEndpoint

FILE = Path("/own/config.toml")
SEA = {"primary": "#2a9d8f", "background": "#06222b", "accent": "orange"}
PAPER = {"primary": "#8a3324", "background": "#fbf6ea", "dark": False}

OpenOwn = Callable[..., AbstractAsyncContextManager[Driver]]


@pytest.fixture
def open_own(endpoint: FakeEndpoint, tmp_path: Path, quick_pilot: None) -> OpenOwn:
    """Return a context manager that runs the chat with keys and themes of the user's own."""

    @asynccontextmanager
    async def run(
        keys: dict[str, Any] | None = None, themes: dict[str, Any] | None = None, size: tuple[int, int] = (100, 32)
    ) -> AsyncIterator[Driver]:
        (tmp_path / "front.json").write_text(json.dumps({"pid": os.getpid(), "address": endpoint.address}))
        link = Link(endpoint=None, api_key=None, runtime=tmp_path, log=tmp_path / "serve.log")
        app = ChatApp(
            tmp_path / "chats.db",
            link,
            ChatDefaults(),
            keymap=parse_keys(keys or {}, FILE),
            themes=parse_themes(themes or {}, FILE),
        )
        async with app.run_test(size=size, notifications=True) as pilot:
            yield Driver(app, pilot, endpoint)

    return run


# Keys


def test_each_row_and_command_has_a_name_of_its_own() -> None:
    rows = [key for title, keys in KEY_GROUPS if title in PREFIXES for key in keys if key.action]
    names = rows_by_name()
    assert {command.name for command in COMMANDS} <= set(names)
    assert len({key.action for key in rows}) == len(rows), "two rows have the same action: a key would change both"
    assert {key for _, key in names.values()} >= set(rows), "two rows have the same name: see ACTION_NAMES"
    for name in ("help", "palette", "sidebar", "stop", "message-copy", "inspector-pause", "list-delete", "theme"):
        assert name in names


def test_the_keys_of_the_tables_do_not_conflict() -> None:
    assert parse_keys({}, FILE).changed == {}


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        ("Ctrl+E", "ctrl+e"),
        ("alt + T", "alt+t"),
        ("F12", "f12"),
        (["f10", "ctrl+PgUp"], "f10,ctrl+pageup"),
        ("ctrl+/", "ctrl+slash"),
        ("Ctrl+Alt+Shift+X", "alt+ctrl+shift+x"),
        ("", "no_key"),
        ([], "no_key"),
    ],
)
def test_keys_are_read_as_people_write_them(value: object, keys: str) -> None:
    assert parse_keys({"theme": value}, FILE).textual == {"run('theme')": keys}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (3, "keys is no table"),
        ({"nothing": "f9"}, "there is no nothing; the names are help, palette"),
        ({"copy-message": "f10"}, "there is no copy-message; did you mean message-above"),
        ({"help": 3}, "help is 3; give a key such as"),
        ({"help": "ctrl+foo"}, "help is 'ctrl+foo', which is no key"),
        ({"help": "hyperspace+x"}, "which is no key"),
        ({"help": "x"}, "help is 'x', which is needed for writing"),
        ({"help": "?"}, "needed for writing"),
        ({"help": "shift+a"}, "needed for writing"),
        ({"help": "Enter"}, "needed for writing"),
        ({"help": "ctrl+j"}, "needed for writing"),
        ({"help": "f2"}, "f2 is the key of help and of title; give one of them another key"),
        ({"theme": "f2"}, "f2 is the key of title and of theme"),
        ({"message-copy": "e"}, "e is the key of message-edit and of message-copy"),
        ({"message-copy": "f1"}, "f1 is the key of help and of message-copy"),
    ],
)
def test_errors_of_keys_name_the_file_and_the_key(document: object, words: str) -> None:
    with pytest.raises(UsageError, match=r"/own/config\.toml") as caught:
        parse_keys(document, FILE)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_rows_may_change_places() -> None:
    changed = parse_keys({"title": "f3", "drafts": "f2", "message-copy": "e", "message-edit": "c"}, FILE).textual
    assert changed["run('title')"] == "f3"
    assert changed["act('edit')"] == "c"


async def test_own_keys_work_and_are_shown(open_own: OpenOwn) -> None:
    own = {
        "help": "f12",
        "theme": "alt+t",
        "title": "f3",
        "drafts": "f2",
        "palette": "ctrl+k",
        "quit": "",
        "new": "ctrl+q",
    }
    async with open_own(own | {"message-copy": ["Y", "?"]}, size=(100, 90)) as chat:
        await chat.ready()
        await chat.sees("F12 help", "F12 shows every key")
        await chat.press("f1")
        assert len(chat.app.screen_stack) == 1
        await chat.press("f12")
        await chat.until(lambda: isinstance(chat.app.screen, HelpScreen), "the help")
        await chat.sees("F12 ", "Alt+T ", "Ctrl+K ", "Y, ? ")
        await chat.press("f12")
        await chat.until(lambda: len(chat.app.screen_stack) == 1, "closed")
        await chat.press("ctrl+k")
        await chat.sees("/regenerate")
        await chat.press("escape", "alt+t")
        await chat.until(lambda: isinstance(chat.app.screen, ThemeScreen), "the themes")
        await chat.press("escape", "f2")
        await chat.hears("drafted words")
        await chat.ask("Explain quicksort")
        await chat.press("shift+tab")
        await chat.sees("Y copy")
        await chat.press("c")
        assert chat.app.clipboard == ""
        await chat.press("question_mark")
        await chat.until(lambda: "Quicksort" in chat.app.clipboard, "the copy")
        await chat.press("ctrl+q")
        await chat.until(lambda: chat.turns == [], "a new chat, and not the end")
        await chat.ask("/quit")


# Themes


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (3, "themes is no table"),
        ({"x": 3}, "themes.x is no table"),
        ({"x": {}}, '[themes."x"]: it has no primary colour'),
        ({"x": {"primary": "reddish"}}, "primary is 'reddish'; give \"#rrggbb\""),
        ({"x": {"primary": "ansi_red"}}, "primary is 'ansi_red'"),
        ({"x": {"primary": 3}}, "primary is 3"),
        ({"x": {"primary": "red", "dark": "yes"}}, "dark is 'yes'; give true or false"),
        ({"x": {"primary": "red", "border": "red"}}, "border sets nothing; a theme has primary"),
        ({"nord": {"primary": "red"}}, "this name cannot be used"),
        ({"dark": {"primary": "red"}}, "this name cannot be used"),
        ({"a\x1b": {"primary": "red"}}, "this name cannot be used"),
    ],
)
def test_errors_of_themes_name_the_file_and_the_field(document: object, words: str) -> None:
    with pytest.raises(UsageError, match=r"/own/config\.toml") as caught:
        parse_themes(document, FILE)
    assert words in str(caught.value)


async def test_a_theme_is_shown_before_it_is_chosen(open_own: OpenOwn) -> None:
    themes = {"sea": SEA, "paper": PAPER}
    async with open_own(themes=themes) as chat:
        await chat.ready()
        for end in ("escape", "enter"):
            chat.prompt.put("/theme")
            await chat.press("enter")
            await chat.until(lambda: isinstance(chat.app.screen, ThemeScreen), "the themes")
            assert chat.app.theme == "textual-dark"
            await chat.type("sea")
            await chat.until(lambda: chat.app.theme == "sea", "the highlighted theme")
            assert chat.screen.background_colors[1].hex == "#06222B"
            await chat.press(end)
            await chat.until(lambda: len(chat.app.screen_stack) == 1, "closed")
            assert chat.app.theme == {"escape": "textual-dark", "enter": "sea"}[end]
        await chat.ask("/theme paper")
        assert chat.app.theme == "paper"
    async with open_own(themes=themes) as chat:
        await chat.until(lambda: chat.app.theme == "paper", "the theme of the last run")
        muted = chat.app.theme_variables["text-muted"]
        assert contrast(Color.parse(muted), Color.parse(PAPER["background"])) >= MIN_CONTRAST
    async with open_own() as chat:
        await chat.hears("the theme paper is gone; /theme chooses another")
        assert chat.app.theme == "textual-dark"


async def test_the_mouse_previews_and_chooses_a_theme(open_own: OpenOwn) -> None:
    async with open_own(themes={"sea": SEA}) as chat:
        await chat.ready()
        chat.prompt.put("/theme")
        await chat.press("enter")
        await chat.sees("Enter keeps")
        for words, theme in (("shows", "textual-light"), ("↑,", "textual-dark")):
            row, line = next((i, line) for i, line in enumerate(chat.text.split("\n")) if "Enter keeps" in line)
            await chat.pilot.click(offset=(line.index(words), row))
            await chat.until(lambda theme=theme: chat.app.theme == theme, theme)
