"""Which model answers: the one that was named, and no other in its place."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from textual.widgets import Input

from edgelm.tui.prompt.offers import QUESTIONS
from edgelm.tui.workspace import ChatDefaults
from tests.tui.conftest import Open
from tests.tui.fake_endpoint import FakeEndpoint


async def test_no_other_model_answers_for_a_named_one(open_chat: Open, endpoint: FakeEndpoint) -> None:
    async with open_chat(defaults=ChatDefaults(model="nosuch")) as chat:
        await chat.sees("the endpoint does not offer nosuch; /model shows what it offers")
        await chat.ask("Hello")
        await chat.sees("the endpoint does not offer nosuch")
        assert endpoint.requests == []
        await chat.ask("/model starter")
        await chat.ask("/regenerate")
    assert [request["model"] for request in endpoint.requests] == ["starter"]


async def test_a_chat_keeps_the_model_that_answered_it(open_chat: Open, endpoint: FakeEndpoint, tmp_path: Path) -> None:
    path = str(tmp_path / "own.gguf")
    async with open_chat(defaults=ChatDefaults(model=path)) as chat:
        await chat.ready()
        await chat.ask("Hello")
    async with open_chat() as chat:
        await chat.ready()
        assert chat.screen.workspace.model == "starter"
        await chat.screen.workspace.open_chat(next(iter(chat.screen.workspace.chats)))
        chat.screen.view.show_chat()
        await chat.sees("own.gguf")
        await chat.ask("And now?")
        assert chat.session.chat.model == path
    assert [request["model"] for request in endpoint.requests] == [path, path]


async def test_a_chat_whose_model_is_gone_says_so(open_chat: Open, endpoint: FakeEndpoint) -> None:
    endpoint.models = ["one"]
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("Hello")
        chat_id = chat.session.chat.id
    endpoint.models = ["two"]
    async with open_chat() as chat:
        await chat.ready()
        await chat.screen.workspace.open_chat(chat_id)
        chat.screen.view.show_chat()
        await chat.ask("And now?")
        await chat.sees("the endpoint does not offer one; /model shows what it offers")
    assert [request["model"] for request in endpoint.requests] == ["one"]


async def test_another_model_than_the_last_runs_is_told(open_chat: Open, endpoint: FakeEndpoint) -> None:
    endpoint.models = ["one"]
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("/model one")
    endpoint.models = ["two"]
    async with open_chat() as chat:
        await chat.hears("one is not offered here: two answers new chats")


async def test_an_endpoint_shows_its_models_and_things_to_try(open_chat: Open, endpoint: FakeEndpoint) -> None:
    endpoint.models = ["big", "coder", "draft", "eye", "fast"]
    async with open_chat(defaults=ChatDefaults(model="big")) as chat:
        await chat.ready()
        await chat.sees(f"big · answers from {endpoint.address}", "also there: coder, draft, eye and 1 more")
        await chat.sees("What you write is sent there.", *QUESTIONS, "/attach")
        assert "/pull" not in chat.text, "nothing can be pulled there"
        await chat.press("down", "enter")
        await chat.until(lambda: len(chat.turns) == 2, "the question and its answer")
        await chat.answered()
        assert chat.turns[0] == ("user", QUESTIONS[0])
        assert QUESTIONS[1] not in chat.text


@pytest.mark.usefixtures("far")
async def test_a_chat_goes_to_another_machine_only_when_its_user_agrees(
    open_chat: Open, endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    async with open_chat() as chat:
        await chat.ask("a secret")
        await chat.ask("another")  # it was begun there: nobody is asked
        chat_id = chat.session.chat.id
    async with FakeEndpoint().serve() as remote, open_chat(address=remote.address) as chat:
        await chat.ready()
        await chat.screen.workspace.open_chat(chat_id)
        chat.screen.view.show_chat()
        await chat.ask_only("go on")
        await chat.sees("Send this chat?", "was not written with 127.0.0.1", "its 5 messages")
        assert remote.requests == []
        await chat.press("enter")  # no
        await chat.sees("this chat is not sent to 127.0.0.1")
        assert remote.requests == []
        await chat.ask_only("/regenerate")
        await chat.sees("Send this chat?")
        await chat.press("down", "enter")
        await chat.until(lambda: len(remote.requests) == 1, "the request")
        await chat.answered()
        await chat.ask("and on")
        assert len(remote.requests) == 2


async def test_a_chat_goes_to_another_endpoint_of_this_machine_without_a_question(
    open_chat: Open, endpoint: FakeEndpoint
) -> None:
    async with open_chat() as chat:
        await chat.ask("a secret")
        chat_id = chat.session.chat.id
    async with FakeEndpoint().serve() as other, open_chat(address=other.address) as chat:
        await chat.ready()
        await chat.screen.workspace.open_chat(chat_id)
        chat.screen.view.show_chat()
        await chat.ask("go on")
        assert len(other.requests) == 1


async def test_another_name_of_a_model_of_edgelm(open_chat: Open, endpoint: FakeEndpoint) -> None:
    """It lists one of the names that it knows."""
    endpoint.other_names = ["org/coder:q4"]
    async with open_chat(defaults=ChatDefaults(model="org/coder:q4")) as chat:
        await chat.ready()
        assert "does not offer" not in chat.text
        await chat.ask("Hello")
        await chat.ask("/model starter")
        await chat.ask("Again")
        await chat.ask("/model org/coder:q4")
        await chat.ask("And again")
    assert [request["model"] for request in endpoint.requests] == ["org/coder:q4", "starter", "org/coder:q4"]


async def test_only_edgelm_offers_to_explore(open_chat: Open, endpoint: FakeEndpoint) -> None:
    async with open_chat() as chat:
        await chat.ask("Hello")
        chat.transcript.focus()
        await chat.sees("x explore")
    endpoint.is_edgelm = False
    async with open_chat() as chat:
        await chat.ask("Hello")
        chat.transcript.focus()
        await chat.sees("r again")
        assert "x explore" not in chat.text


async def test_a_path_is_no_model_of_another_endpoint(open_chat: Open, endpoint: FakeEndpoint) -> None:
    endpoint.is_edgelm = False
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask("/model /tmp/own.gguf")
        await chat.hears("this endpoint takes no path of a model")
        assert chat.screen.workspace.model == "starter"


async def test_a_path_is_one_of_the_endpoints_machine(open_chat: Open, endpoint: FakeEndpoint) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.press("ctrl+o")
        await chat.type("/tmp/")
        await chat.sees("A folder of the endpoint's machine, not of this one", "type the whole path of a model there")
        assert "no model has this name" not in chat.text
        await chat.type("own.gguf")
        await chat.sees("A file or folder of the endpoint's machine, not of this one", "use own.gguf  in /tmp")
        await chat.press("enter")
        await chat.hears("offers no model at /tmp/own.gguf; a path is one of that machine")
        assert chat.screen.workspace.model == "starter"


async def test_a_path_is_chosen_by_the_picker_and_listed_as_recent(
    open_chat: Open, endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    path = tmp_path / "own.gguf"
    await asyncio.to_thread(path.write_bytes, b"GGUF")
    async with open_chat(size=(200, 40), pulling=("false",)) as chat:
        await chat.ready()
        await chat.press("ctrl+o")
        await chat.type(str(path))
        await chat.sees("A file or folder", "use own.gguf")
        await chat.press("enter")
        await chat.until(lambda: chat.screen.workspace.model == str(path), "the model")
        await chat.ask("Hello")
        await chat.press("ctrl+o")
        await chat.sees("Recent", "own.gguf")
    assert [request["model"] for request in endpoint.requests] == [str(path)]


async def test_a_model_that_came_after_the_start_answers(open_chat: Open, endpoint: FakeEndpoint) -> None:
    async with open_chat() as chat:
        await chat.ready()
        endpoint.models = [*endpoint.models, "new"]
        chat.session.set_model("new")
        await chat.ask("Hello")
    assert [request["model"] for request in endpoint.requests] == ["new"]


async def test_the_latest_tag_may_be_omitted(open_chat: Open, endpoint: FakeEndpoint) -> None:
    endpoint.is_edgelm, endpoint.models = False, ["other:latest", "llama3:latest"]
    async with open_chat(defaults=ChatDefaults(model="llama3")) as chat:
        await chat.ready()
        await chat.ask("Hello")
    assert [request["model"] for request in endpoint.requests] == ["llama3:latest"]


async def test_the_picker_browses_folders_for_models(open_chat: Open, tmp_path: Path) -> None:
    models = tmp_path / "models"
    await asyncio.to_thread((models / "more").mkdir, parents=True)
    for name in ("big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "own.gguf", "notes.txt"):
        await asyncio.to_thread((models / name).write_bytes, b"GGUF")
    await asyncio.to_thread((models / "folder").mkdir)
    await asyncio.to_thread((models / "folder" / "config.json").write_text, "{}")
    async with open_chat(size=(200, 40), pulling=("false",)) as chat:
        await chat.ready()
        await chat.press("ctrl+o")
        await chat.sees("a file or folder …")
        chat.app.screen.query_one(Input).value = f"{tmp_path}/mod"
        await chat.sees("models/")
        await chat.press("tab")
        await chat.until(lambda: chat.app.screen.query_one(Input).value == f"{models}/", "completed")
        await chat.sees("own.gguf", "big-00001-of-00002.gguf", "more/", "folder  folder of a model")
        assert "big-00002" not in chat.text
        assert "notes.txt" not in chat.text
        await chat.type("ow")
        await chat.press("down", "enter")
        await chat.until(lambda: chat.screen.workspace.model == str(models / "own.gguf"), "the model")
        await chat.press("ctrl+o")
        chat.app.screen.query_one(Input).value = f"{models}/mor"
        await chat.sees("more/")
        await chat.press("down", "enter")
        await chat.until(lambda: chat.app.screen.query_one(Input).value == f"{models}/more/", "opened")
        await chat.sees("no GGUF file and no folder here")
