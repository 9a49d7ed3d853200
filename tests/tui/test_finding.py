"""Finding: words in the open chat, keys and commands in the help and the palette, and what another window changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.text import Text
from textual.widgets import Input, OptionList

from edgelm.chats.attachments import Attachment
from edgelm.tui.commands.table import HelpScreen
from edgelm.tui.dialogs.basic import LineScreen, PickScreen
from edgelm.tui.lines import Line, cut_words, wrap_words
from edgelm.tui.sidebar import ChatList
from edgelm.tui.transcript.finding import FOUND_HERE, Finding
from tests.tui.conftest import Driver, Open
from tests.tui.test_mouse import opens

LONG = "\n\n".join(f"Paragraph {number} says nothing." for number in range(60))


def here(chat: Driver) -> str:
    """Return what is tinted as the present place, on the screen."""
    strips = chat.app.screen._compositor.render_strips()
    segments = [segment for strip in strips for segment in strip if segment.style and segment.style.reverse]
    return "".join(segment.text for segment in segments if FOUND_HERE.reverse and segment.text.strip())


async def begin_find(chat: Driver, words: str) -> None:
    await chat.press("ctrl+l")
    await chat.type(words)


async def selected_is(chat: Driver, index: int) -> None:
    path = chat.session.tree.path()
    await chat.until(lambda: chat.transcript.selected == path[index].id, f"message {index} is selected")


@pytest.mark.parametrize(
    ("text", "words", "found"),
    [
        ("A quick brown fox", "QUICK  brown", ["quick brown"]),
        ("one two three four five six", "three four", ["three", " four"]),  # over the end of a line
        ("a.b axb", "a.b", ["a.b"]),
        ("nothing", "some", []),
    ],
)
def test_words_are_found_in_drawn_lines(text: str, words: str, found: list[str]) -> None:
    lines = wrap_words(Text(text), 14 if len(text) > 20 else 40)
    matches = Finding(words).matches(lines)
    assert [lines[piece.line].text.plain[piece.start : piece.end].strip() for match in matches for piece in match] == [
        word.strip() for word in found
    ]


def test_decoration_is_not_found() -> None:
    lines = [Line(Text("model: model"), prefix=7), Line(Text("model"), prefix=5)]
    assert [[tuple(piece) for piece in match] for match in Finding("model").matches(lines)] == [[(0, 7, 12)]]


async def test_the_same_words_are_found_again(open_chat: Open) -> None:
    async with open_chat() as chat:
        chat.endpoint.answers = ["A whale."]
        await chat.ask("first")
        await chat.ask("/find whale")
        await chat.sees("in 1 message")
        await chat.press("escape", "ctrl+n")
        await chat.ask("/find whale")
        await chat.sees("not found")
        await chat.press("escape")
        await chat.press("ctrl+f", "down", "enter")
        await chat.sees("A whale.")
        await chat.ask("/find whale")
        await chat.sees("in 1 message")
        await chat.until(lambda: here(chat) == "whale", "it is tinted")


async def test_find_goes_to_each_place_and_around(open_chat: Open) -> None:
    async with open_chat() as chat:
        chat.endpoint.answers = [
            f"The **blue** whale sings.\n\n{LONG}\n\nA whale sleeps.",
            "No animal here.",
            "A whale.",
        ]
        for question in ("first", "second", "third"):
            await chat.ask(question)
        await begin_find(chat, "whale")
        await chat.sees("in 2 messages", "A whale sleeps.")
        await chat.until(lambda: here(chat) == "whale", "it is tinted")
        assert isinstance(chat.app.focused, Input)
        await chat.press("down", "down")  # to the last one, and around to the first
        await chat.sees("The blue whale sings.")
        await chat.press("enter")
        await selected_is(chat, 1)
        assert chat.transcript.has_focus
        await chat.press("n")
        await chat.sees("A whale sleeps.")
        await selected_is(chat, 1)
        await chat.press("n")
        await selected_is(chat, 5)
        await chat.press("N")
        await selected_is(chat, 1)
        await chat.sees("A whale sleeps.")
        await chat.press("escape")
        await chat.until(lambda: chat.prompt.has_focus, "the prompt has the keys")
        assert chat.transcript._finding is None
        assert "in 2 messages" not in chat.text


async def test_find_from_the_prompt_and_from_a_message(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("about cats")
        await chat.ask("/find quicksort picks")
        await chat.sees("in 1 message", "Find")
        await chat.until(lambda: here(chat) == "Quicksort picks", "it is tinted")
        await chat.press("enter", "/")
        await chat.until(lambda: isinstance(chat.app.focused, Input), "the bar has the keys")
        await chat.type("dogs")
        await chat.sees("not found")


async def test_a_folded_message_is_unfolded_where_words_are_found(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("about cats")
        await chat.press("shift+tab", "z")
        await chat.until(lambda: "It is not stable" not in chat.text, "folded")
        await begin_find(chat, "not stable")
        await chat.sees("It is not stable")
        await chat.press("escape", "shift+tab", "z")
        await chat.until(lambda: "It is not stable" not in chat.text, "folded again")


async def test_folded_texts_are_searched_and_unfolded(open_chat: Open) -> None:
    async with open_chat() as chat:
        chat.endpoint.reasoning, chat.endpoint.answers = "The secret is a weasel here.", ["An answer about the ferret."]
        await chat.ask("first")
        chat.endpoint.reasoning, chat.endpoint.answers = "", ["A second one."]
        chat.screen.files.add(Attachment(kind="text", name="notes", text="one\ntwo\nthe otter sleeps\n"))
        await chat.ask("second")
        assert "weasel" not in chat.text
        await begin_find(chat, "weasel")
        await chat.sees("in 1 message", "The secret is a weasel here.")
        await chat.until(lambda: here(chat) == "weasel", "the place")
        await chat.press("escape")
        await begin_find(chat, "otter")
        await chat.until(lambda: here(chat) == "otter", "the place in a file")
        await chat.press("escape", "ctrl+t", "ctrl+t")  # all are unfolded, and folded again
        await chat.until(lambda: "weasel" not in chat.text, "folded")
        await begin_find(chat, "the")  # while words are typed, what is shown comes first
        await chat.sees("in 2 messages")
        await chat.until(lambda: here(chat) == "the", "the place")
        assert "weasel" not in chat.text
        await chat.press("down")
        await chat.sees("the otter sleeps")


async def test_a_chat_that_is_opened_has_no_find(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("about cats")
        await begin_find(chat, "cats")
        await chat.sees("in 1 message")
        await chat.press("ctrl+n")
        await chat.until(lambda: not chat.turns, "a new chat")
        assert "in 1 message" not in chat.text
        assert chat.transcript._finding is None


async def test_the_help_has_a_filter(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.press("f1")
        await opens(chat, HelpScreen)
        await chat.sees("Everywhere", "Find a command by name")
        await chat.type("know")
        await chat.sees("/know", "Commands")
        assert "Everywhere" not in chat.text
        await chat.type("xyz")
        await chat.sees("no key or command has these words")
        await chat.press("escape")
        await chat.until(lambda: not isinstance(chat.app.screen, HelpScreen), "closed")


async def test_the_help_begins_with_the_keys_of_what_has_the_focus(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("about cats")
        await chat.press("shift+tab", "f1")
        await opens(chat, HelpScreen)
        await chat.sees("On a message", "Fold it")
        assert "Everywhere" not in chat.text.split("On a message")[0]


async def test_the_help_scrolls_while_the_filter_has_the_keys(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.press("f1")
        await chat.sees("Everywhere")
        await chat.press("pagedown")
        await chat.until(lambda: "Everywhere" not in chat.text, "scrolled")
        await chat.press("pageup", "down", "up")
        await chat.sees("Everywhere")


async def test_the_palette_shows_keys(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.press("ctrl+p")
        await chat.type("renam")
        await chat.sees("/title  F2")
        await chat.press("enter")
        await opens(chat, LineScreen)


async def test_another_chat_of_the_list_is_renamed(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("about cats")
        cats = chat.session.chat.id
        await chat.press("ctrl+n")
        await chat.ask("about dogs")
        options = chat.screen.sidebar.query_one(ChatList)
        row = next(i for i, option in enumerate(options.options) if option.id == str(cats))
        await chat.pilot.click(options, offset=(4, row), button=3)
        await opens(chat, PickScreen)
        await chat.type("rename")
        await chat.press("enter")
        await opens(chat, LineScreen)
        chat.app.screen.query_one(Input).value = "Felines"
        await chat.press("enter")
        await chat.sees("Felines", "about dogs")
        assert chat.session.chat.title == "about dogs"
    async with open_chat() as chat:
        await chat.sees("Felines")
        assert chat.screen.workspace.chats[cats].renamed


async def test_the_key_of_the_list_renames_the_open_chat(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("about cats")
        await chat.press("ctrl+f", "down", "r")
        await opens(chat, LineScreen)
        chat.app.screen.query_one(Input).value = "Felines"
        await chat.press("enter")
        await chat.until(lambda: chat.app.sub_title == "Felines", "the title")
        await chat.until(lambda: "Felines" in chat.text.split("\n")[0], "it is above the conversation")


@pytest.mark.parametrize(
    ("text", "width", "cut"),
    [
        ("How do I download", 40, "How do I download"),
        ("How do I download a model", 14, "How do I…"),
        ("How do I download a model", 18, "How do I download…"),
        ("Donaudampfschifffahrt", 10, "Donaudamp…"),
        ("日本語の長い題名です", 10, "日本語の…"),
    ],
)
def test_a_line_is_cut_between_words(text: str, width: int, cut: str) -> None:
    assert cut_words(Text(text), width).plain == cut


async def test_titles_in_the_list_end_with_whole_words(open_chat: Open) -> None:
    async with open_chat((110, 32)) as chat:
        title = "Explain the theory of relativity thoroughly"
        await chat.ask(title)
        options = chat.screen.sidebar.query_one(OptionList)
        shown = next(str(option.prompt) for option in options.options if option.id)
        assert shown.endswith("…")
        assert title.startswith(shown[:-1] + " ")


async def test_a_change_in_another_window_is_shown_and_loaded(open_chat: Open) -> None:
    async with open_chat() as one, open_chat() as other:
        await one.ask("begin")
        await other.ready()
        await other.screen.workspace.open_chat(one.session.chat.id)
        other.screen.view.show_chat()
        other.screen.look_elsewhere()
        await one.ask("from the first window")
        await one.ask("/title Shared")
        one_path = one.turns

        def looked() -> bool:
            other.screen.look_elsewhere()
            return other.screen.workspace.is_outdated

        await other.until(looked, "the change is seen")
        await other.sees("changed in another window: reload")
        assert len(other.turns) == 2
        await other.ask("/reload")
        await other.until(lambda: other.turns == one_path, "it is loaded")
        assert other.session.chat.title == "Shared"
        await other.until(lambda: "changed in another window" not in other.text, "the note is gone")
        await other.screen.workspace.look_elsewhere()
        assert not other.screen.workspace.is_outdated


async def test_own_changes_are_no_changes_of_another_window(open_chat: Open) -> None:
    async with open_chat() as one, open_chat() as other:
        await one.ask("begin")
        await other.ask("another chat")
        await one.ask("/system Be brief.")
        await one.ask("go on")
        await one.screen.workspace.look_elsewhere()
        assert not one.screen.workspace.is_outdated


async def test_a_chat_without_its_model_is_not_changed_by_another_window(open_chat: Open) -> None:
    async with open_chat() as one, open_chat() as other:
        await one.ask("begin")
        chat = replace(one.session.chat, model="")  # as a version that did not keep it
        await other.ready()
        await other.screen.workspace.read(lambda store: store.put_chat(chat))
        await other.screen.workspace.open_chat(chat.id)
        assert other.session.chat.model == "starter"
        await other.screen.workspace.look_elsewhere()
        assert not other.screen.workspace.is_outdated
