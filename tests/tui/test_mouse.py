"""Everything that a key does can be done with the mouse: one way for each key of the tables, clicked here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from textual.command import CommandPalette
from textual.containers import VerticalScroll
from textual.events import MouseScrollDown, MouseScrollLeft, MouseScrollRight, MouseScrollUp
from textual.widgets import Input

from edgelm.base.errors import RequestError
from edgelm.client.watching import Chunk, StepSeen
from edgelm.tui.commands.chats import archive
from edgelm.tui.commands.table import KEY_GROUPS, HelpScreen
from edgelm.tui.dialogs.basic import LineScreen, PickScreen
from edgelm.tui.dialogs.compare import CompareScreen
from edgelm.tui.dialogs.explore import ExploreScreen
from edgelm.tui.dialogs.params import ParamsScreen
from edgelm.tui.dialogs.picker import PickerScreen
from edgelm.tui.dialogs.tags import TagScreen
from edgelm.tui.inspector.view import Inspector
from edgelm.tui.prompt.shortening import ShortenScreen
from tests.tui.conftest import Driver, Open
from tests.tui.fake_endpoint import ANSWER, FakeEndpoint

Way = Callable[[Driver], Awaitable[None]]
WAYS: dict[tuple[str, str], Way] = {}
CODE = ANSWER.partition("```python\n")[2].partition("\n```")[0]


def way(group: str, keys: str) -> Callable[[Way], Way]:
    """Register the mouse's way to do what a key does."""

    def register(function: Way) -> Way:
        WAYS[(group, keys)] = function
        return function

    return register


async def click(chat: Driver, words: str, row: int | None = None) -> None:
    """Click on words of the screen: the lowest ones if they are there twice."""

    def rows() -> list[int]:
        return [i for i, line in enumerate(chat.text.split("\n")) if words in line and row in (None, i)]

    picture = ""
    while picture != chat.text or not rows():  # a list scrolls, other hints come and go before it
        await chat.until(rows, words)
        picture = chat.text
        await chat.pilot.pause(0.05)
    place = max(rows())
    column = chat.text.split("\n")[place].rindex(words)
    await chat.pilot.click(offset=(column + len(words) // 2, place))
    await chat.pilot.pause()


async def opens(chat: Driver, screen: type[Any]) -> None:
    await chat.until(lambda: isinstance(chat.app.screen, screen), screen.__name__)


async def gone(chat: Driver, words: str) -> None:
    await chat.until(lambda: words not in chat.text, f"{words} is gone")


async def use_help(chat: Driver, words: str) -> None:
    """Click a line of the help page."""
    await click(chat, "F1 help")
    await opens(chat, HelpScreen)
    await chat.sees("Keys and commands")
    page = chat.app.screen.query_one(VerticalScroll)
    while words not in chat.text and page.scroll_y < page.max_scroll_y:
        await chat.pilot._post_mouse_events([MouseScrollDown] * 3, page, button=0)
        await chat.pilot.pause(0.05)
    await click(chat, words)
    await chat.until(lambda: not isinstance(chat.app.screen, HelpScreen), "the help is closed")


async def roll(chat: Driver, event: type[MouseScrollUp | MouseScrollDown]) -> None:
    """Turn the wheel over the conversation until it does not scroll any more."""
    transcript = chat.transcript
    end = 0 if event is MouseScrollUp else transcript.max_scroll_y
    while transcript.scroll_y != end:
        await chat.pilot._post_mouse_events([event] * 10, transcript, button=0)
        await chat.pilot.pause()


async def copied(chat: Driver, text: str) -> None:
    await chat.until(lambda: chat.app.clipboard == text, f"{text[:20]} on the clipboard")


async def test_a_program_of_the_desktop_copies_too(open_chat: Open) -> None:
    texts: list[str] = []

    def copy(text: str) -> None:
        texts.append(text)
        raise RequestError("nothing here copies")

    async with open_chat() as chat:
        await chat.ask("q")
        chat.app._copy = copy
        await chat.press("ctrl+y")
        await chat.until(lambda: texts == [ANSWER], "the answer copied")
        chat.prompt.put("word")
        chat.prompt.select_all()
        await chat.press("ctrl+c")
        await chat.until(lambda: texts[-1] == "word", "a selection copied")
        chat.app.copy_to_clipboard("one")
        chat.app.copy_to_clipboard("two")
        await chat.until(lambda: texts[-2:] == ["two", "two"], "the last one stays")
        assert not [note for note in chat.app._notifications if note.severity == "error"]


# Everywhere


@way("Everywhere", "f1")
async def show_help(chat: Driver) -> None:
    await click(chat, "F1 help")
    await opens(chat, HelpScreen)
    await click(chat, "Esc closes")
    await chat.until(lambda: len(chat.app.screen_stack) == 1, "closed")


@way("Everywhere", "ctrl+p")
async def find_command(chat: Driver) -> None:
    await use_help(chat, "Find a command by name")
    await opens(chat, CommandPalette)


@way("Everywhere", "ctrl+n")
async def new_chat(chat: Driver) -> None:
    await click(chat, "+ new")
    await chat.until(lambda: chat.turns == [], "a new chat")


@way("Everywhere", "ctrl+f")
async def search(chat: Driver) -> None:
    await click(chat, "Search  Ctrl+F")
    assert isinstance(chat.app.focused, Input)


@way("Everywhere", "ctrl+l")
async def find(chat: Driver) -> None:
    await use_help(chat, "Find words in this chat")
    await chat.sees("words in this chat")
    await click(chat, "Esc close")
    await gone(chat, "words in this chat")


@way("Everywhere", "ctrl+b")
async def toggle_sidebar(chat: Driver) -> None:
    for shown in (False, True):
        await click(chat, "≡")
        assert chat.screen.sidebar.display is shown


@way("Everywhere", "escape")
async def stop(chat: Driver) -> None:
    chat.endpoint.stall_after = 3
    chat.prompt.put("Stop me")
    await click(chat, "Enter send")
    await chat.sees("Quicksort picks")
    await click(chat, "Esc stop")
    await chat.answered()
    assert chat.session.tree.path()[-1].state == "stopped"
    chat.endpoint.stall_after = None


@way("Everywhere", "ctrl+r")
async def regenerate(chat: Driver) -> None:
    await use_help(chat, "Answer again; the old answer is kept")
    await chat.sees("◂ 2/2 ▸")
    await chat.answered()


@way("Everywhere", "f4")
async def edit(chat: Driver) -> None:
    await use_help(chat, "Edit your last message; the old one is kept")
    await chat.until(lambda: chat.screen.pane.editing is not None, "editing")
    await click(chat, "Esc leave")
    assert chat.screen.pane.editing is None


@way("Everywhere", "ctrl+y")
async def copy(chat: Driver) -> None:
    await use_help(chat, "Copy the last answer")
    await copied(chat, ANSWER)


@way("Everywhere", "ctrl+g")
async def copy_code(chat: Driver) -> None:
    await use_help(chat, "Copy a block of code")
    await copied(chat, CODE)


@way("Everywhere", "ctrl+o")
async def choose_model(chat: Driver) -> None:
    await click(chat, "starter", row=chat.app.size.height - 1)
    await opens(chat, PickerScreen)


@way("Everywhere", "ctrl+t")
async def unfold_all(chat: Driver) -> None:
    chat.endpoint.reasoning = "Let me think."
    await chat.ask("Think")
    chat.endpoint.reasoning = ""
    await chat.sees("▸ Thought")
    await use_help(chat, "Show or hide the model's reasoning")
    await chat.sees("▾ Thought")


@way("Everywhere", "f2")
async def rename(chat: Driver) -> None:
    await click(chat, chat.session.chat.title, row=0)
    await opens(chat, LineScreen)


@way("Everywhere", "ctrl+z")
async def undo_everywhere(chat: Driver) -> None:
    await delete_chat(chat)
    await use_help(chat, "In an empty prompt: bring back")
    await chat.until(lambda: chat.turns != [], "it is back")


@way("Everywhere", "f3")
async def tint_drafts(chat: Driver) -> None:
    await use_help(chat, "Tint the drafted words in answers of this run")
    await chat.until(lambda: chat.screen.view.shows_drafts, "drafts")


@way("Everywhere", "f5")
async def shorten(chat: Driver) -> None:
    await click(chat, " % of the context")
    await opens(chat, ShortenScreen)


@way("Everywhere", "f6")
async def show_inspector(chat: Driver) -> None:
    panel = chat.screen.inspector
    await use_help(chat, "Show the steps of the engine")
    await chat.until(lambda: panel.is_open, "open")
    await click(chat, "Inspector: F6")
    await chat.until(lambda: panel.has_keys, "it has the keys")
    await click(chat, "Inspector: F6")
    await chat.until(lambda: not panel.is_open, "closed")


@way("Everywhere", "f7")
async def explore(chat: Driver) -> None:
    await use_help(chat, "See what else the model could have said")
    await opens(chat, ExploreScreen)
    await chat.sees("of 95", "likely")
    await click(chat, "Esc closes")
    await chat.until(lambda: len(chat.app.screen_stack) == 1, "closed")


@way("Everywhere", "f8")
async def compare(chat: Driver) -> None:
    await use_help(chat, "Answer again with another model, side by side")
    await opens(chat, PickScreen)
    await click(chat, "qwen3-4b")
    await opens(chat, CompareScreen)
    await chat.answered()
    await click(chat, "Enter keeps it")
    await chat.until(lambda: len(chat.app.screen_stack) == 1, "closed")


@way("Everywhere", "f9")
async def open_editor(chat: Driver) -> None:
    await use_help(chat, "Write the message in your editor")
    await chat.hears("editor")  # here it cannot open


@way("Everywhere", "ctrl+c")
async def copy_selection(chat: Driver) -> None:
    await chat.sees("Quicksort picks")
    lines = chat.text.split("\n")
    row = max(i for i, line in enumerate(lines) if "Quicksort picks" in line)
    column = lines[row].index("Quicksort")
    await chat.pilot.mouse_down(offset=(column, row))
    await chat.pilot.hover(offset=(column + 8, row))
    await chat.pilot.mouse_up(offset=(column + 8, row))
    await click(chat, "Ctrl+C copy")
    await copied(chat, "Quicksort")
    await chat.until(lambda: "Ctrl+C copy" not in chat.text, "the hint goes with the selection")
    assert not any("once more" in note.message for note in chat.app._notifications)


@way("Everywhere", "ctrl+q")
async def leave(chat: Driver) -> None:
    await use_help(chat, "Quit")
    await chat.until(lambda: chat.app._exit, "the end")


# In the prompt


@way("In the prompt", "enter")
async def send(chat: Driver) -> None:
    chat.prompt.put("By mouse")
    await click(chat, "Enter send")
    await chat.until(lambda: ("user", "By mouse") in chat.turns, "sent")
    await chat.answered()


@way("In the prompt", "alt+enter,ctrl+j,shift+enter")
async def break_line(chat: Driver) -> None:
    chat.prompt.put("a")
    await click(chat, "Ctrl+J line")
    assert chat.prompt.text == "a\n"


@way("In the prompt", "up")
async def show_earlier(chat: Driver) -> None:
    chat.prompt.sent.add("an earlier one")
    await chat.pilot._post_mouse_events([MouseScrollUp], chat.prompt, button=0)
    await chat.until(lambda: chat.prompt.text == "an earlier one", "the message")
    await chat.pilot._post_mouse_events([MouseScrollDown], chat.prompt, button=0)
    await chat.until(lambda: chat.prompt.text == "", "what was there before")


@way("In the prompt", "/")
async def list_commands(chat: Driver) -> None:
    await click(chat, "/ commands")
    await click(chat, "/search [WORDS]")
    assert chat.prompt.text == "/search "


@way("In the prompt", "pageup,pagedown")
async def scroll(chat: Driver) -> None:
    transcript = chat.transcript
    bottom = transcript.scroll_y
    await chat.pilot._post_mouse_events([MouseScrollUp], transcript, button=0)
    await chat.until(lambda: transcript.scroll_y < bottom, "scrolled up")
    await chat.pilot._post_mouse_events([MouseScrollDown], transcript, button=0)
    await chat.until(lambda: transcript.scroll_y == bottom, "scrolled down")


@way("In the prompt", "shift+tab")
async def go_to_messages(chat: Driver) -> None:
    await click(chat, "It is not stable.")
    assert chat.transcript.has_focus
    assert chat.transcript.selected == chat.session.tree.path()[-1].id


@way("In the prompt", "@")
async def list_files(chat: Driver) -> None:
    await use_help(chat, "Attach a file, folder or page")
    await click(chat, "README.md")
    await chat.sees("README.md ", "✕")
    await click(chat, "✕")
    await chat.until(lambda: chat.screen.files.attachments == (), "taken off")


@way("In the prompt", "!")
async def write_shell_command(chat: Driver) -> None:
    await use_help(chat, "Run a command of your shell")
    await chat.until(lambda: chat.prompt.is_shell, "a command for the shell")
    await click(chat, "Esc leave")
    assert not chat.prompt.is_shell


@way("In the prompt", "backspace")
async def take_off_the_last(chat: Driver) -> None:
    chat.screen.files.add_text("pasted")
    await click(chat, "✕")
    await chat.until(lambda: chat.screen.files.attachments == (), "taken off")


# On attached files

FILES = "On attached files (Shift+Tab)"


async def with_texts(chat: Driver) -> None:
    for text in ("one", "two"):
        chat.screen.files.add_text(text)
    await chat.until(lambda: len(chat.screen.files.attachments) == 2, "attached")


async def without_texts(chat: Driver) -> None:
    chat.screen.files.set(())
    await chat.pilot.pause()


@way(FILES, "left")
async def file_before(chat: Driver) -> None:
    await with_texts(chat)
    names = [attachment.name for attachment in chat.screen.files.attachments]
    for name in names[::-1]:
        await click(chat, name)
        await click(chat, "Del take off")
        await gone(chat, name)
    assert chat.screen.files.attachments == ()


@way(FILES, "right")
async def next_file(chat: Driver) -> None:
    await file_before(chat)


@way(FILES, "enter")
async def put_into_the_prompt(chat: Driver) -> None:
    await with_texts(chat)
    await click(chat, "as text")
    await chat.until(lambda: chat.prompt.text == "two", "the text")
    await without_texts(chat)


@way(FILES, "delete,backspace")
async def take_off(chat: Driver) -> None:
    await with_texts(chat)
    await click(chat, "✕")
    await chat.until(lambda: len(chat.screen.files.attachments) == 1, "taken off")
    await without_texts(chat)


@way(FILES, "down")
async def back_to_the_prompt(chat: Driver) -> None:
    await with_texts(chat)
    await click(chat, "pasted text")
    assert chat.screen.files.bar.has_focus
    await click(chat, "Esc back")
    assert chat.prompt.has_focus
    await without_texts(chat)


# On a message


@way("On a message", "up,k")
async def select_above(chat: Driver) -> None:
    await go_to_messages(chat)
    await roll(chat, MouseScrollUp)
    await click(chat, "Explain quicksort", row=2)
    assert chat.transcript.selected == chat.session.tree.path()[0].id


@way("On a message", "down,j")
async def select_below(chat: Driver) -> None:
    await select_above(chat)
    await roll(chat, MouseScrollDown)
    await go_to_messages(chat)


@way("On a message", "left")
async def previous_version(chat: Driver) -> None:
    await new_chat(chat)
    await chat.ask("Explain quicksort")
    await go_to_messages(chat)
    await click(chat, "r again")
    await chat.sees("◂ 2/2 ▸")
    await chat.answered()
    await click(chat, "◂")
    await chat.sees("◂ 1/2 ▸")


@way("On a message", "right")
async def next_version(chat: Driver) -> None:
    await previous_version(chat)
    await click(chat, "▸")
    await chat.sees("◂ 2/2 ▸")


@way("On a message", "e")
async def edit_message(chat: Driver) -> None:
    await go_to_messages(chat)
    await click(chat, "e edit")
    await chat.until(lambda: chat.screen.pane.editing is not None, "editing")


@way("On a message", "r")
async def regenerate_message(chat: Driver) -> None:
    before = len(chat.session.tree.messages)
    await go_to_messages(chat)
    await click(chat, "r again")
    await chat.until(lambda: len(chat.session.tree.messages) > before, "another answer")
    await chat.answered()


@way("On a message", "enter")
async def fold(chat: Driver) -> None:
    chat.endpoint.reasoning = "Let me think."
    await chat.ask("Think")
    chat.endpoint.reasoning = ""
    for before, after in ("▸▾", "▾▸"):
        await click(chat, f"{before} Thought")
        await chat.sees(f"{after} Thought")


@way("On a message", "c,y")
async def copy_message(chat: Driver) -> None:
    await go_to_messages(chat)
    await click(chat, "c copy")
    await copied(chat, ANSWER)


@way("On a message", "g")
async def copy_code_of_message(chat: Driver) -> None:
    await go_to_messages(chat)
    await click(chat, "g code")
    await copied(chat, CODE)


@way("On a message", "/")
async def find_from_message(chat: Driver) -> None:
    await find(chat)


async def with_finds(chat: Driver) -> None:
    """Find a word of every answer, with the keys on a message."""
    await new_chat(chat)
    for question in ("one", "two"):
        await chat.ask(question)
    chat.screen.view.find("stable")
    await chat.sees("in 2 messages")
    await click(chat, "Enter message")


@way("On a message", "n")
async def next_place(chat: Driver) -> None:
    await with_finds(chat)
    before = chat.transcript.selected
    await click(chat, "n next")
    await chat.until(lambda: chat.transcript.selected not in (None, before), "the other answer")
    await click(chat, "Esc back")


@way("On a message", "N")
async def previous_place(chat: Driver) -> None:
    await with_finds(chat)
    before = chat.transcript.selected
    await click(chat, "N previous")
    await chat.until(lambda: chat.transcript.selected not in (None, before), "the other answer")
    await click(chat, "Esc back")


@way("On a message", "z")
async def collapse_message(chat: Driver) -> None:
    await new_chat(chat)
    await chat.ask("Explain quicksort")
    await go_to_messages(chat)
    await click(chat, "z fold")
    await gone(chat, "It is not stable.")
    await click(chat, "▸ Quicksort picks")
    await chat.sees("It is not stable.")


@way("On a message", "Z")
async def collapse_long_messages(chat: Driver) -> None:
    await new_chat(chat)
    await chat.ask("Explain quicksort")
    await go_to_messages(chat)
    await click(chat, "Z all")
    await gone(chat, "It is not stable.")
    await click(chat, "Z all")
    await chat.sees("It is not stable.")


WIDE = "```\n" + "0123456789" * 20 + "END\n```\n\nIt is not stable."


async def with_wide_code(chat: Driver) -> None:
    chat.endpoint.answers = [WIDE, ANSWER]
    await new_chat(chat)
    await chat.ask("Wide")
    await gone(chat, "END")


@way("On a message", "shift+right")
async def move_wide_code(chat: Driver) -> None:
    await with_wide_code(chat)
    while "END" not in chat.text:
        await chat.pilot._post_mouse_events([MouseScrollRight], chat.transcript, button=0)
        await chat.pilot.pause()


@way("On a message", "shift+left")
async def move_wide_code_back(chat: Driver) -> None:
    await move_wide_code(chat)
    while "▎0123" not in chat.text:
        await chat.pilot._post_mouse_events([MouseScrollLeft], chat.transcript, button=0)
        await chat.pilot.pause()


@way("On a message", "w")
async def wrap_code(chat: Driver) -> None:
    await with_wide_code(chat)
    await go_to_messages(chat)
    await click(chat, "w wrap")
    await chat.sees("END")
    await click(chat, "w wrap")
    await gone(chat, "END")


@way("On a message", "u")
async def copy_address(chat: Driver) -> None:
    chat.endpoint.answers = ["See [the documentation](https://docs.example/page).", ANSWER]
    await new_chat(chat)
    await chat.ask("Where?")
    assert "docs.example" not in chat.text
    await click(chat, "the documentation")
    await copied(chat, "https://docs.example/page")


@way("On a message", "home")
async def go_to_beginning(chat: Driver) -> None:
    await new_chat(chat)
    await chat.ask("Explain quicksort")
    await chat.ask("Again")
    await roll(chat, MouseScrollUp)
    assert chat.transcript.scroll_y == 0


@way("On a message", "end")
async def go_to_end(chat: Driver) -> None:
    await go_to_beginning(chat)
    await roll(chat, MouseScrollDown)
    assert chat.transcript.scroll_y == chat.transcript.max_scroll_y > 0


@way("In the list of chats", "enter")
async def open_from_list(chat: Driver) -> None:
    await click(chat, "+ new")
    await chat.until(lambda: chat.turns == [], "a new chat")
    await click(chat, "Explain quicksort")
    await chat.until(lambda: chat.turns != [], "the chat")


async def go_to_list(chat: Driver) -> None:
    await click(chat, "Search  Ctrl+F")
    await click(chat, "Enter results")


@way("In the list of chats", "delete")
async def delete_chat(chat: Driver) -> None:
    await go_to_list(chat)
    await click(chat, "Del delete")
    await chat.until(lambda: chat.turns == [], "a new chat")


@way("In the list of chats", "ctrl+z")
async def undo_delete(chat: Driver) -> None:
    await delete_chat(chat)
    await click(chat, "Ctrl+Z undo")
    await chat.until(lambda: chat.turns != [], "it is back")


@way("In the list of chats", "p")
async def pin_chat(chat: Driver) -> None:
    await go_to_list(chat)
    await click(chat, "p pin")
    await chat.until(lambda: chat.session.chat.pinned, "pinned")
    await click(chat, "p pin")
    await chat.until(lambda: not chat.session.chat.pinned, "no longer pinned")


@way("In the list of chats", "r")
async def rename_chat(chat: Driver) -> None:
    await go_to_list(chat)
    await click(chat, "r rename")
    await opens(chat, LineScreen)
    await click(chat, "Esc cancels")
    await chat.until(lambda: len(chat.app.screen_stack) == 1, "closed")


@way("In the list of chats", "t")
async def tag_chat(chat: Driver) -> None:
    await go_to_list(chat)
    await click(chat, "t tag")
    await opens(chat, TagScreen)
    await click(chat, "Esc cancels")
    await chat.until(lambda: len(chat.app.screen_stack) == 1, "closed")


@way("In the list of chats", "a")
async def archive_chat(chat: Driver) -> None:
    await go_to_list(chat)
    await click(chat, "a archive")
    await chat.until(lambda: chat.session.chat.archived, "in the archive")
    await archive(chat.screen._face, "")


@way("In the list of chats", "escape")
async def leave_list(chat: Driver) -> None:
    await click(chat, "Search  Ctrl+F")
    await click(chat, "Esc back")
    assert chat.prompt.has_focus


@way("On a message", "x")
async def explore_message(chat: Driver) -> None:
    await go_to_messages(chat)
    await click(chat, "x explore")
    await opens(chat, ExploreScreen)


# In the inspector


async def with_steps(chat: Driver) -> Inspector:
    """Open the inspector with 60 steps, and return it."""
    if not chat.screen.inspector.is_open:
        chat.screen.run_command("inspect", "")
        await chat.until(lambda: chat.screen.inspector.is_open, "the inspector is open")
    inspector = chat.screen.query_one(Inspector)
    for number in range(1, 61):
        inspector.feed(StepSeen(number, number, 5, 1, 0, (Chunk(1, 9, 0, 9 + number, 1, 0, 0, 0, 1),)))
    if inspector.steps.is_paused:
        inspector.action_newest()
    await chat.sees("60      5.0 ms")
    return inspector


async def stopped_at(chat: Driver, inspector: Inspector, number: int) -> None:
    await chat.until(
        lambda: inspector.steps.is_paused and inspector.steps.shown and inspector.steps.shown.step.number == number,
        f"stopped at step {number}",
    )


SET = "On what is set, below the title (Shift+Tab)"


@way(SET, "left")
@way(SET, "right")
@way(SET, "enter")
async def change_what_is_set(chat: Driver) -> None:
    chat.session.set_sampling({"temperature": 0.1})
    chat.screen.view.show_state()
    await click(chat, "temperature 0.1")
    await opens(chat, ParamsScreen)


@way("In the inspector", "space")
async def stop_inspector(chat: Driver) -> None:
    inspector = await with_steps(chat)
    await chat.pilot.click(inspector, offset=(4, 1))
    await stopped_at(chat, inspector, 60)
    await click(chat, "Space goes on")
    assert not inspector.steps.is_paused


@way("In the inspector", "left")
async def one_step_back(chat: Driver) -> None:
    inspector = await with_steps(chat)
    await chat.pilot._post_mouse_events([MouseScrollUp], inspector, button=0)
    await stopped_at(chat, inspector, 59)


@way("In the inspector", "right")
async def one_step_on(chat: Driver) -> None:
    inspector = await with_steps(chat)
    inspector.action_move(-5)
    await chat.pilot._post_mouse_events([MouseScrollDown], inspector, button=0)
    await stopped_at(chat, inspector, 56)


@way("In the inspector", "pageup")
async def many_steps_back(chat: Driver) -> None:
    inspector = await with_steps(chat)
    await chat.pilot._post_mouse_events([MouseScrollUp] * 20, inspector, button=0)
    await stopped_at(chat, inspector, 40)


@way("In the inspector", "pagedown")
async def many_steps_on(chat: Driver) -> None:
    inspector = await with_steps(chat)
    inspector.action_move(-40)
    await chat.pilot._post_mouse_events([MouseScrollDown] * 20, inspector, button=0)
    await stopped_at(chat, inspector, 40)


@way("In the inspector", "home")
async def first_step(chat: Driver) -> None:
    inspector = await with_steps(chat)
    await chat.pilot._post_mouse_events([MouseScrollUp] * 70, inspector, button=0)
    assert inspector.steps.shown is inspector.steps.around(100)[0]


@way("In the inspector", "end")
async def newest_step(chat: Driver) -> None:
    inspector = await with_steps(chat)
    inspector.action_move(-10)
    await chat.pilot.click(inspector, offset=(4, 0))
    assert not inspector.steps.is_paused


def test_each_key_has_a_way() -> None:
    keys = {(group, key.keys) for group, keys in KEY_GROUPS for key in keys}
    assert keys == set(WAYS), "give the mouse a way to do what the key does, and click it here"


@pytest.mark.timeout(400)  # a group is many clicks, and the machine may be busy
@pytest.mark.parametrize("group", [group for group, _ in KEY_GROUPS])
async def test_the_mouse_does_what_keys_do(open_chat: Open, endpoint: FakeEndpoint, group: str) -> None:
    async with open_chat(size=(190, 36)) as chat:
        await chat.ready()
        for (of, _), function in WAYS.items():
            if of != group:
                continue
            if chat.turns[:1] != [("user", "Explain quicksort")] or chat.session.tree.path()[-1].text != ANSWER:
                await chat.press("ctrl+n")
                await chat.until(lambda: chat.turns == [], "a new chat")
                await chat.ask("Explain quicksort")
            await function(chat)
            chat.app._clipboard = ""
            while len(chat.app.screen_stack) > 1:
                await chat.app.pop_screen()
            if not chat.app._exit:
                chat.screen.view.focus_prompt()
                chat.screen.pane.leave_edit()
                chat.prompt.put("")
                await chat.pilot.pause()
