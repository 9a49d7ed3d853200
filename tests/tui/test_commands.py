"""Every command, by its name in the prompt, its key, or the palette."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from pathlib import Path

import pytest
from textual.app import ComposeResult
from textual.widgets import Input

from edgelm.base.errors import RequestError
from edgelm.tui.commands.table import (
    ALL_COMMANDS,
    COMMANDS,
    KEY_GROUPS,
    PLAIN_COMMANDS,
    Command,
    complete,
    find_command,
    parse_call,
)
from edgelm.tui.dialogs.basic import LineScreen
from edgelm.tui.dialogs.params import PARAMS, parse_params
from edgelm.tui.terminal_input import InputParser
from tests.tui.conftest import Open
from tests.tui.fake_endpoint import ANSWER

CODE = ANSWER.split("```python\n")[1].split("```")[0].rstrip("\n")


@pytest.mark.parametrize("command", ALL_COMMANDS, ids=lambda command: f"{command.name}-{command.face}")
def test_each_command_has_a_function(command: Command) -> None:
    assert inspect.iscoroutinefunction(command.function)
    assert parse_call(f"/{command.name} x") == (command.name, "x")


def test_each_face_has_one_command_of_a_name() -> None:
    for commands in (COMMANDS, PLAIN_COMMANDS):
        names = [command.name for command in commands]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("/new", ("new", "")),
        ("/system  Be brief.\nAnd kind. ", ("system", "Be brief.\nAnd kind.")),
        ("/etc/hosts is empty", None),
        ("//new", None),
        ("/ new", None),
        ("new", None),
        ("/tmp", ("tmp", "")),
    ],
)
def test_parsing_of_calls(text: str, call: tuple[str, str] | None) -> None:
    assert parse_call(text) == call


def test_beginnings_of_commands() -> None:
    assert find_command("q") is find_command("quit")
    assert find_command("s") is None  # search, system, shell, shorten or stats
    assert find_command("") is None
    assert [command.name for command in complete("/s")] == ["search", "system", "shell", "shorten", "stats"]
    assert complete("/s x") == []
    assert complete("s") == []


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("temperature=0", {"temperature": 0, "top_k": 3}),
        ("top-p=0.5 seed=7", {"top_p": 0.5, "seed": 7, "top_k": 3}),
        ("top_k=", {}),
        ("repeat_penalty=1.1 top_k=", {"repetition_penalty": 1.1}),
        ("repeat-penalty=", {"top_k": 3}),
    ],
)
def test_parameters(text: str, values: dict[str, float]) -> None:
    assert parse_params(text, {"top_k": 3}) == values


@pytest.mark.parametrize("text", ["temperature", "heat=1", "temperature=hot", "top_p=0", "seed=1.5", "max_tokens=0"])
def test_wrong_parameters(text: str) -> None:
    with pytest.raises(RequestError):
        parse_params(text, {})


def test_a_parameter_without_an_equals_sign_is_told_how() -> None:
    with pytest.raises(RequestError, match=r"temperature has no value; write temperature=0\.2"):
        parse_params("temperature 0.2", {})
    with pytest.raises(RequestError, match="write seed=VALUE"):
        parse_params("top_k=1 seed", {})


async def test_an_effort_that_does_not_exist(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("/think bogus")
        await chat.hears("there is no effort 'bogus'", "give auto, off, low, medium, high")


async def test_unknown_commands_are_not_sent(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.type("/nonsense")
        await chat.press("enter")
        await chat.sees("there is no command /nonsense")
        assert chat.prompt.text == "/nonsense"
        assert chat.endpoint.requests == []


async def test_two_slashes_send_one(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("//new is a command")
        assert chat.turns[0] == ("user", "/new is a command")


async def test_tab_completes_and_the_arrows_choose(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.type("/s")
        await chat.sees("/search [WORDS]", "/system [TEXT]")
        await chat.press("down", "tab")
        await chat.until(lambda: chat.prompt.text == "/system ")
        await chat.type("Be brief.")
        await chat.press("enter")
        await chat.until(lambda: chat.session.chat.system == "Be brief.")


async def test_enter_runs_the_chosen_command(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.type("/s")
        await chat.press("down", "enter")
        await chat.sees("System prompt")
        await chat.press("escape")
        await chat.type("/")
        await chat.sees("/search [WORDS]")
        await chat.press("down", "down", "down", "down", "down", "enter")
        await chat.sees("System prompt")
        assert chat.endpoint.requests == []


async def test_escape_closes_the_list_of_commands_first(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.type("/")
        await chat.sees("/new")
        await chat.press("escape")
        await chat.until(lambda: "/regenerate" not in chat.text)
        assert chat.prompt.text == "/"


async def test_the_palette_has_the_same_commands(open_chat: Open) -> None:
    async with open_chat((100, 130)) as chat:
        await chat.press("ctrl+p")
        await chat.sees(*(f"/{command.name}" for command in COMMANDS))
        await chat.type("expo")
        await chat.press("enter")
        await chat.until(lambda: len(chat.app.screen_stack) == 1)
        await chat.sees("there is nothing to export yet")


async def test_the_titles_of_a_narrow_help_page_are_on_one_line(open_chat: Open) -> None:
    async with open_chat(size=(60, 20)) as chat:
        await chat.press("f1")
        await chat.type("open")
        await chat.sees("In the list of chats")


async def test_help_shows_every_key_and_command(open_chat: Open) -> None:
    async with open_chat((100, 220)) as chat:
        await chat.press("f1")
        lines = [key.help for _, keys in KEY_GROUPS for key in keys] + [command.usage for command in COMMANDS]
        await chat.sees("Everywhere")
        shown = " ".join(re.sub("[│┃▎]", " ", chat.text).split())  # a long line is wrapped
        assert [line for line in lines if line not in shown] == []
        await chat.press("escape")
        await chat.sees("F1 shows every key")


async def test_system_and_sampling_belong_to_the_chat_and_are_saved(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("/system Be a pirate.")
        await chat.ask("/params temperature=0.3 top_k=5")
        await chat.ask("q")
        request = chat.endpoint.requests[0]
        assert (request["temperature"], request["top_k"]) == (0.3, 5)
        assert request["messages"][0] == {"role": "system", "content": "Be a pirate."}
        await chat.press("ctrl+n")
        await chat.until(lambda: chat.turns == [])
        assert chat.session.chat.system == ""
    async with open_chat() as chat:
        await chat.sees("q")
        await chat.press("ctrl+f", "down", "enter")
        await chat.until(lambda: len(chat.turns) == 2)
        await chat.ask("again")
        assert chat.endpoint.requests[-1]["temperature"] == 0.3
        assert chat.endpoint.requests[-1]["messages"][0]["content"] == "Be a pirate."


async def test_the_dialogs_of_system_and_sampling(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.type("/system")
        await chat.press("enter")
        await chat.sees("System prompt", "Ctrl+S saves")
        await chat.press(*"Be", "enter", *"brief", "ctrl+s")
        await chat.until(lambda: chat.session.chat.system == "Be\nbrief")
        await chat.type("/params")
        await chat.press("enter")
        await chat.sees("Sampling of this chat", *(param.name for param in PARAMS))
        await chat.type("5000")
        await chat.press("enter")
        await chat.sees("temperature is 5000; give 0 to 100")
        await chat.press("backspace", "backspace", "backspace", "backspace", "1", "down", "7", "enter")
        await chat.until(lambda: chat.session.chat.sampling == {"temperature": 1.0, "top_k": 7})


async def test_the_title(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("q")
        await chat.press("f2")
        await chat.sees("Title of the chat")
        await chat.press("ctrl+a", "ctrl+k")
        await chat.type("My title")
        await chat.press("enter")
        await chat.until(lambda: chat.text.count("My title") == 2)  # in the list and above the conversation
        await chat.press("f4")
        await chat.until(lambda: chat.screen.pane.editing is not None)
        await chat.ask("something else")
        assert chat.session.chat.title == "My title"


@pytest.mark.parametrize("state", ["new", "answered", "answering"])
async def test_a_title_is_typed_faster_than_its_dialog_opens(open_chat: Open, state: str) -> None:
    async with open_chat() as chat:
        await chat.ready()
        if state == "answered":
            await chat.ask("q")
        if state == "answering":
            chat.endpoint.stall_after = 1
            await chat.ask_only("q")
            await chat.until(lambda: chat.answer is not None and chat.answer.has_begun)
        for event in InputParser().feed("\x1bOQMy title\r"):  # in one read of the terminal
            chat.app.post_message(event)
        await chat.until(lambda: chat.session.chat.title == "My title", "renamed")
        assert chat.prompt.text == ""
        if state == "answering":
            chat.endpoint.stall_after = None
            await chat.press("escape")
            await chat.answered()
        await chat.ask("q")
        assert chat.session.chat.title == "My title"


async def test_a_title_is_typed_while_the_machine_stands_still(
    open_chat: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    now, compose, lost_s = loop.time, LineScreen.compose, [0.0]

    def slow(dialog: LineScreen) -> ComposeResult:
        lost_s.append(60.0)
        return compose(dialog)

    monkeypatch.setattr(loop, "time", lambda: now() + sum(lost_s))
    monkeypatch.setattr(LineScreen, "compose", slow)
    async with open_chat() as chat:
        await chat.ready()
        for event in InputParser().feed("\x1bOQMy title\r"):  # in one read of the terminal
            chat.app.post_message(event)
        await chat.until(lambda: chat.session.chat.title == "My title", "renamed")
        assert chat.prompt.text == ""


async def test_a_dialog_closes_once(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        for event in InputParser().feed("\x1bOQMy title\r\r"):  # in one read of the terminal
            chat.app.post_message(event)
        await chat.until(lambda: chat.session.chat.title == "My title", "renamed")
        await chat.ask("q")
        assert chat.turns[0] == ("user", "q")


@pytest.mark.parametrize(("typed", "field"), [("\x0cwhale\r", "#find Input"), ("\x06whale\r", "#search")])
async def test_words_to_find_are_typed_faster_than_their_field_opens(open_chat: Open, typed: str, field: str) -> None:
    async with open_chat() as chat:
        await chat.ask("q")
        for event in InputParser().feed(typed):  # in one read of the terminal
            chat.app.post_message(event)
        await chat.pilot.pause()
        assert (chat.screen.query_one(field, Input).value, chat.prompt.text) == ("whale", "")
        assert len(chat.endpoint.requests) == 1


async def test_copying(open_chat: Open, tmp_path: Path) -> None:
    async with open_chat() as chat:
        chat.endpoint.answers = [ANSWER, "```\none\n```\n\n```sh\ntwo\n```"]
        await chat.press("ctrl+y")
        await chat.sees("there is no answer to copy yet")
        await chat.ask("q1")
        await chat.press("ctrl+y")
        await chat.until(lambda: chat.app.clipboard == ANSWER)
        await chat.press("ctrl+g")
        await chat.until(lambda: chat.app.clipboard == CODE)
        await chat.ask("q2")
        await chat.press("ctrl+g")
        await chat.sees("Copy a block of code", "one", "two")
        await chat.press("down", "enter")
        await chat.until(lambda: chat.app.clipboard == "two")
        await chat.ask("/code 1")
        await chat.until(lambda: chat.app.clipboard == "one")
        await chat.ask(f"/code {tmp_path / 'two.sh'}")
        await chat.sees("Save a block of code", "one", "two")
        await chat.press("down", "enter")
        await chat.until((tmp_path / "two.sh").exists)
        assert (tmp_path / "two.sh").read_text() == "two\n"
        assert chat.app.clipboard == "one"
        await chat.press("shift+tab", "up", "up", "up", "c")
        await chat.until(lambda: chat.app.clipboard == "q1")


async def test_a_mouse_selection_is_copied_without_decoration(open_chat: Open) -> None:
    async with open_chat((60, 30)) as chat:
        chat.endpoint.answers = ["one two\n\n```python\ndef f():\n    return 1\n```\n\n" + "long " * 20 + "end"]
        await chat.ask("q")
        await chat.sees("return 1", "end")
        lines = chat.text.split("\n")
        top, bottom = (next(i for i, line in enumerate(lines) if word in line) for word in ("one two", "end"))
        await chat.pilot.mouse_down(offset=(1, top))
        await chat.pilot.hover(offset=(56, bottom))
        await chat.pilot.mouse_up(offset=(56, bottom))
        await chat.press("ctrl+c")
        await chat.until(lambda: "one two" in chat.app.clipboard)
        assert chat.app.clipboard.rstrip() == "one two\n\ndef f():\n    return 1\n\n" + "long " * 20 + "end"


async def test_export(open_chat: Open, tmp_path: Path) -> None:
    async with open_chat() as chat:
        await chat.ask("q")
        await chat.ask(f"/export md {tmp_path / 'chat.md'}")
        await chat.until((tmp_path / "chat.md").exists)
        assert (tmp_path / "chat.md").read_text(encoding="utf-8").endswith(f"## starter\n\n{ANSWER}")
        await chat.ask(f"/export {tmp_path / 'chat.json'}")
        await chat.until((tmp_path / "chat.json").exists)
        document = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
        assert document["messages"][1]["stats"]["engine"] == "llama"
        await chat.ask(f"/export md {tmp_path / 'chat.md'}")
        await chat.sees("exists", "Replace it")
        await chat.press("n")
        await chat.ask(f"/export md {tmp_path / 'no' / 'folder.md'}")
        await chat.sees("cannot be written")


async def test_the_theme_is_remembered(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("/theme light")
        await chat.until(lambda: chat.app.theme == "textual-light")
        await chat.ask("/theme mauve")
        await chat.sees("there is no theme mauve")
    async with open_chat() as chat:
        await chat.until(lambda: chat.app.theme == "textual-light")


async def test_control_c_stops_then_says_how_to_quit(open_chat: Open) -> None:
    async with open_chat() as chat:
        chat.endpoint.stall_after = 3
        await chat.type("q")
        await chat.press("enter")
        await chat.sees("Quicksort picks a")
        await chat.press("ctrl+c")
        await chat.answered()
        await chat.sees("· stopped")
        await chat.press("ctrl+c")
        await chat.sees("Ctrl+C once more quits")
        assert chat.app.is_running
        await chat.press("ctrl+c")
        await chat.until(lambda: not chat.app.is_running)


async def test_quit_ends_the_answer_and_saves(open_chat: Open) -> None:
    async with open_chat() as chat:
        chat.endpoint.stall_after = 3
        await chat.type("q")
        await chat.press("enter")
        await chat.sees("Quicksort picks a")
        await chat.press("ctrl+q")
        await chat.until(lambda: not chat.app.is_running)
    async with open_chat() as chat:
        await chat.ready()
        await chat.press("ctrl+f", "down", "enter")
        await chat.sees("Quicksort picks a", "· stopped")
