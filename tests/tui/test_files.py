"""Files that are attached to a message: chosen by @, by command and by paste, shown on the bar, sent and kept."""

from __future__ import annotations

import asyncio
import base64
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual import events

from edgelm.chats.attached_files import Read, State, read_attachment, state_of
from edgelm.chats.attachments import Attachment
from edgelm.chats.folders import MAX_WALK_S, Entry, Walk
from edgelm.chats.store import Store
from edgelm.chats.unsent import own_name
from edgelm.tui.commands.table import Suggestion
from edgelm.tui.prompt import file_picker
from edgelm.tui.prompt.outgoing import Outgoing
from edgelm.tui.terminal_input import InputParser
from tests.tui.conftest import Driver, Open
from tests.tui.test_mouse import click

CODE = "def add(a, b):\n    return a + b\n"
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a repository with a few files."""
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "build").mkdir()
    (folder / "src" / "adder.py").write_text(CODE)
    (folder / "src" / "notes.md").write_text("# Notes\n")
    (folder / "build" / "adder.o.txt").write_text("made")
    (folder / ".env").write_text("KEY=1")
    (folder / ".gitignore").write_text("build/\n")
    (folder / "picture.png").write_bytes(PNG)
    monkeypatch.chdir(folder)
    return folder


def names(chat: Driver) -> list[str]:
    return [attachment.name for attachment in chat.screen.files.attachments]


def last_content(chat: Driver) -> object:
    return chat.endpoint.requests[-1]["messages"][-1]["content"]


async def pick(chat: Driver, typed: str, *keys: str) -> None:
    await chat.type(typed)
    await chat.press(*keys)


async def has(chat: Driver, *expected: str) -> None:
    await chat.until(lambda: names(chat) == list(expected), f"attached: {expected}, not {names(chat)}")


def question_id(chat: Driver) -> int:
    return chat.session.tree.path()[0].id


async def waits(chat: Driver, *texts: str, typed: str = "") -> None:
    """Wait until messages wait to be sent, and what was typed behind them is in the prompt."""
    await chat.until(
        lambda: (chat.screen._outbox.texts, chat.prompt.text) == (list(texts), typed), f"{texts} wait, then {typed}"
    )


async def paste(chat: Driver, text: str) -> None:
    chat.prompt.post_message(events.Paste(text))
    await chat.pilot.pause()


async def test_a_file_is_picked_counted_and_sent(open_chat: Open, folder: Path) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.type("Explain @add")
        await chat.sees("src/adder.py")
        assert "adder.o" not in chat.text, "what .gitignore excludes is not listed"
        await chat.press("enter")
        await has(chat, "src/adder.py")
        assert chat.prompt.text == "Explain "
        await chat.sees("src/adder.py 11 tokens", "4,085 of 4,096 left")
        await chat.press("enter")
        await chat.answered()
        assert last_content(chat) == f"src/adder.py:\n```\n{CODE}```\n\nExplain "
        await chat.sees("▸ src/adder.py · 11 tokens")
        assert names(chat) == []
        chat_id = chat.session.chat.id
    async with open_chat() as chat:
        await chat.ready()
        chat.screen.open_chat(chat_id)
        await chat.sees("▸ src/adder.py · 11 tokens")
        await chat.press("shift+tab", "up", "enter")
        await chat.sees("▾ src/adder.py", "return a + b")


async def test_keys_may_be_faster_than_the_list(open_chat: Open, folder: Path) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.press(*"@notes", "enter")
        await has(chat, "src/notes.md")
        await chat.press(*"@nosuch", "enter")
        await chat.until(lambda: chat.turns[:1] == [("user", "@nosuch")], "a word is a word")
        await chat.answered()
        await chat.type("to @src")
        await chat.sees("src/adder.py")
        await chat.press("escape", "enter")
        await chat.until(lambda: ("user", "to @src") in chat.turns, "sent without a file")


async def test_an_at_in_a_command_and_in_an_earlier_message_is_a_word(open_chat: Open, folder: Path) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.press(*"/system Answer to @src", "enter")
        await chat.until(lambda: chat.session.chat.system == "Answer to @src", "the command has its word")
        await chat.type("thanks @src")
        await chat.sees("src/adder.py")
        await chat.press("escape", "enter")
        await chat.until(lambda: chat.turns[:1] == [("user", "thanks @src")], "sent as words")
        await chat.answered()
        await chat.press("up", "enter")
        await chat.until(lambda: [text for role, text in chat.turns if role == "user"] == ["thanks @src"] * 2, "again")
        await chat.answered()
        await chat.press("up", "backspace")
        await chat.sees("src/adder.py")
        assert names(chat) == []


async def test_keys_that_come_at_once_attach_a_file_too(open_chat: Open, folder: Path) -> None:
    async with open_chat() as chat:
        await chat.ready()
        for key, character in (("at", "@"), *((letter, letter) for letter in "notes"), ("enter", "\r")):
            chat.prompt.post_message(events.Key(key, character))
        await has(chat, "src/notes.md")
        assert chat.turns == []
        assert chat.prompt.text == ""


async def at_once(chat: Driver, typed: str) -> None:
    """Let the terminal send keys in one read."""
    for event in InputParser().feed(typed):
        chat.app.post_message(event)
    await chat.pilot.pause()


async def test_keys_behind_a_file_in_one_read_are_the_message(open_chat: Open, folder: Path) -> None:
    async with open_chat() as chat:
        await chat.ready()
        chat.endpoint.stall_after = 1
        await at_once(chat, "@notes\rWhat is it?\r@nosuch\r")
        await chat.hears("an answer is being written")
        assert chat.prompt.text == "@nosuch", "it could not be sent during the answer"
        chat.prompt.put("")
        chat.endpoint.stall_after = None
        await chat.press("escape")
        await chat.answered()
        assert last_content(chat) == "src/notes.md:\n```\n# Notes\n```\n\nWhat is it?"
        await at_once(chat, "@src/not\tgo on\r")
        await chat.until(lambda: len(chat.turns) == 4 and chat.answer is None, "answered")
        assert chat.turns[2] == ("user", "go on")


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("words", ["", "Sum it up"])
async def test_enter_behind_a_file_that_is_still_read_sends_it(
    open_chat: Open, folder: Path, monkeypatch: pytest.MonkeyPatch, readable: bool, words: str
) -> None:
    may_read = threading.Event()

    def slow(path: str) -> Read:
        may_read.wait()
        return read_attachment(path if readable else f"{path}.gone")

    monkeypatch.setattr("edgelm.tui.prompt.attaching.read_attachment", slow)
    async with open_chat() as chat:
        await chat.ready()
        await at_once(chat, f"@src/not\t{words}\r")
        await chat.sees("is read")
        assert (chat.turns, chat.prompt.text) == ([], "")
        may_read.set()
        if readable:
            await chat.until(lambda: chat.turns[:1] == [("user", words)], "sent")
            await chat.answered()
            assert last_content(chat) == f"src/notes.md:\n```\n# Notes\n```\n\n{words}"
        else:
            await chat.hears("notes.md.gone")
            await chat.until(lambda: chat.prompt.text == words, "the words are back")
            assert chat.turns == []


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let no reading of notes.md end before the event."""
    may_read = threading.Event()

    def read(path: str) -> Read:
        if path.endswith("notes.md"):
            may_read.wait()
        return read_attachment(path)

    monkeypatch.setattr("edgelm.tui.prompt.attaching.read_attachment", read)
    yield may_read
    may_read.set()


async def test_a_message_has_the_files_before_its_enter(open_chat: Open, folder: Path, held: threading.Event) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await at_once(chat, "@src/not\tOne\r@src/add\tTwo")
        await chat.sees("notes.md is read", "src/adder.py 11 tokens")
        await waits(chat, "One", typed="Two")
        held.set()
        await chat.until(lambda: len(chat.turns) == 2 and chat.answer is None, "answered")
        assert last_content(chat) == "src/notes.md:\n```\n# Notes\n```\n\nOne"
        assert (names(chat), chat.prompt.text) == (["src/adder.py"], "Two")
        await chat.press("enter")
        await chat.until(lambda: len(chat.turns) == 4 and chat.answer is None, "answered")
        assert last_content(chat) == f"src/adder.py:\n```\n{CODE}```\n\nTwo"


async def test_a_file_that_is_read_while_a_message_is_checked_stays(
    open_chat: Open, folder: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_look = threading.Event()

    def look(attachment: Attachment) -> State:
        may_look.wait()
        return state_of(attachment)

    async with open_chat() as chat:
        await chat.ready()
        await at_once(chat, "@src/add\tOne\r")
        await chat.until(lambda: len(chat.turns) == 2 and chat.answer is None, "answered")
        monkeypatch.setattr("edgelm.tui.prompt.attaching.state_of", look)
        await at_once(chat, "Two\r@src/not\tThree")
        await chat.sees("notes.md is read")
        may_look.set()
        await chat.until(lambda: len(chat.turns) == 4 and chat.answer is None, "answered")
        assert (last_content(chat), chat.prompt.text) == ("Two", "Three")
        held.set()
        await has(chat, "src/notes.md")


@pytest.mark.parametrize("behind", [[], ["Two"], ["Two", "Three"]])
async def test_messages_are_sent_in_the_order_of_their_enters(
    open_chat: Open, folder: Path, monkeypatch: pytest.MonkeyPatch, behind: list[str]
) -> None:
    go_on = asyncio.Event()
    async with open_chat() as chat:
        await chat.ready()
        check = chat.screen.files.check

        async def slow(message: Outgoing) -> bool:
            if message.text == "One":
                await go_on.wait()
            return await check(message)

        monkeypatch.setattr(chat.screen.files, "check", slow)
        chat.endpoint.stall_after = 1
        await at_once(chat, "\r".join(["@src/add\tOne", *behind, ""]))
        await waits(chat, "One", *behind)
        assert chat.turns == []
        go_on.set()
        await chat.until(lambda: chat.turns[:1] == [("user", "One")], "the first is sent first")
        await chat.until(lambda: chat.prompt.text == "\n".join(behind), "no other can be sent during the answer")
        await chat.press("escape")
        await chat.answered()
        assert len(chat.endpoint.requests) == 1
        assert last_content(chat) == f"src/adder.py:\n```\n{CODE}```\n\nOne"


async def test_messages_behind_one_that_is_not_sent_come_back_in_their_order(
    open_chat: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_look = threading.Event()

    def look(attachment: Attachment) -> State:
        may_look.wait()
        return state_of(attachment)

    async with open_chat() as chat:
        await chat.ready()
        await at_once(chat, "@src/add\tExplain it\r")
        await chat.until(lambda: len(chat.turns) == 2 and chat.answer is None, "answered")
        monkeypatch.setattr("edgelm.tui.prompt.attaching.state_of", look)
        (folder / "src" / "adder.py").write_text(CODE * 2)
        await at_once(chat, "One\rTwo\rThree\rFour")
        await waits(chat, "One", "Two", "Three", typed="Four")
        may_look.set()
        await chat.until(lambda: chat.prompt.text == "One\nTwo\nThree\nFour", "all are back")
        await chat.hears("src/adder.py has changed")
        assert len(chat.turns) == 2


async def test_a_message_without_anything_left_holds_up_none_behind_it(
    open_chat: Open, folder: Path, held: threading.Event
) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await at_once(chat, "@src/not\t\rTwo\r")
        await waits(chat, "", "Two")
        chat.screen.files.remove(0)
        await chat.until(lambda: len(chat.turns) == 2 and chat.answer is None, "answered")
        assert last_content(chat) == "Two"


async def test_a_message_waits_for_none_of_another_chat(open_chat: Open, folder: Path, held: threading.Event) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await at_once(chat, "@src/not\tOne\rSum up https://ferrets.example/\r")
        await waits(chat, "One", "Sum up https://ferrets.example/")
        begun = chat.session
        await chat.press("ctrl+n")
        await chat.until(lambda: chat.session is not begun, "another chat")
        await at_once(chat, "Two\r")
        await chat.until(lambda: chat.turns[:1] == [("user", "Two")] and chat.answer is None, "answered")
        held.set()
        await chat.hears("another chat was opened: the message is not sent")
        await chat.until(lambda: chat.prompt.text == "One\nSum up https://ferrets.example/", "both are back")
        await has(chat, "src/notes.md")
        assert len(chat.app.screen_stack) == 1, "nothing is asked about the page"
        assert (len(chat.turns), begun.tree.messages) == (2, {})


async def test_a_message_goes_to_no_branch_that_was_opened_meanwhile(
    open_chat: Open, folder: Path, held: threading.Event
) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("Old")
        await chat.press("f4")
        await chat.until(lambda: chat.prompt.text == "Old", "edited")
        await chat.ask("New")
        await at_once(chat, "@src/not\tabout the new one\r")
        await waits(chat, "about the new one")
        chat.screen._turn(chat.session.tree.path()[0].id, -1)
        held.set()
        await chat.hears("another branch was opened: the message is not sent")
        await chat.until(lambda: chat.prompt.text == "about the new one", "it is back")
        assert [text for role, text in chat.turns if role == "user"] == ["Old"]
        await has(chat, "src/notes.md")


async def test_a_message_that_waits_goes_below_what_is_asked_meanwhile(
    open_chat: Open, folder: Path, held: threading.Event
) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("One")
        await at_once(chat, "@src/not\tThree\r")
        await waits(chat, "Three")
        chat.screen.send("Two")  # as /help does
        await chat.until(lambda: len(chat.turns) == 4 and chat.answer is None, "answered")
        held.set()
        await chat.until(lambda: len(chat.turns) == 6 and chat.answer is None, "sent")
        assert [text for role, text in chat.turns if role == "user"] == ["One", "Two", "Three"]


async def test_messages_that_wait_are_the_draft_of_the_next_run(
    open_chat: Open, folder: Path, held: threading.Event
) -> None:
    def draft(chat: Driver) -> str | None:
        return chat.screen.workspace.store.read(Store.settings).result(chat.patience_s).get(own_name())

    async with open_chat() as chat:
        await chat.ready()
        await at_once(chat, "@src/not\tOne\rTwo\rThree")
        await waits(chat, "One", "Two", typed="Three")
    async with open_chat() as chat:
        await chat.until(lambda: chat.prompt.text == "One\nTwo\nThree", "the draft of the last time")
        await at_once(chat, " @src/not\t\r")
        await chat.until(lambda: draft(chat) == "One\nTwo\nThree ", "saved while it waits")
        held.set()
        await chat.until(lambda: len(chat.turns) == 2 and chat.answer is None, "sent")
        await chat.until(lambda: draft(chat) == "", "it is no draft any more")


async def test_an_edit_that_begins_behind_enter_is_of_its_own_message(
    open_chat: Open, folder: Path, held: threading.Event
) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("Explain it")
        await at_once(chat, "@src/not\tOne\r")
        await chat.sees("notes.md is read")
        await chat.press("f4")
        await chat.until(lambda: chat.prompt.text == "Explain it", "edited")
        held.set()
        await chat.until(lambda: chat.turns[2:3] == [("user", "One")], "sent behind the other")
        await chat.answered()
        assert last_content(chat) == "src/notes.md:\n```\n# Notes\n```\n\nOne"
        assert (chat.prompt.text, names(chat)) == ("Explain it", [])
        await chat.press("escape")
        assert (chat.prompt.text, names(chat)) == ("", [])


@pytest.mark.parametrize("readable", [True, False])
async def test_a_file_that_is_read_while_another_message_is_edited_comes_back(
    open_chat: Open, folder: Path, held: threading.Event, readable: bool
) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("Explain it")
        await at_once(chat, "@src/add\t@src/not\tCompare ")
        await chat.until(lambda: len(chat.screen.files.items) == 2 and chat.prompt.text == "Compare ", "attached")
        await chat.press("f4")
        await chat.until(lambda: chat.prompt.text == "Explain it", "edited")
        if not readable:
            (folder / "src" / "notes.md").unlink()
            held.set()
            await chat.hears("notes.md does not exist")
        await chat.press("escape")
        held.set()
        await has(chat, "src/adder.py", *(["src/notes.md"] if readable else []))
        assert chat.prompt.text == "Compare "
        await chat.sees(*(["src/notes.md 6 tokens"] if readable else ["src/adder.py 11 tokens"]))


async def test_messages_that_come_back_during_an_edit_are_set_aside(
    open_chat: Open, folder: Path, held: threading.Event
) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("Explain it")
        await at_once(chat, "@src/add\t@src/not\tOne\rTwo\rThree")
        await waits(chat, "One", "Two", typed="Three")
        await chat.press("f4")
        await chat.until(lambda: chat.prompt.text == "Explain it", "edited")
        (folder / "src" / "notes.md").unlink()
        held.set()
        await chat.hears("notes.md does not exist")
        await chat.until(lambda: chat.screen.pane.unsent == "One\nTwo\nThree", "set aside")
        assert (chat.prompt.text, names(chat)) == ("Explain it", [])
        await chat.press("escape")
        await has(chat, "src/adder.py")
        assert chat.prompt.text == "One\nTwo\nThree"


async def test_a_file_behind_an_edited_message_stays(open_chat: Open, folder: Path, held: threading.Event) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("Explain it")
        chat.prompt.put("Compare ")
        chat.screen.files.add_text("set aside")
        await chat.press("f4")
        await chat.until(lambda: chat.prompt.text == "Explain it", "edited")
        await at_once(chat, " @src/not\ttwice\r@src/add\twith")
        await chat.sees("notes.md is read", "src/adder.py 11 tokens")
        await waits(chat, "Explain it twice", typed="Compare with")
        held.set()
        await chat.until(lambda: chat.turns[:1] == [("user", "Explain it twice")], "sent")
        await chat.answered()
        assert last_content(chat) == "src/notes.md:\n```\n# Notes\n```\n\nExplain it twice"
        assert (chat.prompt.text, names(chat)) == ("Compare with", ["pasted text 1", "src/adder.py"])


async def test_an_edit_that_waits_leaves_the_prompt_and_comes_back_as_one(
    open_chat: Open, folder: Path, held: threading.Event
) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("Explain it")
        await chat.type("My next")
        await chat.press("f4")
        await chat.until(lambda: chat.prompt.text == "Explain it", "edited")
        await at_once(chat, " @src/not\ttwice\r one")
        await waits(chat, "Explain it twice", typed="My next one")
        assert (chat.screen.pane.editing, chat.screen.pane.unsent) == (None, "My next one"), "it is the draft"
        (folder / "src" / "notes.md").unlink()
        held.set()
        await chat.until(lambda: chat.prompt.text == "Explain it twice", "it came back")
        assert (chat.screen.pane.editing, chat.screen.pane.unsent) == (question_id(chat), "My next one")
        await chat.press("enter")
        await chat.until(lambda: chat.turns[:1] == [("user", "Explain it twice")], "a new version")
        await chat.answered()
        assert (len(chat.turns), chat.prompt.text) == (2, "My next one")
        assert len(chat.session.tree.siblings(question_id(chat))) == 2


async def test_a_message_is_edited_again_while_its_edit_waits(
    open_chat: Open, folder: Path, held: threading.Event
) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("Explain it")
        await chat.press("f4")
        await chat.until(lambda: chat.prompt.text == "Explain it", "edited")
        await at_once(chat, " @src/not\ttwice\r")
        await waits(chat, "Explain it twice")
        await chat.press("f4")
        await chat.until(lambda: chat.prompt.text == "Explain it", "edited again")
        await chat.type(" thrice")
        held.set()
        await chat.until(lambda: chat.turns[:1] == [("user", "Explain it twice")], "the first is sent")
        await chat.answered()
        assert (chat.prompt.text, chat.screen.pane.editing is None) == ("Explain it thrice", False)
        await chat.press("enter")
        await chat.until(lambda: chat.turns[:1] == [("user", "Explain it thrice")], "a third version")
        await chat.answered()
        assert len(chat.session.tree.siblings(question_id(chat))) == 3


@pytest.fixture
def slow_walk(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[str]]]:
    """Let no walk through a folder end before the event; return it and the folders of the walks."""
    go_on, walks = threading.Event(), list[str]()

    class SlowWalk(Walk):
        def entries(self) -> Iterator[Entry]:
            walks.append(self._root)
            go_on.wait()
            return super().entries()

    monkeypatch.setattr("edgelm.tui.prompt.file_list.Walk", SlowWalk)
    yield go_on, walks
    go_on.set()


async def test_keys_behind_a_file_wait_for_a_slow_disk(
    open_chat: Open, folder: Path, slow_walk: tuple[threading.Event, list[str]]
) -> None:
    go_on, walks = slow_walk
    assert file_picker.WAIT_S > MAX_WALK_S
    async with open_chat() as chat:
        await chat.ready()
        await chat.press(*"@not")
        await at_once(chat, "es\rWhat is it?\r")
        go_on.set()
        await chat.until(lambda: len(chat.turns) == 2 and chat.answer is None, "answered")
        assert last_content(chat) == "src/notes.md:\n```\n# Notes\n```\n\nWhat is it?"
        assert walks == [str(folder)], "one walk for all letters"


@pytest.mark.parametrize(("word", "key"), [("notes", "\r"), ("src/not", "\t"), ("nosuch", "\r")])
async def test_a_key_is_remembered_where_a_disk_is_too_slow(
    open_chat: Open,
    folder: Path,
    slow_walk: tuple[threading.Event, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    word: str,
    key: str,
) -> None:
    monkeypatch.setattr(file_picker, "WAIT_S", 0.01)
    async with open_chat() as chat:
        await chat.ready()
        await at_once(chat, f"@{word}{key}")
        waited = asyncio.Event()
        chat.prompt.call_later(waited.set)  # behind the keys
        await asyncio.wait_for(waited.wait(), chat.patience_s)
        assert (names(chat), chat.prompt.text) == ([], f"@{word}")
        slow_walk[0].set()
        if word == "nosuch":
            await chat.until(lambda: chat.turns[:1] == [("user", "@nosuch")], "a word is a word")
        else:
            await has(chat, "src/notes.md")
            assert (chat.turns, chat.prompt.text) == ([], "")


async def test_a_folder_is_opened_by_tab_and_by_mouse(open_chat: Open, folder: Path) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.type("@src")
        await chat.sees("src/notes.md")
        await chat.press("tab")
        await chat.until(lambda: chat.prompt.text == "@src/", "the folder is open")
        await chat.sees("this folder")
        await chat.press("enter")
        await has(chat, "src/ (2 files)")
        assert "==> src/adder.py" not in chat.screen.files.attachments[0].text
        assert "==> adder.py <==\n" + CODE in chat.screen.files.attachments[0].text
        chat.prompt.put("@")
        await click(chat, "src/          folder")
        await click(chat, "this folder")
        await chat.press("backspace")
        await chat.until(lambda: names(chat) == [], "taken off")
        chat.prompt.put(f"@{folder}/s")
        await chat.type("r")
        await chat.press("tab", "down", "enter")
        await has(chat, "src/adder.py")


async def test_long_names_leave_no_rest_of_a_second_column(open_chat: Open, folder: Path) -> None:
    (folder / "src" / "deeper" / ("long" * 9 + "er")).mkdir(parents=True)
    async with open_chat(size=(60, 20)) as chat:
        await chat.ready()
        await chat.type("@src")
        await chat.sees("src/adder.py", "src/deeper/longlong")
        rows = [line for line in chat.text.splitlines() if "src/" in line]
        assert len(rows) > 3
        assert not [row for row in rows if "…" in row]


async def test_what_cannot_be_attached(open_chat: Open, folder: Path) -> None:
    (folder / "program").write_bytes(b"\x7fELF\0\0\1")
    (folder / "empty.txt").write_text("")
    os.mkfifo(folder / "pipe")
    async with open_chat() as chat:
        await chat.ready()
        for path, words in (
            (".env", "may hold a key or a password"),
            ("none.txt", "none.txt does not exist"),
            ("program", "program is neither text nor PDF nor a picture"),
            ("'empty.txt'", "empty.txt is empty"),
            ("picture.png", "starter reads no images"),
            ("/dev/zero", "zero lies in a folder of the system"),
            ("pipe", "pipe cannot be read: not a regular file"),
        ):
            await chat.ask_only(f"/attach {path}")
            await chat.hears(words)
        assert names(chat) == []
        assert not chat.screen.files.bar.display


async def test_a_picture_goes_to_another_endpoint(open_chat: Open, folder: Path) -> None:
    async with open_chat() as chat:
        chat.endpoint.is_edgelm = False
        await chat.ready()
        await chat.ask_only("/attach picture.png")
        await has(chat, "picture.png")
        await chat.sees("picture.png picture, 70 B")
        await chat.ask("What is it?")
        url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
        assert last_content(chat) == [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "What is it?"},
        ]


async def test_what_is_pasted(open_chat: Open, folder: Path) -> None:
    (folder / "two words.txt").write_text("2")
    long = "word " * 500
    async with open_chat() as chat:
        await chat.ready()
        await paste(chat, f"'{folder}/two words.txt' {folder}/src/adder.py")
        await has(chat, "two words.txt", "src/adder.py")
        await paste(chat, f"file://{folder}/two%20words.txt")
        await paste(chat, f"{folder}/src/notes\\.md ")
        await has(chat, "two words.txt", "src/adder.py", "src/notes.md")
        await paste(chat, "/no/such/file is not there")
        await chat.until(lambda: chat.prompt.text == "/no/such/file is not there", "a text")
        chat.prompt.put("")
        await paste(chat, long)
        await chat.until(lambda: names(chat)[3:] == ["pasted text 1"], "attached")
        await chat.press("shift+tab", "left", "delete")
        await chat.until(lambda: len(names(chat)) == 3, "taken off")
        await chat.press("enter")
        await chat.until(lambda: chat.prompt.text == long, "it is in the prompt")
        assert chat.prompt.has_focus
        chat.prompt.put("")
        await paste(chat, "1\n" * 40)
        await click(chat, "as text")
        assert chat.prompt.text == "1\n" * 40


LOG = "a line of a log\n" * 60


@pytest.mark.parametrize(("pasted", "content"), [
    (LOG, f"pasted text 1:\n```\n{LOG}```\n\nSum up "),
    ("{folder}/src/notes.md", "src/notes.md:\n```\n# Notes\n```\n\nSum up "),
    ("/no/such/file", "Sum up /no/such/file"),
])  # fmt: skip
async def test_enter_behind_a_paste_in_one_read_sends_it(
    open_chat: Open, folder: Path, pasted: str, content: str
) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await at_once(chat, f"Sum up \x1b[200~{pasted.format(folder=folder)}\x1b[201~\r")
        await chat.until(lambda: len(chat.turns) == 2 and chat.answer is None, "answered")
        assert last_content(chat) == content
        assert (names(chat), chat.prompt.text) == ([], "")


async def test_a_pasted_path_of_a_dead_disk_is_a_text(
    open_chat: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    monkeypatch.setattr("edgelm.tui.pane.PASTE_WAIT_S", 0.01)
    monkeypatch.setattr("edgelm.tui.pane.existing_paths", lambda _: may_end.wait() and [])
    async with open_chat() as chat:
        await chat.ready()
        await at_once(chat, "\x1b[200~/mnt/file\x1b[201~ lies where?")
        await chat.until(lambda: chat.prompt.text == "/mnt/file lies where?", "keys go on")
    may_end.set()


async def test_keys_of_one_read_see_what_those_before_them_did(open_chat: Open, folder: Path) -> None:
    down = "\x1b[B"
    async with open_chat() as chat:
        await chat.ready()
        await chat.type("@src/")
        await chat.sees("src/adder.py", "src/notes.md")
        await at_once(chat, f"{down}{down}\r")
        await has(chat, "src/notes.md")
        await at_once(chat, "\x7fGo on\r")
        await chat.until(lambda: len(chat.turns) == 2 and chat.answer is None, "answered")
        assert last_content(chat) == "Go on", "Backspace took the file off"


async def test_a_message_may_be_a_pasted_text_alone(open_chat: Open, folder: Path) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await paste(chat, "1\r" * 50)  # as terminals write line ends
        await chat.sees("pasted text 1")
        await chat.press("enter")
        await chat.answered()
        assert str(last_content(chat)).startswith("pasted text 1:\n```\n1\n1\n")
        assert chat.session.chat.title == "pasted text 1"


async def test_a_message_that_does_not_fit_is_sent_at_the_second_enter(open_chat: Open, folder: Path) -> None:
    (folder / "long.txt").write_text("word " * 5000)
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask_only("/attach long.txt")
        await chat.sees("long.txt 5,004 tokens", "too long by 908 tokens of 4,096")
        chat.prompt.put("Sum it up")
        await chat.press("enter")
        await chat.hears("the message is too long by", "press Enter again")
        assert chat.endpoint.requests == []
        await chat.press("enter")
        await chat.until(lambda: chat.endpoint.requests, "sent")
        await chat.answered()


async def test_a_changed_file_is_noticed_and_attached_again(open_chat: Open, folder: Path) -> None:
    file = folder / "src" / "adder.py"
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask_only("/attach src/adder.py")
        await has(chat, "src/adder.py")
        await chat.ask("Explain it")
        chat_id = chat.session.chat.id
        stamp = file.stat().st_mtime_ns
        os.utime(file, ns=(stamp, stamp + 10**9))
        await chat.ask("And now?")
        assert len(chat.endpoint.requests) == 2, "a file with a new time and the same content is the same"
        file.write_text(CODE + "# more\n")
        chat.prompt.put("What changed?")
        await chat.press("enter")
        await chat.hears("src/adder.py has changed", "Enter sends all the same")
        await chat.sees("src/adder.py has changed attach again")
        await chat.press("shift+tab", "enter")
        await has(chat, "src/adder.py")
        await chat.press("enter")
        await chat.answered()
        assert "# more" in str(last_content(chat))
        assert "# more" not in chat.session.tree.path()[0].attachments[0].text, "the old version stays"
        file.unlink()
    async with open_chat() as chat:
        await chat.ready()
        chat.screen.open_chat(chat_id)
        await chat.sees("src/adder.py is gone")
        await chat.press(*"hi", "enter")
        await chat.until(lambda: len(chat.turns) == 8, "a notice that was shown stops no message")
        await chat.answered()
        await click(chat, "✕")
        await chat.until(lambda: not chat.screen.files.bar.display, "the notice is closed")


async def test_leaving_an_edit_puts_back_what_was_being_written(open_chat: Open, folder: Path) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("Explain it")
        await pick(chat, "Compare @notes", "enter")
        await has(chat, "src/notes.md")
        for keys in (("f4",), ("f4", "f4")):
            await chat.press(*keys)
            await chat.until(lambda: chat.prompt.text == "Explain it" and names(chat) == [], "the message is edited")
            await chat.press("escape")
            await chat.until(lambda: chat.prompt.text == "Compare ", "the text is back")
            await has(chat, "src/notes.md")
        await chat.press("f4", "end", *" twice", "enter")
        await chat.until(lambda: ("user", "Explain it twice") in chat.turns, "sent")
        await chat.answered()
        assert (chat.prompt.text, names(chat)) == ("Compare ", ["src/notes.md"])
        await chat.press("escape")
        assert (chat.prompt.text, names(chat)) == ("Compare ", ["src/notes.md"])


async def test_an_edited_message_keeps_its_files(open_chat: Open, folder: Path) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask_only("/attach src/adder.py")
        await has(chat, "src/adder.py")
        await chat.ask("Explain it")
        await chat.press("f4")
        await has(chat, "src/adder.py")
        await chat.press("end", *" twice", "enter")
        await chat.answered()
        assert [len(message.attachments) for message in chat.session.tree.path()] == [1, 0]
        assert str(last_content(chat)).endswith("Explain it twice")
        await chat.press("f4")
        await has(chat, "src/adder.py")
        await chat.press("escape")
        await chat.until(lambda: names(chat) == [], "left")
        (folder / "src" / "adder.py").write_text(CODE * 2)
        await chat.press("f4", "enter")
        await chat.sees("src/adder.py has changed attach again")
        await click(chat, "attach again")
        await chat.until(lambda: chat.screen.files.attachments[0].text == CODE * 2, "the new version")
        assert names(chat) == ["src/adder.py"]
        assert "has changed attach" not in chat.text


async def test_a_message_goes_into_no_chat_that_was_opened_meanwhile(
    open_chat: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    checking, go_on = asyncio.Event(), asyncio.Event()

    async def check(message: Outgoing) -> bool:
        checking.set()
        return await go_on.wait()

    async with open_chat() as chat:
        await chat.ready()
        chat.screen.files.add_text("a long text")
        monkeypatch.setattr(chat.screen.files, "check", check)
        await chat.ask_only("for this chat")
        await checking.wait()
        await chat.press("ctrl+n")
        go_on.set()
        await chat.hears("another chat was opened: the message is not sent")
        assert chat.prompt.text == "for this chat"
        assert chat.turns == []
        assert chat.endpoint.requests == []


async def test_tab_completes_what_stands_in_the_prompt_by_now(open_chat: Open) -> None:
    """Not the text of a key before, nor an offer of the empty prompt."""
    async with open_chat() as chat:
        await chat.ready()
        chat.screen.pane.offer([Suggestion("What is this?", "What is this?", "Tab asks it")])
        await at_once(chat, "/them\t")
        await chat.until(lambda: chat.prompt.text == "/theme ", "completed")
        assert chat.turns == []
        chat.prompt.put("")
        await chat.type("/")
        await at_once(chat, "them\t")
        await chat.until(lambda: chat.prompt.text == "/theme ", "completed")
        chat.prompt.put("")
        await chat.type("/")
        await at_once(chat, "s\x1b[B\t")  # Down
        await chat.until(lambda: chat.prompt.text == "/system ", "the second that begins so")


async def test_a_shell_command_is_no_message_where_one_comes_back_or_is_edited(
    open_chat: Open, folder: Path, held: threading.Event
) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("Explain it")
        await at_once(chat, "@src/not\tOne\r")
        await waits(chat, "One")
        await chat.type("!ls -la")
        assert chat.prompt.is_shell
        (folder / "src" / "notes.md").unlink()
        held.set()
        await chat.until(lambda: chat.prompt.text == "One", "it came back")
        chat.prompt.put("")
        await chat.type("!echo secret")
        await chat.press("f4")
        await chat.until(lambda: chat.prompt.text == "Explain it", "edited")
        assert chat.screen.pane.unsent == ""
        await chat.press("escape")
        await chat.type("!")
        await chat.press("up", "up")
        assert (chat.prompt.text, chat.prompt.is_shell) == ("ls -la", True)


async def test_messages_of_one_read_come_back_in_lines_while_an_answer_is_written(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        chat.endpoint.stall_after = 1
        await at_once(chat, "One\rTwo\rThree\rFour\r")
        await chat.hears("an answer is being written")
        await chat.until(lambda: chat.prompt.text == "Two\nThree\nFour", "they came back")
        assert chat.turns[0] == ("user", "One")
