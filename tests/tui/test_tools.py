"""Calls of tools in a chat: who is asked, what the model gets, what is shown and saved."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import OptionList

from edgelm.chats.export_md import to_markdown
from edgelm.chats.history import Chat, Message, Tree
from edgelm.chats.tool_calls import ToolCall
from edgelm.chats.tools import process
from edgelm.chats.tools.consents import Consents
from edgelm.chats.tools.settings import ToolServer
from edgelm.chats.tools.toolbox import Toolbox
from edgelm.client.link import Link
from edgelm.tui.app import ChatApp
from edgelm.tui.dialogs import tools as tool_dialogs
from edgelm.tui.dialogs.tools import AskScreen, CallScreen, LimitScreen, ToolsScreen
from edgelm.tui.workspace import ChatDefaults
from tests.tui.conftest import Driver
from tests.tui.fake_endpoint import FakeEndpoint

SERVER = str(Path(__file__).parents[1] / "chats" / "tools" / "server.py")
OpenTools = Callable[..., Any]


def call(tool: str, arguments: object = None, *, server: str = "small", **more: Any) -> dict[str, Any]:
    """Return the delta of a whole call."""
    function = {"name": f"{server}__{tool}", "arguments": json.dumps(arguments if arguments is not None else {})}
    return {"index": 0, "id": "call_1", "type": "function", "function": function, **more}


@pytest.fixture
def open_tools(endpoint: FakeEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_pilot: None) -> OpenTools:
    """Return a context manager that runs the chat with the server `small`, in use in the open chat."""
    monkeypatch.setattr(process, "LEAVE_S", 0.1)
    monkeypatch.setattr("edgelm.chats.tools.connection.STUCK_S", 0.2)
    monkeypatch.setattr(tool_dialogs, "QUIET_S", 0.0)

    @asynccontextmanager
    async def run(
        *words: str, use: bool = True, size: tuple[int, int] = (100, 32), **values: Any
    ) -> AsyncIterator[Driver]:
        values = {"command": sys.executable, "args": ("-S", SERVER, *words), **values}
        servers = {"small": ToolServer(name="small", **values)}
        link = Link(endpoint=endpoint.address, api_key=None, runtime=tmp_path / "run", log=tmp_path / "serve.log")
        consents = Consents(tmp_path / "tool_consents.json")
        toolbox = Toolbox(consents, servers, {"PATH": os.environ["PATH"]}, tmp_path / "logs")
        app = ChatApp(tmp_path / "chats.db", link, ChatDefaults(), toolbox=toolbox)
        async with app.run_test(size=size, notifications=True) as pilot:
            chat = Driver(app, pilot, endpoint)
            await chat.ready()
            if use:
                chat.session.set_tools(("small",))
            yield chat

    return run


async def asked(chat: Driver, screen: type[AskScreen] = CallScreen) -> None:
    await chat.until(lambda: isinstance(chat.app.screen, screen), screen.__name__)


async def allow(chat: Driver, number: int) -> None:
    """Choose an option of the question: 0 refuses, 1 once, 2 in this chat, 3 always."""
    await asked(chat)
    dialog = chat.app.screen
    await chat.press(*["down"] * number, "enter")
    await chat.until(lambda: chat.app.screen is not dialog, "an answer")


def states(chat: Driver) -> list[tuple[str, str]]:
    return [(item.tool, item.state) for item in chat.session.tree.path()[-1].calls]


def messages(endpoint: FakeEndpoint) -> list[dict[str, Any]]:
    """Return the messages of the last request."""
    return endpoint.requests[-1]["messages"]


async def test_a_call_is_asked_for_run_shown_and_sent_back(open_tools: OpenTools, endpoint: FakeEndpoint) -> None:
    endpoint.answers = ["I look it up.", "It says hello."]
    endpoint.calls = [[call("echo", {"text": "hello"})]]
    async with open_tools() as chat:
        await chat.ask_only("What does it say?")
        await asked(chat)
        await chat.sees(
            "Run the tool small/echo?",
            '"text": "hello"',
            "unchecked: Return the text",
            "Also: it only reads",
            "What does it say?",
        )
        assert chat.app.screen.query_one(OptionList).highlighted in (0, None)
        await allow(chat, 1)
        await chat.answered()
        await chat.sees("I look it up.", '▸ tool small/echo(text: "hello") · ', "It says hello.")
        await chat.press("ctrl+t")
        await chat.sees('"text": "hello"', "┊ hello")
        await chat.press("ctrl+t")
        answer = chat.session.tree.path()[-1]
        assert answer.text == "I look it up.It says hello."
        assert [(item.tool, item.state, item.result, item.at) for item in answer.calls] == [
            ("echo", "done", "hello", 13)
        ]
        offered = [tool["function"]["name"] for tool in endpoint.requests[0]["tools"]]
        assert offered[0] == "small__echo"
        assert [item["role"] for item in messages(endpoint)] == ["user", "assistant", "tool"]
        assert messages(endpoint)[1]["tool_calls"][0]["function"]["name"] == "small__echo"
        assert messages(endpoint)[2] == {"role": "tool", "content": "hello", "tool_call_id": "call_1"}
        await chat.ask("And now?")
        assert [item["role"] for item in messages(endpoint)] == ["user", "assistant", "tool", "assistant", "user"]


async def test_a_refused_call_does_not_run_and_the_model_is_told(open_tools: OpenTools, endpoint: FakeEndpoint) -> None:
    endpoint.answers = ["", "Then not."]
    endpoint.calls = [[call("echo"), call("die", index=1, id="call_2")]]
    async with open_tools() as chat:
        await chat.ask_only("Go")
        await allow(chat, 0)
        await asked(chat)  # one after the other
        await chat.press("escape")
        await chat.answered()
        assert states(chat) == [("echo", "refused"), ("die", "refused")]
        await chat.sees("small/echo() · refused", "Then not.")
        assert [item["content"][:12] for item in messages(endpoint)[2:]] == ["The user ref"] * 2


async def test_what_is_allowed_once_in_a_chat_and_always(open_tools: OpenTools, endpoint: FakeEndpoint) -> None:
    endpoint.answers = [""]
    endpoint.calls = [[call("echo")] for _ in range(6)]
    endpoint.calls.insert(3, [])
    async with open_tools() as chat:
        await chat.ask_only("Three calls in a chat")
        await allow(chat, 1)
        await allow(chat, 2)
        await chat.answered()
        assert states(chat) == [("echo", "done")] * 3
        await chat.press("ctrl+n")
        assert chat.session.chat.tools == ()
        chat.session.set_tools(("small",))
        await chat.ask_only("Three calls in another one")
        await allow(chat, 0)
        await allow(chat, 3)
        await chat.answered()
        assert states(chat) == [("echo", "refused"), ("echo", "done"), ("echo", "done")]
        await chat.press("ctrl+n")
        chat.session.set_tools(("small",))
        endpoint.calls = [[call("echo")]]
        await chat.ask("A third chat")
        assert states(chat) == [("echo", "done")]


async def test_a_changed_tool_and_a_changed_server_are_asked_for_again(
    open_tools: OpenTools, endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    changed = tmp_path / "changed"
    values = {"env": {"CHANGED_BY": str(changed)}}
    endpoint.answers = ["", "One.", "", "Two.", "", "Three.", "", "Four."]
    async with open_tools(**values) as chat:
        endpoint.calls = [[call("echo")]]
        await chat.ask_only("One")
        await allow(chat, 3)
        await chat.answered()
        changed.touch()
        for number in (3, 0):  # what was allowed is the changed one then
            endpoint.calls = [[call("echo")]]
            await chat.ask_only("Two")
            if number:
                await asked(chat)
                await chat.sees("has changed since you allowed it")
                await allow(chat, number)
            await chat.answered()
            assert states(chat) == [("echo", "done")]
    async with open_tools("greets", **values) as chat:  # another command
        endpoint.calls = [[call("echo")]]
        await chat.ask_only("Three")
        await asked(chat)
        await chat.sees("has changed since you allowed it", "greets")  # a long path before it may end the line


async def test_typing_ahead_does_not_answer(
    open_tools: OpenTools, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_dialogs, "QUIET_S", 600.0)
    endpoint.answers = ["", "Done."]
    endpoint.calls = [[call("echo")]]
    async with open_tools() as chat:
        await chat.ask_only("Go")
        await asked(chat)
        await chat.press("y", "down", "enter", "space", "escape")
        assert isinstance(chat.app.screen, CallScreen)
        await chat.pilot.click(OptionList, offset=(8, 1))
        assert isinstance(chat.app.screen, CallScreen)
        monkeypatch.setattr(tool_dialogs, "QUIET_S", 0.0)
        await chat.pilot.click(OptionList, offset=(8, 1))
        await chat.answered()
        assert states(chat) == [("echo", "done")]


async def test_escapes_and_hidden_characters_of_calls_and_results_are_not_drawn(
    open_tools: OpenTools, endpoint: FakeEndpoint
) -> None:
    endpoint.answers = ["", "Done."]
    endpoint.calls = [[call("escapes", {"path": "a\u202etxt.exe\x1b[2J"})]]
    async with open_tools() as chat:
        await chat.ask_only("Go")
        await asked(chat)
        await chat.sees(r"a\u202etxt.exe\u001b[2J")
        await allow(chat, 1)
        await chat.answered()
        await chat.press("ctrl+t")
        await chat.sees("red clip cleared")
        assert "\x1b" not in chat.text
        assert chat.app.clipboard == ""


async def test_calls_that_cannot_run_are_results_too(open_tools: OpenTools, endpoint: FakeEndpoint) -> None:
    endpoint.answers = ["", "", "", "Done."]
    wrong = {**call("echo"), "function": {"name": "small__echo", "arguments": '{"text": '}}
    endpoint.calls = [[call("nothing")], [wrong], [call("die")]]
    async with open_tools() as chat:
        await chat.ask_only("Go")
        await allow(chat, 1)
        await chat.answered()
        results = [item.result for item in chat.session.tree.path()[-1].calls]
        assert results[0].startswith("There is no tool small__nothing. The tools are: small__echo, ")
        assert results[1:] == ["The arguments are not a JSON object.", "small: it ended with exit code 7"]
        sent = [item["tool_calls"][0]["function"]["arguments"] for item in messages(endpoint) if "tool_calls" in item]
        assert all(isinstance(json.loads(arguments), dict) for arguments in sent)
        assert len({item["tool_call_id"] for item in messages(endpoint) if item["role"] == "tool"}) == 3


async def test_a_stopped_call_is_marked_and_the_chat_goes_on(
    open_tools: OpenTools, endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    endpoint.answers = ["Wait."]
    endpoint.calls = [[call("hang"), call("echo", index=1, id="call_2")]]
    async with open_tools() as chat:
        await chat.ask_only("Go")
        await allow(chat, 1)
        await chat.until(lambda: states(chat)[0] == ("hang", "running"), "running")
        await chat.sees("small/hang() · running", "running small/hang")
        await chat.press("escape")
        await chat.answered()
        await chat.sees("small/hang() · did not end", "small/echo() · not run", "stopped")
        await chat.press("ctrl+n")
        chat.session.set_tools(("small",))
        endpoint.calls = [[call("echo")]]
        await chat.ask_only("Stopped in the question")
        await asked(chat)
        await chat.screen.workspace.answers.end()
        await chat.until(lambda: len(chat.app.screen_stack) == 1, "the question is closed")
        assert states(chat) == [("echo", "asked")]
    async with open_tools(use=False) as chat:  # a restart shows the same
        await chat.press("ctrl+f", "down", "down", "enter")
        await chat.sees("small/hang() · did not end", "small/echo() · not run", "stopped")
        assert chat.session.chat.tools == ("small",)
        await chat.ask("Go on")
        assert [item["role"] for item in messages(endpoint)] == [
            "user", "assistant", "tool", "tool", "assistant", "user"
        ]  # fmt: skip
        assert messages(endpoint)[2]["content"] == "The answer was stopped before this call ended."


async def test_an_answer_that_goes_on_calling_is_asked_about(
    open_tools: OpenTools, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("edgelm.client.tool_runner.MAX_CALLS", 2)
    endpoint.answers = [""]
    endpoint.calls = [[call("echo")] for _ in range(9)]
    async with open_tools() as chat:
        await chat.ask_only("Go round")
        await allow(chat, 2)
        await asked(chat, LimitScreen)
        await chat.sees("has made 2 calls", "asks for 1 more call")
        await chat.press("down", "enter")
        await chat.until(lambda: len(states(chat)) == 6, "more calls")
        await asked(chat, LimitScreen)
        await chat.press("enter")
        await chat.answered()
        assert states(chat)[-2:] == [("echo", "done"), ("echo", "refused")]
        await chat.sees("stopped: the model went on calling tools")


async def test_a_server_that_does_not_start_is_told_once_and_the_chat_lives_on(
    open_tools: OpenTools, endpoint: FakeEndpoint
) -> None:
    endpoint.answers = ["Without tools."]
    async with open_tools(command="/nowhere/server") as chat:
        await chat.ask("One")
        await chat.hears("no tools: /nowhere/server: No such file or directory")
        await chat.ask("Two")
        assert sum("no tools:" in note.message for note in chat.app._notifications) == 1
        assert "tools" not in endpoint.requests[-1]


async def test_the_command_lists_servers_and_uses_them(open_tools: OpenTools, endpoint: FakeEndpoint) -> None:
    async with open_tools(use=False) as chat:
        chat.prompt.put("/tools")
        await chat.press("enter")
        await chat.until(lambda: isinstance(chat.app.screen, ToolsScreen), "the dialog")
        await chat.sees("off  small", "Enter starts it")
        await chat.press("enter")
        await chat.sees("✓ on   small", "9 tools", "echo  Return the text", "huge is left out")
        assert chat.session.chat.tools == ("small",)
        await chat.press("delete")
        await chat.hears("nothing of small was allowed")
        await chat.until(lambda: isinstance(chat.app.screen, ToolsScreen), "the dialog")
        await chat.press("escape")
        await chat.ask_only("/tools off")
        await chat.hears("this chat uses no tools")
        assert chat.session.chat.tools == ()
        await chat.ask_only("/tools other")
        await chat.hears("there is no server of tools other; the servers are small")


async def test_the_endpoints_refusal_says_what_to_do(open_tools: OpenTools, endpoint: FakeEndpoint) -> None:
    endpoint.refuse = (400, {"error": {"message": "this model does not support tools"}})
    async with open_tools() as chat:
        await chat.ask("Go")
        assert "does not support tools; /tools off answers without tools" in chat.session.tree.path()[-1].note


async def test_calls_in_markdown(tmp_path: Path) -> None:
    made = ToolCall(id="1", server="git", tool="log", arguments="{}", at=4, state="done", result="```\nx\n```")
    chat = Chat(title="T")
    user = Message(chat=chat.id, parent=None, role="user", text="Q")
    answer = Message(chat=chat.id, parent=user.id, role="assistant", text="One.Two.", model="m", calls=(made,))
    text = to_markdown(chat, Tree([user, answer], answer.id))
    assert text.endswith("One.\n\n**Tool** `git/log`, done\n\n````\n{}\n\n```\nx\n```\n````\n\nTwo.\n")


async def test_answers_of_two_chats_ask_one_after_the_other(open_tools: OpenTools, endpoint: FakeEndpoint) -> None:
    endpoint.answers = [""]
    endpoint.calls = [[call("echo")], [call("echo")]]
    async with open_tools() as chat:
        await chat.ask_only("First")
        await asked(chat)
        first = chat.session
        chat.screen.workspace.new_chat()
        chat.session.set_tools(("small",))
        chat.screen.workspace.send("Second")
        second = chat.session
        await chat.until(lambda: second.tree.path()[-1].calls, "a second call")
        await asyncio.sleep(0.05)
        assert len(chat.app.screen_stack) == 2
        await chat.sees("in the chat “First”")  # the other one is on the screen
        await allow(chat, 1)
        await asked(chat)
        await chat.sees("in the chat “Second”")
        await allow(chat, 1)
        await chat.until(lambda: all(s.tree.path()[-1].state == "done" for s in (first, second)), "both ends")


async def send(chat: Driver, text: str) -> None:
    """Press Enter on a text, whatever stands in the prompt afterwards."""
    chat.prompt.put(text)
    await chat.press("enter")


async def test_prompts_of_a_server_are_commands(open_tools: OpenTools) -> None:
    async with open_tools("offers") as chat:
        await chat.type("/")
        await chat.until(chat.screen._offer_commands, "the prompts are known")
        await chat.type("small:s")
        await chat.sees("/small:summarize text [tone]", "Sum a text up")
        await chat.press("enter")
        await chat.sees("text, for the prompt summarize")
        await chat.type("My cat")
        await chat.press("enter")
        await chat.until(lambda: chat.prompt.text == 'summarize: {"text": "My cat"}', "the prompt")
        assert chat.endpoint.requests == []
        await send(chat, "/small:summarize text='a b' tone=kind")
        await chat.until(lambda: chat.prompt.text == 'summarize: {"text": "a b", "tone": "kind"}', "the prompt")
        await send(chat, "/small:summarize loud=yes")
        await chat.hears("the prompt has no loud; write text=VALUE tone=VALUE")
        await send(chat, "/small:greet Ann Lee")
        await chat.until(lambda: chat.prompt.text == 'greet: {"name": "Ann Lee"}', "the prompt")


async def test_a_prompt_of_a_server_is_no_command(open_tools: OpenTools) -> None:
    async with open_tools("offers") as chat:
        await send(chat, "/small:quit")
        await chat.until(lambda: chat.prompt.text == "//quit", "the prompt")
        await chat.press("enter")
        await chat.until(lambda: ("user", "/quit") in chat.turns, "it is a message")


async def test_resources_of_a_server_are_attached(open_tools: OpenTools) -> None:
    async with open_tools("offers") as chat:
        await send(chat, "/small:the_notes")
        await chat.until(lambda: chat.screen.files.attachments, "attached")
        await chat.sees("small:the_notes")
        await chat.ask("What is in it?")
        assert messages(chat.endpoint)[-1]["content"] == (
            "small:the_notes:\n```\nBuy milk.\ufffd\n```\n\nWhat is in it?"
        )


async def test_names_of_servers_in_messages(open_tools: OpenTools) -> None:
    async with open_tools("offers", use=False) as chat:
        await send(chat, "/small:greet")
        await chat.hears("this chat does not use small; /tools small uses it")
        await chat.ask("/other:greet is text")
        assert chat.turns[0] == ("user", "/other:greet is text")
        await send(chat, "/tools small")
        await chat.hears("small: 5 prompts and resources")
        await send(chat, "/small:nothing")
        await chat.hears("small has no prompt and no resource nothing")
