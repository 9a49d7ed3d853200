"""Pages of the web in a message: asked for, fetched, attached."""

from __future__ import annotations

import asyncio

import pytest

from edgelm.base.errors import RequestError
from edgelm.chats.attachments import Attachment
from edgelm.tui.commands import messages
from edgelm.tui.dialogs.basic import ConfirmScreen, PickScreen
from tests.tui.conftest import Driver, Open
from tests.tui.test_mouse import opens

URL = "https://ferrets.example/care"


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fetch nothing; return the list of what would have been."""
    urls: list[str] = []

    async def fetch(url: str) -> Attachment:
        urls.append(url)
        if "broken" in url:
            raise RequestError("ferrets.example answers 500", "open it in a browser")
        return Attachment(kind="text", name=url, text="They sleep a lot.\n")

    monkeypatch.setattr(messages, "fetched", fetch)
    return urls


async def send(chat: Driver, text: str) -> None:
    chat.prompt.put(text)
    await chat.press("enter")


def last(chat: Driver) -> object:
    return chat.endpoint.requests[-1]["messages"][-1]["content"]


async def test_a_page_is_fetched_after_asking(open_chat: Open, fetched: list[str]) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await send(chat, f"Sum up {URL}.")
        await opens(chat, PickScreen)
        await chat.sees("The model cannot open addresses", "Fetch its page from ferrets.example")
        assert fetched == []
        assert chat.endpoint.requests == []
        await chat.press("down", "enter")
        await chat.until(lambda: len(chat.turns) == 2, "sent")
        await chat.answered()
        assert fetched == [URL]
        assert last(chat) == f"{URL}:\n```\nThey sleep a lot.\n```\n\nSum up {URL}."
        await chat.ask(f"Once more: {URL}")  # it is offered once
        assert fetched == [URL]


async def test_enter_sends_the_message_as_it_is(open_chat: Open, fetched: list[str]) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await send(chat, f"What is {URL}?")
        await opens(chat, PickScreen)
        await chat.press("enter")
        await chat.until(lambda: len(chat.turns) == 2, "sent")
        await chat.answered()
        assert (fetched, last(chat)) == ([], f"What is {URL}?")
        await send(chat, "and https://other.example/ ?")
        await opens(chat, PickScreen)
        await chat.press("escape")
        await chat.until(lambda: chat.prompt.text == "and https://other.example/ ?", "it is given back")
        await chat.press("enter")
        await opens(chat, PickScreen)
        await chat.press("up", "enter")  # from the first to the last: never again
        await chat.until(lambda: len(chat.turns) == 4, "sent")
        await chat.answered()
        await chat.ask("https://third.example/")
        assert (len(chat.turns), fetched) == (6, [])


async def test_a_message_whose_page_fails_is_not_sent(open_chat: Open, fetched: list[str]) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await send(chat, f"Sum up {URL}/broken")
        await opens(chat, PickScreen)
        await chat.press("down", "enter")
        await chat.hears("ferrets.example answers 500")
        await chat.until(lambda: chat.prompt.text == f"Sum up {URL}/broken", "it is given back")
        assert chat.endpoint.requests == []
        await chat.press("enter")
        await chat.until(lambda: len(chat.turns) == 2, "sent as it is")


async def test_attach_takes_an_address(open_chat: Open, fetched: list[str]) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.ask(f"/attach {URL}")
        await opens(chat, ConfirmScreen)
        await chat.sees("ferrets.example is asked for this page, from this machine.")
        await chat.press("n")
        await chat.until(lambda: len(chat.app.screen_stack) == 1, "closed")
        assert fetched == []
        await chat.ask(f"/attach {URL}")
        await opens(chat, ConfirmScreen)
        await chat.press("y")
        await chat.sees("ferrets.example/care")
        await chat.ask("Sum it up")
        assert last(chat) == f"{URL}:\n```\nThey sleep a lot.\n```\n\nSum it up"


async def test_a_page_is_not_put_into_another_chat(open_chat: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    came = asyncio.Event()

    async def fetch(url: str) -> Attachment:
        await came.wait()
        return Attachment(kind="text", name=url, text="They sleep a lot.\n")

    monkeypatch.setattr(messages, "fetched", fetch)
    async with open_chat() as chat:
        await chat.ask("first")
        await chat.ask(f"/attach {URL}")
        await opens(chat, ConfirmScreen)
        await chat.press("y")
        await chat.sees("fetching ferrets.example")
        begun = chat.session
        await chat.press("ctrl+n")
        await chat.until(lambda: chat.session is not begun, "another chat")
        came.set()
        await chat.hears("another chat was opened meanwhile")
        assert chat.screen.files.attachments == ()


async def test_what_is_sent_while_a_page_is_fetched_waits(open_chat: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    came = asyncio.Event()

    async def fetch(url: str) -> Attachment:
        await came.wait()
        return Attachment(kind="text", name=url, text="They sleep a lot.\n")

    monkeypatch.setattr(messages, "fetched", fetch)
    async with open_chat() as chat:
        await chat.ready()
        await send(chat, f"Sum up {URL}")
        await opens(chat, PickScreen)
        await chat.press("down", "enter")
        await chat.sees("fetching ferrets.example")
        await send(chat, "Two")
        chat.screen.files.add_text("for Two")
        assert chat.turns == []
        chat.endpoint.stall_after = 1
        came.set()
        await chat.until(lambda: chat.turns[:1] == [("user", f"Sum up {URL}")], "sent first")
        await chat.until(lambda: chat.prompt.text == "Two", "it cannot be sent during the answer")
        await chat.press("escape")
        await chat.answered()
        assert last(chat) == f"{URL}:\n```\nThey sleep a lot.\n```\n\nSum up {URL}"
        assert [attachment.text for attachment in chat.screen.files.attachments] == ["for Two"]
