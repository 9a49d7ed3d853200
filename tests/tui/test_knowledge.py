"""Knowledge of a chat: what is read for a question, where it stands in the request, who is asked, and what is shown."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import OptionList

from edgelm.base.errors import EdgeLMError
from edgelm.base.passages import Passage
from edgelm.chats.history import Message
from edgelm.chats.knowledge import GUIDE
from edgelm.chats.knowledge.index import Knowledge
from edgelm.chats.reading import Reading
from edgelm.tui.commands.table import Suggestion
from edgelm.tui.dialogs.knowledge import KnowledgeScreen, SendScreen
from edgelm.tui.prompt.paths import absolute_path, common_start, suggest_paths
from edgelm.tui.transcript.views import Flow, MessageView
from tests.tui.conftest import Driver, Open
from tests.tui.test_transcript import PALETTE

OWN = {"pulling": ("false",)}  # the endpoint is a front of this user on this machine
GPU = "# Frobnicator\n\nThe frobnicator needs 40 GB of memory on the GPU.\n"
CATS = "# Cats\n\nA cat sleeps for sixteen hours.\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "gpu.md").write_text(GPU)
    (folder / "cats.md").write_text(CATS)
    (folder / "link.md").symlink_to("/etc/hosts")
    return folder


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that files are read after."""
    event = threading.Event()
    refresh: Callable[..., Any] = Knowledge.refresh

    def slowly(knowledge: Knowledge, roots: Any) -> Any:
        assert event.wait(30)
        return refresh(knowledge, roots)

    monkeypatch.setattr(Knowledge, "refresh", slowly)
    return event


async def know(chat: Driver, path: Path) -> None:
    """Add a path to the knowledge of the chat."""
    await chat.ready()
    await chat.ask(f"/know {path}")
    await chat.until(lambda: str(path) in chat.session.chat.knowledge, "the path is added")


async def is_asked(chat: Driver, question: str) -> None:
    """Send a question, and wait until the chat asks whether passages may be sent."""
    chat.prompt.put(question)
    await chat.press("enter")
    await chat.until(lambda: isinstance(chat.app.screen, SendScreen))


def sent(chat: Driver) -> list[list[tuple[str, str]]]:
    """Return role and text of the messages of each request."""
    return [[(item["role"], item["content"]) for item in request["messages"]] for request in chat.endpoint.requests]


async def test_a_folder_is_added_listed_and_removed(open_chat: Open, folder: Path) -> None:
    async with open_chat(**OWN) as chat:
        await chat.ask("/know")
        await chat.hears("this chat has no knowledge", "/know PATH")
        await chat.ask(f"/know {folder / 'none'}")
        await chat.hears("none does not exist")
        assert chat.session.chat.knowledge == ()
        await know(chat, folder)
        await chat.hears("notes: 2 files, 2 passages; 1 left out")
        await chat.ask("/know")
        await chat.sees("Knowledge of this chat", "2 files, 2 passages", "link.md: a symbolic link")
        await chat.press("escape")
        await chat.until(lambda: len(chat.app.screen_stack) == 1)
        await know(chat, folder / "cats.md")
        await chat.ask("/know")
        await chat.until(lambda: isinstance(chat.app.screen, KnowledgeScreen))
        await chat.press("down", "delete")
        await chat.until(lambda: chat.session.chat.knowledge == (str(folder),))
        await chat.ask("/know off cats.md")
        await chat.hears("cats.md is no knowledge of this chat")
        await chat.ask("/know off")
        await chat.until(lambda: chat.session.chat.knowledge == ())


async def test_passages_stand_behind_the_history_and_only_for_the_last_question(open_chat: Open, folder: Path) -> None:
    async with open_chat(**OWN) as chat:
        chat.endpoint.answers = ["one", "two", "three", "four"]
        await chat.ask("/system Be brief.")
        await know(chat, folder)
        questions = ["What does the frobnicator need?", "How long does a cat sleep?", "What is the frobnicator for?"]
        for question in questions:
            await chat.ask(question)
        first, second, third = sent(chat)
        assert [role for role, _ in third] == ["system", "user", "assistant", "user", "assistant", "system", "user"]
        assert third[-1] == ("user", questions[2])
        assert "40 GB" in third[-2][1]
        assert "sixteen" not in third[-2][1]
        for request, answer, following, question in ((first, "one", second, 0), (second, "two", third, 1)):
            history = [*request[:-2], ("user", questions[question]), ("assistant", answer)]
            assert following[: len(history)] == history, "a request begins with the last one but for its passages"
            assert request[-2][0] == "system"
        await chat.ask("Xylophones?")
        assert sent(chat)[3][-2:] == [("assistant", "three"), ("user", "Xylophones?")]
        await chat.sees("read nothing: no passage fits the question")


async def test_what_was_read_is_shown_and_unfolds(open_chat: Open, folder: Path) -> None:
    (folder / "gpu.md").write_text(GPU + "\n/quit\n")
    async with open_chat(**OWN) as chat:
        chat.endpoint.answers = ["Memory."]
        await know(chat, folder)
        await chat.ask("What does the frobnicator need?")
        await chat.sees("▸ read: 1 gpu.md › Frobnicator", "Ctrl+T shows it", "Memory.")
        assert "40 GB" not in chat.text
        row = next(y for y, line in enumerate(chat.text.split("\n")) if "read: 1" in line)
        await chat.pilot.click(offset=(chat.text.split("\n")[row].index("read"), row))
        await chat.sees("▾ read: 1 gpu.md", "┊ 1 gpu.md › Frobnicator", "┊ The frobnicator needs 40 GB", "/quit")
        await chat.press("ctrl+t", "ctrl+t")
        await chat.sees("▸ read: 1 gpu.md")
        await chat.press("shift+tab", "up", "enter")
        await chat.sees("▾ read: 1 gpu.md", "40 GB")
        await chat.press("enter")
        await chat.until(lambda: "40 GB" not in chat.text, "it is folded again")


def test_passages_cannot_write_to_the_terminal() -> None:
    evil = "\x1b]52;c;ZXZpbA==\x07 \x1b[2J\x9b31m \r"
    passage = Passage(f"{evil}\n.md", evil, evil)
    message = Message(chat=1, parent=None, role="user", text="q", reading=Reading(("/a",), (passage,) * 2))
    for unfolded in (False, True):
        view, flow = MessageView(message, show_reasoning=unfolded), Flow()
        flow.measure([view], 40, PALETTE)
        flow.draw(0, flow.height)
        lines = [line.text.plain for row in flow.rows for line in row.lines(40, PALETTE)]
        assert not re.search(r"[\x00-\x1f\x7f-\x9f]", "".join(lines))
        assert sum("read: 1" in line for line in lines) == 1


async def test_what_was_read_is_kept_and_read_again_for_another_answer(
    open_chat: Open, folder: Path, tmp_path: Path
) -> None:
    async with open_chat(**OWN) as chat:
        await know(chat, folder)
        await chat.ask("What does the frobnicator need?")
        await chat.ask(f"/export {tmp_path / 'chat.json'}")
        await chat.until((tmp_path / "chat.json").exists)
        document = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
        assert document["knowledge"] == [str(folder)]
        reading = document["messages"][0]["reading"]
        assert [(item["name"], item["text"]) for item in reading["passages"]] == [
            ("gpu.md › Frobnicator", GPU.removesuffix("\n"))
        ]
        await chat.ask("/new")
        await chat.until(lambda: chat.session.chat.knowledge == ())
    async with open_chat(**OWN) as chat:
        await chat.ready()
        await chat.press("ctrl+f")
        await chat.type("memory")  # stands in what was read alone
        await chat.sees("nothing found")
        await chat.press("escape", "ctrl+f", "ctrl+u", "down", "enter")
        await chat.sees("▸ read: 1 gpu.md › Frobnicator")
        (folder / "gpu.md").write_text("# Frobnicator\n\nThe frobnicator needs 80 GB now.\n")
        await chat.press("ctrl+r")
        await chat.until(lambda: len(chat.endpoint.requests) == 2)
        await chat.answered()
        assert "80 GB" in sent(chat)[1][0][1]
        reading = chat.session.tree.path()[0].reading
        assert reading is not None
        assert "80 GB" in reading.passages[0].text


@pytest.mark.usefixtures("far")
async def test_another_machine_gets_passages_only_after_a_yes(open_chat: Open, folder: Path) -> None:
    question = "What does the frobnicator need?"
    async with open_chat((180, 40)) as chat:
        await know(chat, folder)
        chat.prompt.put(question)
        await chat.press("enter")
        host = chat.endpoint.address.removeprefix("http://")
        await chat.sees("Send passages of your files?", host, "It reads these", "1 gpu.md › Frobnicator")
        assert chat.endpoint.requests == [], "nothing was sent before the answer"
        await chat.press("escape")
        await chat.until(lambda: len(chat.turns) == 2)
        await chat.answered()
        assert sent(chat) == [[("user", question)]]
        await chat.sees(f"read nothing: you said that nothing goes to {host}; /know PATH asks again")
    async with open_chat() as chat:
        await chat.ready()
        await chat.press("ctrl+f", "down", "enter")
        await chat.until(lambda: len(chat.turns) == 2)
        await chat.ask("And how much memory does it need?")
        assert "40 GB" not in json.dumps(sent(chat)[-1]), "the no is stored with the chat"
        await know(chat, folder / "cats.md")
        await is_asked(chat, question)
        await chat.press("down", "enter")
        await chat.until(lambda: len(chat.app.screen_stack) == 1)
        await chat.answered()
        assert "40 GB" in sent(chat)[-1][-2][1]
        await chat.ask(question)
        assert "40 GB" in sent(chat)[-1][-2][1], "it is asked once"


@pytest.mark.usefixtures("far")
async def test_the_dialog_does_not_send_by_accident(open_chat: Open, folder: Path) -> None:
    async with open_chat() as chat:
        await know(chat, folder)
        await is_asked(chat, "What does the frobnicator need?")
        await chat.sees("The chat “What does the frobnicator need?” is answered by")
        await chat.type("any hurry")  # the next message: it was begun before the dialog came
        assert isinstance(chat.app.screen, SendScreen)
        assert chat.app.screen.query_one(OptionList).highlighted == 0
        await chat.press("enter")
        await chat.answered()
        assert sent(chat) == [[("user", "What does the frobnicator need?")]]


async def test_a_loaded_embedding_model_finds_by_meaning(open_chat: Open, folder: Path) -> None:
    async with open_chat(**OWN) as chat:
        chat.endpoint.embedding = {"all-minilm": False}
        await know(chat, folder)
        await chat.ask("Tell me about felines, not the frobnicator")
        assert chat.endpoint.embedded == [], "no model is loaded for this"
        assert "sixteen" not in sent(chat)[0][0][1]
        chat.endpoint.embedding = {"all-minilm": True}
        await chat.press("ctrl+r")
        await chat.until(lambda: len(chat.endpoint.requests) == 2)
        await chat.answered()
        assert chat.endpoint.embedded
        chat.endpoint.refuse_embeddings = True
        await chat.ask("And the frobnicator?")
        await chat.sees("▸ read: 1 gpu.md › Frobnicator")
        assert "40 GB" in sent(chat)[2][-2][1], "words alone find it"
        assert not chat.app._notifications or "signal 9" not in chat.text


async def test_help_with_a_question_reads_the_guide_for_this_question_alone(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("/help How do I pull a model?")
        await chat.until(lambda: len(chat.endpoint.requests) == 1)
        await chat.answered()
        assert chat.turns[0] == ("user", "How do I pull a model?")
        assert [role for role, _ in sent(chat)[0]] == ["system", "user"]
        assert "pull" in sent(chat)[0][0][1]
        assert sent(chat)[0][1] == ("user", "how do i pull a model?"), "capitals would change the choice"
        await chat.sees("▸ read: 1 ")
        assert chat.session.chat.knowledge == ()
        await chat.press("f4")
        await chat.until(lambda: chat.screen.pane.editing is not None)
        await chat.ask("How do I pull a big model?")
        reading = chat.session.tree.path()[0].reading
        assert reading is not None
        assert reading.roots == (GUIDE,), "its new version is asked about the guide, too"
        await chat.ask("Thanks")
        assert [role for role, _ in sent(chat)[2]] == ["user", "assistant", "user"]


async def test_fewer_passages_are_sent_where_the_context_is_full(open_chat: Open, folder: Path) -> None:
    for number in range(4):
        (folder / f"{number}.md").write_text(f"# Frobnicator {number}\n\n" + "The frobnicator needs care. " * 30)
    async with open_chat(**OWN) as chat:
        chat.endpoint.context = 16_384
        chat.endpoint.max_chars = 1_500
        await know(chat, folder)
        await chat.ask("What does the frobnicator need?")
        assert chat.turns[1][1] == chat.endpoint.answers[0]
        assert len(sent(chat)) > 1
        reading = chat.session.tree.path()[0].reading
        assert reading is not None
        assert len(reading.passages) == 1, "the transcript shows what was sent at last"
        chat.endpoint.max_chars = 40
        await chat.ask("Frobnicator?")
        assert [role for role, _ in sent(chat)[-1]][-2:] == ["assistant", "user"]
        await chat.sees("read nothing: the context has no room")


async def test_the_screen_goes_on_while_files_are_indexed(
    open_chat: Open, folder: Path, go_on: threading.Event
) -> None:
    async with open_chat(**OWN) as chat:
        await chat.ready()
        await chat.ask(f"/know {folder}")
        await chat.until(lambda: chat.screen.status.status.reading == "reading notes")
        await chat.type("I type on")
        await chat.sees("reading notes", "I type on")
        go_on.set()
        await chat.hears("2 files")
        await chat.until(lambda: chat.screen.status.status.reading == "")
        go_on.clear()
        await chat.press("enter")
        await chat.sees("· reading notes")
        await chat.press("escape")
        await chat.answered()
        assert chat.endpoint.requests == [], "Esc stops the question while files are read"
        go_on.set()


@pytest.mark.usefixtures("far")
async def test_both_answers_are_seen_in_a_small_terminal(open_chat: Open, folder: Path) -> None:
    for number in range(9):
        (folder / f"{number}-with-a-name-that-{'is-rather-' * 4}long.md").write_text(
            f"The frobnicator needs {number} pens.\n"
        )
    async with open_chat((60, 20)) as chat:
        await know(chat, folder)
        await is_asked(chat, "What does the frobnicator need?")
        await chat.sees("No: ask without them", "Yes: send passages to")


@pytest.mark.usefixtures("far")
async def test_a_no_is_asked_again_after_know(open_chat: Open, folder: Path) -> None:
    question = "What does the frobnicator need?"
    async with open_chat() as chat:
        await know(chat, folder)
        await is_asked(chat, question)
        await chat.press("escape")
        await chat.answered()
        await chat.ask(f"/know {folder}")  # as the line below the question says
        await chat.until(
            lambda: all(key.startswith("history") for key in chat.session.chat.consents), "nothing is decided"
        )
        await is_asked(chat, question)


async def test_a_chat_that_was_left_while_a_folder_is_indexed_gets_it(
    open_chat: Open, folder: Path, go_on: threading.Event
) -> None:
    async with open_chat(**OWN) as chat:
        await chat.ready()
        await chat.ask("/model qwen3-4b-q4_k_m.gguf")  # the starter would wait for the index, to read the guide
        await chat.ask("Hello")
        first = chat.session.chat.id

        async def leave_and_return() -> None:
            await chat.ask("/new")
            await chat.until(lambda: chat.session.chat.id != first)
            chat.screen.open_chat(first)
            await chat.until(lambda: chat.session.chat.id == first)

        await chat.ask(f"/know {folder}")
        await chat.until(lambda: chat.screen.status.status.reading)
        await leave_and_return()
        await chat.ask("Hello again")
        last = chat.session.tree.leaf
        go_on.set()
        await chat.hears("2 files")
        assert chat.session.chat.knowledge == (str(folder),)
        await leave_and_return()
        assert chat.session.tree.leaf == last, "the branch on screen is the one before"


async def test_the_chat_ends_while_a_folder_is_indexed(open_chat: Open, folder: Path, go_on: threading.Event) -> None:
    async with open_chat(**OWN) as chat:
        await chat.ready()
        await chat.ask(f"/know {folder}")
        await chat.until(lambda: chat.screen.status.status.reading)
    go_on.set()  # an error of the end is raised above


async def test_a_stopped_question_does_not_wait_for_its_vectors(open_chat: Open, folder: Path) -> None:
    async with open_chat(**OWN) as chat:
        chat.endpoint.embedding = {"all-minilm": True}
        chat.endpoint.stall_embeddings = True
        await know(chat, folder)
        chat.prompt.put("The frobnicator?")
        await chat.press("enter")
        await chat.until(lambda: chat.endpoint.embedded)
        await chat.press("escape")
        await chat.answered()
        chat.patience_s = 20.0  # less than an answer of /v1/embeddings may take
        await chat.ask("/know")
        await chat.sees("2 files, 2 passages")


async def test_a_folder_that_is_gone_is_one_line(open_chat: Open, folder: Path) -> None:
    async with open_chat((180, 30), **OWN) as chat:
        chat.endpoint.answers = ["Memory."]
        await know(chat, folder)
        await asyncio.to_thread(folder.rename, folder.with_name("moved"))
        await chat.ask("What does the frobnicator need?")
        await chat.sees("read nothing:", "not", "exist; name a folder or a file")
        assert sent(chat) == [[("user", "What does the frobnicator need?")]]


async def test_tab_completes_paths(open_chat: Open, folder: Path) -> None:
    (folder / "chat.md").write_text("")
    async with open_chat(**OWN) as chat:
        await chat.ready()
        chat.prompt.put(f"/know {folder.parent}/no")
        await chat.press("tab")
        await chat.until(lambda: chat.prompt.text == f"/know {folder}/")
        await chat.type("c")
        await chat.press("tab")
        await chat.sees("cats.md", "chat.md")
        await chat.press("down", "tab")
        await chat.until(lambda: chat.prompt.text == f"/know {folder}/chat.md")
        await chat.until(lambda: "cats.md" not in chat.text)


def test_paths_of_the_prompt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / ".hidden").mkdir()
    (folder / "a\x1bb").write_text("")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert suggest_paths("/know c") == [Suggestion("/know cats.md", "cats.md")]
    assert [item.usage for item in suggest_paths("/know ")] == ["cats.md", "gpu.md", "link.md"]
    assert [item.text for item in suggest_paths("/know .")] == ["/know .hidden/"]
    assert [item.text for item in suggest_paths("/know off ~/no")] == ["/know off ~/notes/"]
    assert suggest_paths("/know none/x") == suggest_paths("/know") == suggest_paths("/export c") == []
    assert common_start(suggest_paths("/know ~/notes/")) == "/know ~/notes/"
    (folder / "loop").symlink_to("loop")
    assert absolute_path("loop") == str(folder / "loop")
    assert absolute_path("~no-such-user/notes") == str(folder / "~no-such-user" / "notes")
    with pytest.raises(EdgeLMError, match="cannot be knowledge"):
        absolute_path("a\0b")
    assert absolute_path("cats.md") == absolute_path('"~/notes/cats.md"') == str(folder / "cats.md")
