"""Titles that a model gives to chats while nothing else is to be done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgelm.chats.history import TITLE_LEN
from edgelm.chats.store import Store
from edgelm.tui import titles
from edgelm.tui.titles import clean_title
from edgelm.tui.workspace import ChatDefaults
from tests.tui.conftest import Driver, Open
from tests.tui.fake_endpoint import FakeEndpoint

MODEL = "qwen3-4b-q4_k_m.gguf"
QUESTION = "Please explain to me in simple words how the quicksort algorithm sorts a list of numbers"
DEFAULTS = ChatDefaults(MODEL)


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(titles, "IDLE_S", 0.05)
    monkeypatch.setattr(titles, "BUSY_S", 0.05)


@pytest.mark.parametrize(
    ("reply", "title"),
    [
        ("Quicksort Explained", "Quicksort Explained"),
        ('"Quicksort explained."', "Quicksort explained"),
        ("Title: Quicksort\n\nIt sorts.", "Quicksort"),
        ("**Title:** *Quicksort*", "Quicksort"),
        ("# Sortieren für Anfänger", "Sortieren für Anfänger"),
        ("<think>\n\n</think>\n\nQuicksort", "Quicksort"),
        ("C# in a nutshell", "C# in a nutshell"),
        ("快速排序", "快速排序"),
        ("At most six words, in its language.", ""),
        ("A title for this conversation", ""),
        ("", ""),
        ("  \n ", ""),
        ("...", ""),
        ("12", ""),
        ("I'm sorry, but I can't do that", ""),
        ("Quick\x1b[31msort", ""),
        ("<title>Quicksort</title>", ""),
        ("x" * (TITLE_LEN + 1), ""),
        ("The user wants to know how to sort a list of many numbers fast", ""),
    ],
)
def test_only_what_is_a_title_is_taken(reply: str, title: str) -> None:
    assert clean_title(reply) == title


def test_a_reply_that_was_cut_is_no_title() -> None:
    assert clean_title("This conversation is about", cut=True) == ""
    assert clean_title("Quicksort\n\nIt was cut", cut=True) == "Quicksort"


async def test_an_idle_model_gives_the_title(open_chat: Open, endpoint: FakeEndpoint, tmp_path: Path) -> None:
    endpoint.title = '"Quicksort in simple words"\n'
    async with open_chat(defaults=DEFAULTS, size=(120, 32)) as chat:
        await chat.ready()
        await chat.ask(QUESTION)
        await chat.sees("Quicksort in simple words")
        assert chat.app.sub_title == "Quicksort in simple words"
        request = endpoint.probes[-1]
        assert (request["model"], request["max_tokens"], request["reasoning_effort"]) == (MODEL, 24, "none")
        assert QUESTION in request["messages"][-1]["content"]
        endpoint.title = "Another one"
        await chat.ask("And mergesort?")
        await asked_for_all(chat)
        assert chat.session.chat.title == "Quicksort in simple words"
    store = Store(tmp_path / "chats.db")
    assert [(saved.title, saved.summarized, saved.renamed) for saved in store.chats()] == [
        ("Quicksort in simple words", True, False)
    ]
    store.close()


async def test_a_busy_endpoint_is_waited_for(open_chat: Open, endpoint: FakeEndpoint) -> None:
    endpoint.title, endpoint.busy = "Quicksort", 1
    async with open_chat(defaults=DEFAULTS) as chat:
        await chat.ready()
        await chat.ask(QUESTION)
        await chat.pilot.pause(0.3)
        assert endpoint.probes == []
        endpoint.busy = 0
        await chat.until(lambda: chat.session.chat.title == "Quicksort", "the title")


async def test_a_message_of_the_user_ends_the_request(open_chat: Open, endpoint: FakeEndpoint) -> None:
    endpoint.title, endpoint.stall_titles = "Quicksort", True
    async with open_chat(defaults=DEFAULTS) as chat:
        await chat.ready()
        await chat.ask(QUESTION)
        await chat.until(lambda: endpoint.probes, "the request for a title")
        endpoint.stall_titles = False
        await chat.ask_only("Go on")
        await chat.until(lambda: endpoint.cancelled_titles == 1, "its end")
        await chat.answered()
        await chat.until(lambda: chat.session.chat.title == "Quicksort", "the title after the answer")


def _no_edgelm(endpoint: FakeEndpoint) -> None:
    endpoint.is_edgelm = False


def _refused(endpoint: FakeEndpoint) -> None:
    endpoint.title = "I'm sorry, I cannot do that"


@pytest.mark.parametrize("prepare", [_no_edgelm, _refused])
async def test_the_cut_title_stays(
    open_chat: Open, endpoint: FakeEndpoint, prepare: Callable[[FakeEndpoint], Any]
) -> None:
    endpoint.title = "Quicksort"
    prepare(endpoint)
    async with open_chat(defaults=DEFAULTS) as chat:
        await chat.ready()
        for question in (QUESTION, "Go on"):
            await chat.ask(question)
            await asked_for_all(chat)
        assert chat.session.chat.title == "Please explain to me in simple words how the quicksort…"
        assert len(endpoint.probes) == (1 if endpoint.is_edgelm else 0)  # no second time after a failure


async def test_the_users_title_and_the_starters_chats_are_left_alone(open_chat: Open, endpoint: FakeEndpoint) -> None:
    endpoint.title = "Quicksort"
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask(QUESTION)
        await asked_for_all(chat)
        await chat.press("ctrl+n")
        await chat.ask("/model " + MODEL)
        await chat.until(lambda: chat.screen.workspace.model == MODEL, "the model")
        chat.session.rename("Mine")
        await chat.ask(QUESTION)
        await asked_for_all(chat)
        assert (chat.session.chat.title, endpoint.probes) == ("Mine", [])


async def asked_for_all(chat: Driver) -> None:
    """Wait until no title is asked for any more."""
    await chat.until(lambda: not [work for work in chat.screen.workers if work.group == "titles"], "no request")
