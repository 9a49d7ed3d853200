"""The chat's views into the model: the inspector, the tokens of an answer, two versions side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.widgets import OptionList

from edgelm.chats.store import Store
from edgelm.tui.dialogs.compare import Column, CompareScreen
from edgelm.tui.dialogs.explore import Cell, ExploreScreen, TokenText, lay_out
from tests.tui.conftest import Driver, Open
from tests.tui.fake_endpoint import FakeEndpoint

ENGINE = {"model": "starter", "engine": "llama", "device": "cpu", "context": 4096, "capacity": 8192, "slots": 4}
CHUNK = {"sequence": 1, "prompt": 9, "start": 9, "computed": 1, "new": 1, "tokens": [{"id": 1, "text": "pivot"}]}
STEPS = [
    ("step", {"step": number, "at": number, "ms": 5, "running": 1, "waiting": 0, "chunks": [CHUNK]})
    for number in range(1, 31)
]


async def explored(chat: Driver, answer: str = "One two three") -> ExploreScreen:
    """Open the dialog on an answer, and wait for its first alternatives."""
    chat.endpoint.answers = [answer, "IV"]
    await chat.ask("count")
    await chat.press("f7")
    await chat.sees("likely")
    screen = chat.app.screen
    assert isinstance(screen, ExploreScreen)
    return screen


async def test_the_inspector_opens_takes_the_keys_and_closes(open_chat: Open, endpoint: FakeEndpoint) -> None:
    endpoint.events = [("engine", ENGINE), *STEPS]
    async with open_chat((100, 40)) as chat:
        await chat.ready()
        assert not endpoint.watched, "a closed inspector has no connection"
        await chat.press("f6")
        await chat.sees("llama/cpu, context 4,096", "pivot")
        assert endpoint.watched == ["/edgelm/events?model=starter"]
        await chat.type("hello")
        assert chat.prompt.text == "hello"
        await chat.press("f6", "left", "left")
        await chat.sees("stopped at step 28")
        assert chat.prompt.text == "hello"
        await chat.press("escape")
        assert chat.app.focused is chat.prompt
        await chat.press("f6", "f6")
        await chat.until(lambda: endpoint.unwatched == 1, "the connection is closed")
        assert "llama/cpu, context" not in chat.text
        assert chat.app.focused is chat.prompt


async def test_probabilities_are_asked_for_while_the_inspector_is_open(open_chat: Open, endpoint: FakeEndpoint) -> None:
    async with open_chat() as chat:
        await chat.ask("one")
        await chat.press("f6")
        await chat.ask("two")
        await chat.press("f6", "f6")
        await chat.ask("three")
    asked = [(request.get("logprobs"), request.get("top_logprobs")) for request in endpoint.requests]
    assert asked == [(None, None), (True, 5), (None, None)]


async def test_the_inspector_follows_the_model_of_the_chat(open_chat: Open, endpoint: FakeEndpoint) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.press("f6")
        await chat.until(lambda: endpoint.watched)
        await chat.ask("/model qwen3")
        await chat.until(lambda: len(endpoint.watched) == 2 and endpoint.unwatched == 1)
        assert endpoint.watched[-1] == "/edgelm/events?model=qwen3-4b-q4_k_m.gguf"


async def test_another_endpoint_has_no_steps_to_show(open_chat: Open, endpoint: FakeEndpoint) -> None:
    endpoint.is_edgelm = False
    async with open_chat() as chat:
        await chat.ask("one")
        await chat.press("f6")
        await chat.sees("is no edgelm server")
        await chat.press("f7")
        await chat.hears("is no edgelm server")


async def test_the_inspector_says_why_it_has_no_steps(open_chat: Open, endpoint: FakeEndpoint) -> None:
    async with open_chat() as chat:
        await chat.ready()
        endpoint.is_edgelm = False  # the path is gone: a server of another version
        await chat.press("f6")
        await chat.sees("there is nothing at /edgelm/events")


@pytest.mark.parametrize("size", [(60, 20), (100, 30), (200, 60)])
async def test_the_inspector_leaves_room_for_the_chat(open_chat: Open, endpoint: FakeEndpoint, size: Any) -> None:
    endpoint.events = [("engine", ENGINE), *STEPS]
    async with open_chat(size) as chat:
        await chat.ask("sort")
        await chat.sees("stable")  # a screen that shrinks before would show the answer from its top
        await chat.press("f6")
        await chat.sees("pivot", "stable", "Message")


async def test_an_answer_goes_on_from_another_token(open_chat: Open, endpoint: FakeEndpoint) -> None:
    async with open_chat() as chat:
        screen = await explored(chat)
        await chat.press("right")
        await chat.sees("token 2 of 3")
        await chat.until(lambda: len(endpoint.probes) == 2 and screen.query_one(OptionList).option_count == 3)
        probe = endpoint.probes[1]
        assert probe["messages"][-1] == {"role": "assistant", "content": "One"}
        assert probe["continue_final_message"] is True
        assert (probe["max_tokens"], probe["logprobs"], probe["top_logprobs"]) == (1, True, 10)
        await chat.press("down", "enter")
        await chat.answered()
        assert chat.turns == [("user", "count"), ("assistant", "One otherIV")]
        request = endpoint.requests[-1]
        assert request["messages"][-1] == {"role": "assistant", "content": "One other"}
        assert (request["continue_final_message"], request["add_generation_prompt"]) == (True, False)
        assert "‹ 2/2 ›" in chat.text or "2/2" in chat.text
        await chat.sees("One otherIV")


async def test_the_first_token_has_alternatives_without_a_begun_answer(open_chat: Open, endpoint: FakeEndpoint) -> None:
    async with open_chat() as chat:
        await explored(chat)
        assert [message["role"] for message in endpoint.probes[0]["messages"]] == ["user"]
        assert "continue_final_message" not in endpoint.probes[0]


async def test_the_end_of_an_answer_cannot_be_gone_on_from(open_chat: Open, endpoint: FakeEndpoint) -> None:
    endpoint.alternatives = [("<end>", 0.9), ("\ufffd", 0.1)]
    async with open_chat() as chat:
        endpoint.answers = ["One two"]
        await chat.ask("count")
        await chat.press("f7")
        await chat.sees("ends the answer", "a part of a character")
        await chat.press("end")
        await chat.sees("the end of the answer")
        await chat.press("enter")
        assert isinstance(chat.app.screen, ExploreScreen)
        await chat.press("escape")
        assert len(endpoint.requests) == 1


async def test_tokens_and_alternatives_are_chosen_by_the_mouse(open_chat: Open, endpoint: FakeEndpoint) -> None:
    async with open_chat() as chat:
        screen = await explored(chat)
        await chat.pilot.click(TokenText, offset=(9, 0))
        await chat.sees("token 3 of 3")
        options = screen.query_one(OptionList)
        await chat.until(lambda: options.option_count == 3)
        await chat.pilot.click(OptionList, offset=(3, 1))
        await chat.answered()
        assert chat.turns[-1] == ("assistant", "One two otherIV")


async def test_alternatives_are_asked_for_once(open_chat: Open, endpoint: FakeEndpoint) -> None:
    async with open_chat() as chat:
        await explored(chat)
        await chat.press("right")
        await chat.until(lambda: len(endpoint.probes) == 2)
        await chat.press("left", "right", "left")
        await chat.sees("token 1 of 3", "likely")
        assert len(endpoint.probes) == 2


async def test_an_answer_without_text_has_no_tokens(open_chat: Open, endpoint: FakeEndpoint) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.press("f7")
        await chat.hears("there is no answer here")


async def test_two_settings_side_by_side(open_chat: Open, endpoint: FakeEndpoint) -> None:
    endpoint.answers = ["The first", "The second"]
    async with open_chat((110, 30)) as chat:
        await chat.ask("sort")
        await chat.ask("/compare temperature=0.1")
        await chat.sees("The first", "The second", "temperature=0.1")
        assert isinstance(chat.app.screen, CompareScreen)
        assert endpoint.requests[-1]["temperature"] == 0.1
        await chat.answered()
        await chat.press("left", "enter")
        assert chat.turns == [("user", "sort"), ("assistant", "The first")]
        await chat.ask("more")
        assert "temperature" not in endpoint.requests[-1], "the chat keeps its own settings"


async def test_two_models_side_by_side(open_chat: Open, endpoint: FakeEndpoint) -> None:
    endpoint.answers = ["The first", "The second"]
    async with open_chat((70, 30)) as chat:  # one above the other
        await chat.ask("sort")
        await chat.press("f8")
        await chat.sees("Compare with")
        await chat.type("qwen")
        await chat.press("enter")
        await chat.sees("The first", "The second", "41 tok/s")
        assert endpoint.requests[-1]["model"] == "qwen3-4b-q4_k_m.gguf"
        assert endpoint.requests[-1]["messages"] == endpoint.requests[0]["messages"]
        await chat.press("escape")
        await chat.until(lambda: chat.app.screen is chat.screen)
        assert chat.turns == [("user", "sort"), ("assistant", "The first")]
        assert chat.screen.workspace.model == "starter"


async def test_a_version_is_kept_by_the_mouse(open_chat: Open, endpoint: FakeEndpoint) -> None:
    endpoint.answers = ["The first", "The second"]
    async with open_chat((110, 30)) as chat:
        await chat.ask("sort")
        await chat.ask("/compare temperature=0.1")
        await chat.sees("The first", "The second")
        await chat.answered()
        left = chat.app.screen.query(Column).first()
        await chat.pilot.click(left)
        assert left.has_focus
        await chat.pilot.click(left, times=2)
        await chat.until(lambda: chat.app.screen is chat.screen)
        assert chat.turns[-1] == ("assistant", "The first")


async def test_no_version_is_chosen_while_one_is_written(open_chat: Open, endpoint: FakeEndpoint) -> None:
    async with open_chat((110, 30)) as chat:
        await chat.ask("sort")
        endpoint.stall_after = 3
        await chat.ask_only("/compare temperature=0.1")
        await chat.until(lambda: isinstance(chat.app.screen, CompareScreen))
        await chat.press("left", "enter")
        await chat.hears("is being written")
        first = chat.session.tree.siblings(chat.session.tree.path()[-1].id)[0]
        await chat.press("escape")
        await chat.answered()
        await chat.until(lambda: chat.session.tree.path()[-1].id == first, "the old version")
        assert [message.state for message in chat.session.tree.messages.values()] == ["done", "done", "stopped"]


async def test_a_model_that_is_not_there_is_not_compared(open_chat: Open, endpoint: FakeEndpoint) -> None:
    async with open_chat() as chat:
        await chat.ask("sort")
        await chat.ask("/compare llama")
        await chat.hears("no model called llama")
        assert len(endpoint.requests) == 1


@pytest.mark.parametrize("width", [1, 5, 12, 40])
def test_tokens_are_laid_out_in_lines(width: int) -> None:
    pieces = ["One", " two", "\n\n", "日本", " threeandfour", "\ttab", " end"]
    lines = lay_out(pieces, width)
    for token in range(len(pieces)):
        assert any(cell.token == token for line in lines for cell in line), token
    text = "".join(cell.text for line in lines for cell in line)
    assert text.replace("⏎", "").replace(" ", "") == "Onetwo日本threeandfourtabend"


def test_a_line_begins_with_a_word() -> None:
    assert lay_out(["One", " two", " three"], 8) == [[Cell(0, "One"), Cell(1, " two")], [Cell(2, "three")]]


async def test_a_comparison_that_is_cancelled_at_once_leaves_no_version(
    open_chat: Open, endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    async with open_chat() as chat:
        await chat.ask("Hello")
        endpoint.stall_after = 0
        await chat.ask_only("/compare temperature=0.1")
        await chat.until(lambda: isinstance(chat.app.screen, CompareScreen), "the comparison")
        await chat.press("escape")
        await chat.until(lambda: len(chat.session.tree.messages) == 2, "no version is left")
        assert "2/2" not in chat.text
        assert "1/2" not in chat.text
        chat_id = chat.session.chat.id
    store = Store(tmp_path / "chats.db")
    assert len(store.messages(chat_id)) == 2
    store.close()
