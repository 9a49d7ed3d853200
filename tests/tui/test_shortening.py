"""A full context: the user sees which messages are left out, none is cut silently, and it can be undone."""

from __future__ import annotations

import json
from pathlib import Path

from edgelm.chats.history import Chat, Message
from edgelm.client.answer_stream import AnswerStats, stats_to_json
from edgelm.client.session import Session
from edgelm.tui.prompt.shortening import plan_shortening
from tests.tui.conftest import Driver, Open

TOO_LONG = (400, {"error": {"message": "5,000 tokens, and the context is 4,096", "code": "context_length_exceeded"}})
MARKER = "earlier messages are not sent to the model any more"


def sent(chat: Driver) -> list[str]:
    return [message["content"] for message in chat.endpoint.requests[-1]["messages"]]


def past(chat: Driver) -> list[str]:
    return [message["content"] for message in chat.endpoint.requests[-1].get("edgelm", {}).get("past", [])]


async def ask_three(chat: Driver) -> None:
    chat.endpoint.answers = ["a1", "a2", "a3", "a4", "a5", "a6"]
    for i in (1, 2, 3):
        await chat.ask(f"q{i}")


async def shorten(chat: Driver, *keys: str) -> None:
    await chat.press("f5")
    await chat.sees("Go on from a shortened conversation")
    await chat.press(*keys, "enter")
    await chat.until(lambda: len(chat.app.screen_stack) == 1, "the chat")
    await chat.answered()


async def test_an_answer_that_filled_the_context_is_written_anew(open_chat: Open) -> None:
    async with open_chat() as chat:
        await ask_three(chat)
        chat.endpoint.finish_reason = "context"
        await chat.ask("q4")
        await chat.sees("the context is full; F5 goes on from a shortened conversation")
        assert len(chat.endpoint.requests) == 4, "nothing is done before the user says so"
        chat.endpoint.finish_reason = "stop"
        await chat.press("f5")
        await chat.sees("✗ left out", "q1", "✓ sent", "q4", "2 messages are left out: that frees about", "of 4,096")
        await chat.press("down")
        await chat.sees("4 messages are left out")
        await chat.press("enter")
        await chat.until(lambda: len(chat.endpoint.requests) == 5, "another answer")
        await chat.answered()
        assert sent(chat) == ["q3", "a3", "q4"]
        assert past(chat) == ["q1", "a1", "q2", "a2"]
        await chat.sees(f"4 {MARKER}", "◂ 2/2 ▸")
        assert chat.turns[-1] == ("assistant", "a5"), "the old answer is another version"
        await chat.ask("q5")
        assert sent(chat) == ["q3", "a3", "q4", "a5", "q5"], "it stays so"
        assert past(chat) == ["q1", "a1", "q2", "a2"]


async def test_a_refused_conversation_goes_on(open_chat: Open) -> None:
    async with open_chat() as chat:
        await ask_three(chat)
        chat.endpoint.refuse = TOO_LONG
        await chat.ask("q4")
        await chat.sees("✗ 5,000 tokens, and the context is 4,096; F5 goes on", "shortened conversation")
        chat.endpoint.refuse = None
        chat.session.set_system("Be brief.")
        await shorten(chat)
        assert sent(chat) == ["Be brief.", "q2", "a2", "q3", "a3", "q4"], "the system prompt stays"
        assert chat.turns[-1] == ("assistant", "a4")
        await chat.press("ctrl+r")
        await chat.until(lambda: len(chat.endpoint.requests) == 6)
        await chat.answered()
        assert sent(chat) == ["Be brief.", "q2", "a2", "q3", "a3", "q4"], "also where the same is answered again"


async def test_it_survives_a_restart_and_can_be_undone(open_chat: Open) -> None:
    async with open_chat() as chat:
        await ask_three(chat)
        await shorten(chat, "down")
        await chat.sees(f"4 {MARKER}")
        assert len(chat.endpoint.requests) == 3, "the last answer is whole: no other is made"
    async with open_chat() as chat:
        chat.endpoint.answers = ["a4"]
        await chat.press("ctrl+f", "down", "enter")
        await chat.sees(f"4 {MARKER}", "q1", "a1")
        await chat.ask("q4")
        assert (sent(chat), past(chat)) == (["q3", "a3", "q4"], ["q1", "a1", "q2", "a2"])
        await chat.ask("/whole")
        await chat.until(lambda: MARKER not in chat.text, "no marker")
        await chat.ask("q5")
        assert (sent(chat), past(chat)) == (["q1", "a1", "q2", "a2", "q3", "a3", "q4", "a4", "q5"], [])
        await chat.ask("/whole")
        await chat.sees("the whole conversation is sent already")


async def test_another_branch_is_not_shortened(open_chat: Open) -> None:
    async with open_chat() as chat:
        await ask_three(chat)
        chat.endpoint.refuse = TOO_LONG
        await chat.ask("q4")
        chat.endpoint.refuse = None
        await shorten(chat, "down")
        await chat.sees(f"4 {MARKER}")
        await chat.press("shift+tab", "left")
        await chat.sees("◂ 1/2 ▸")
        assert MARKER not in chat.text
        await chat.press("right")
        await chat.sees(f"4 {MARKER}")


async def test_a_new_version_is_shortened_too(open_chat: Open) -> None:
    async with open_chat() as chat:
        await ask_three(chat)
        await shorten(chat)
        await chat.ask("q4")
        assert sent(chat) == ["q2", "a2", "q3", "a3", "q4"]
        await chat.press("ctrl+r")
        await chat.until(lambda: len(chat.endpoint.requests) == 5)
        await chat.answered()
        assert sent(chat) == ["q2", "a2", "q3", "a3", "q4"], "of the answer"
        await chat.press("shift+tab", "up", "up", "up", "e")
        await chat.until(lambda: chat.prompt.text == "q3")
        await chat.ask("q3 again")
        assert sent(chat) == ["q2", "a2", "q3 again"], "of a question below the cut, on whose branch nobody cut"
        assert past(chat) == ["q1", "a1"]
        await chat.press("shift+tab", "up", "up", "up", "e")
        await chat.until(lambda: chat.prompt.text == "q2")
        await chat.ask("q2 again")
        assert (sent(chat), past(chat)) == (["q2 again"], ["q1", "a1"]), "of the first that is sent"
        await chat.sees("2 earlier messages are not sent")
        await chat.press("shift+tab", "up", "up", "up", "e")
        await chat.until(lambda: chat.prompt.text == "q1")
        await chat.ask("q1 again")
        assert (sent(chat), past(chat)) == (["q1 again"], []), "above it all is new"


async def test_escape_changes_nothing_and_the_first_line_sends_all(open_chat: Open) -> None:
    async with open_chat() as chat:
        await ask_three(chat)
        await chat.press("f5")
        await chat.sees("Go on from")
        await chat.press("escape")
        assert all(message.sent_from is None for message in chat.session.tree.path())
        await shorten(chat)
        await chat.sees(f"2 {MARKER}")
        await chat.press("f5")
        await chat.sees("4 messages are left out")
        await chat.press("home")
        await chat.sees("All messages are sent.")
        await chat.press("enter")
        await chat.until(lambda: MARKER not in chat.text, "no marker")


async def test_one_question_cannot_be_shortened(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.press("f5")
        await chat.sees("there is nothing to leave out")
        await chat.ask("q1")
        await chat.press("f5")
        await chat.until(lambda: chat.text.count("nothing to leave out") == 2, "a second line")
        assert len(chat.app.screen_stack) == 1


async def test_another_endpoint_gets_no_past(open_chat: Open) -> None:
    async with open_chat() as chat:
        chat.endpoint.is_edgelm = False
        await chat.screen.workspace.link.lost()
        await ask_three(chat)
        await shorten(chat)
        await chat.ask("q4")
        assert sent(chat)[0] == "q3", "its context is not known: half of the conversation goes"
        assert "edgelm" not in chat.endpoint.requests[-1]


async def test_the_export_has_sent_from(open_chat: Open, tmp_path: Path) -> None:
    async with open_chat() as chat:
        await ask_three(chat)
        await shorten(chat)
        await chat.ask(f"/export json {tmp_path / 'chat.json'}")
        await chat.sees("written to")
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [message["sent_from"] for message in messages] == [None] * 5 + [messages[2]["id"]]


class NoStore:
    def write(self, *_: object) -> None:
        pass


def make_session(*words: int, context: int = 1000, prompt_tokens: int = 0) -> Session:
    """Return a chat of questions of so many words, each answered in one word; the last answer has stats."""
    chat = Chat()
    messages: list[Message] = []
    for count in words:
        for role, text in (("user", "word " * count), ("assistant", "yes")):
            parent = messages[-1].id if messages else None
            messages.append(Message(chat=chat.id, parent=parent, role=role, text=text))  # type: ignore[arg-type]
    stats = AnswerStats(prompt_tokens=prompt_tokens, context_size=context)
    messages[-1].stats = stats_to_json(stats) if prompt_tokens else ""
    chat.leaf = messages[-1].id
    return Session(NoStore(), chat, messages)  # type: ignore[arg-type]


def test_the_proposal_leaves_half_of_the_context() -> None:
    words = (100, 100, 100, 100, 100)
    plan = plan_shortening(make_session(*words, context=1000, prompt_tokens=500), None)
    assert plan is not None
    assert plan.context == 1000
    assert sum(exchange.tokens for exchange in plan.exchanges) > 495, "the measured tokens are spread over the messages"
    assert plan.proposed == 1, "at least one exchange goes"
    plan = plan_shortening(make_session(*words, context=500, prompt_tokens=500), None)
    assert plan is not None
    assert plan.proposed == 3, "two of 100 tokens are below 250"
    plan = plan_shortening(make_session(*words, context=50, prompt_tokens=500), None)
    assert plan is not None
    assert plan.proposed == 4, "the last question always stays"
    count, freed = plan.left_out(4)
    assert count == 8
    assert 390 < freed < 410


def test_without_statistics_half_is_left_out() -> None:
    plan = plan_shortening(make_session(10, 10, 10, 10), None)
    assert plan is not None
    assert (plan.proposed, plan.context) == (2, None)
    assert plan_shortening(make_session(10), None) is None
    plan = plan_shortening(make_session(1000, 1000, 1000, 1000), 4096)
    assert plan is not None
    assert plan.proposed == 3


def test_an_answer_that_was_stopped_inside_its_thought_hides_no_statistics() -> None:
    session = make_session(100, 100, 100, context=600, prompt_tokens=400)
    question = session.add_question("and?", session.tree.leaf)
    stopped = session.begin_answer(question.id, "starter")
    session.finish(stopped, "stopped", stats=AnswerStats(reasoning_ms=1500.0))
    plan = plan_shortening(session, None)
    assert plan is not None
    assert plan.context == 600


def test_a_conversation_that_was_shortened_is_shortened_further() -> None:
    session = make_session(100, 100, 100, 100, context=600, prompt_tokens=400)
    path = session.tree.path()
    session.shorten(path[3], path[2].id)
    plan = plan_shortening(session, None)
    assert plan is not None
    assert plan.first == 1
    assert plan.proposed == 2
    assert plan.left_out(1) == (2, 0)
    assert plan.left_out(2)[0] == 4
