"""The thought of a reasoning model: folded to a line, unfolded on request, kept, and sent back."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from textual.events import Click

from edgelm.chats.export_md import to_markdown
from edgelm.chats.history import Message
from edgelm.client.answer_stream import AnswerStats, stats_from_json, stats_to_json
from edgelm.tui.lines import Row
from edgelm.tui.transcript.thought import ThoughtClock, ThoughtFigures, thought_words
from edgelm.tui.transcript.views import Flow, MessageView
from tests.tui.conftest import Driver, Open
from tests.tui.test_transcript import PALETTE

THOUGHT = "The user asks for the answer.\n\nI multiply six by seven."
ANSWER = "Forty-two."


@pytest.mark.parametrize(
    ("seconds", "tokens", "running", "words"),
    [
        (0.0, 0, True, "Thinking…"),
        (0.9, 1, True, "Thinking… ~1 token"),
        (5.9, 1234, True, "Thinking… 5 s · ~1,234 tokens"),
        (0.2, None, False, "Thought for a moment"),
        (12.3, 340, False, "Thought for 12 s · 340 tokens"),
        (125.0, None, False, "Thought for 2 min 5 s"),
        (None, None, False, "Thought"),
    ],
)
def test_the_line_about_a_thought(seconds: float | None, tokens: int | None, running: bool, words: str) -> None:
    assert thought_words(ThoughtFigures(seconds, tokens, running)) == words


def test_the_clock_runs_only_while_the_model_thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("edgelm.tui.transcript.thought.monotonic", lambda: now)
    clock = ThoughtClock()
    assert (clock.seconds, clock.running) == (0.0, False)
    clock.take("I ", "")
    now = 103.0
    assert (clock.seconds, clock.running) == (3.0, True)
    clock.take("think", "so")  # the last token of the thought and the first of the answer
    now = 110.0
    clock.take("", "on")
    assert (clock.seconds, clock.running) == (3.0, False)
    clock.take("again", "")
    now = 111.0
    clock.stop()
    now = 120.0
    assert (clock.seconds, clock.running) == (4.0, False)


async def think(chat: Driver, **fields: Any) -> None:
    """Ask a question that is answered after a thought."""
    chat.endpoint.reasoning, chat.endpoint.answers, chat.endpoint.reasoning_tokens = THOUGHT, [ANSWER], 340
    for name, value in fields.items():
        setattr(chat.endpoint, name, value)
    await chat.ask("the answer?")


async def test_a_thought_is_folded_to_a_line(open_chat: Open) -> None:
    async with open_chat() as chat:
        await think(chat)
        await chat.sees("▸ Thought for a moment · 340 tokens", ANSWER)
        assert "multiply" not in chat.text
        await chat.press("ctrl+t")
        await chat.sees("▾ Thought for a moment · 340 tokens", "┊ The user asks", "┊ I multiply six by seven.", ANSWER)
        await chat.press("ctrl+t")
        await chat.until(lambda: "multiply" not in chat.text)
        await chat.sees("▸ Thought for a moment")


async def test_tokens_that_the_endpoint_does_not_tell_are_not_shown(open_chat: Open) -> None:
    async with open_chat() as chat:
        await think(chat, reasoning_tokens=None)
        await chat.sees("Thought for a moment", ANSWER)
        assert "tokens" not in chat.text.split(ANSWER)[0]


async def test_a_thought_can_be_watched(open_chat: Open) -> None:
    async with open_chat() as chat:
        chat.endpoint.first_token_s = 0.4  # "waiting" is shown before
        chat.endpoint.tokens_per_second = 8
        chat.endpoint.reasoning, chat.endpoint.answers = "one two three " * 20, [ANSWER]
        await chat.type("go")
        await chat.press("enter")
        await chat.until(lambda: re.search(r"▸ Thinking… \d+ s · ~", chat.text))
        assert "one two" not in chat.text, "it is folded while it runs, too"
        assert "waiting" not in chat.text
        assert chat.screen.status.status.activity == "thinking"
        await chat.press("ctrl+t")
        await chat.sees("▾ Thinking…", "┊ one two three")
        answer = chat.answer
        assert answer is not None
        shown, length = chat.text.count("one"), len(answer.message.reasoning)
        await chat.until(lambda: chat.text.count("one") > shown, "the unfolded thought grows")
        assert len(answer.message.reasoning) > length
        chat.endpoint.tokens_per_second = 0
        await chat.answered()
        await chat.sees("▾ Thought for", ANSWER)
        assert "Thinking" not in chat.text


async def test_a_click_and_enter_unfold_one_thought(open_chat: Open) -> None:
    async with open_chat() as chat:
        await think(chat)
        await think(chat, reasoning="Another thought.")
        row = next(y for y, line in enumerate(chat.text.split("\n")) if "Thought for" in line)
        column = chat.text.split("\n")[row].index("Thought")
        await chat.pilot.click(offset=(column, row))
        await chat.sees("multiply six by seven")
        assert "Another thought." not in chat.text
        assert chat.app.focused is chat.prompt, "one can go on writing"
        await chat.press("shift+tab", "enter")
        await chat.sees("multiply six by seven", "Another thought.")
        await chat.press("enter")
        await chat.until(lambda: "Another thought." not in chat.text)
        await chat.press("escape")
        chat.endpoint.reasoning = ""
        await chat.ask("and more?")
        await chat.sees("multiply six by seven")  # it stays unfolded
        await chat.press("ctrl+t")
        await chat.sees("multiply six by seven", "Another thought.")


async def test_the_line_of_a_long_thought_stays_where_it_was_clicked(open_chat: Open) -> None:
    async with open_chat() as chat:
        await think(chat, reasoning="\n".join(f"step{i}" for i in range(100)))
        row = next(y for y, line in enumerate(chat.text.split("\n")) if "Thought for" in line)
        await chat.pilot.click(offset=(40, row))
        await chat.sees("step0", "step9")
        assert "Thought for" in chat.text.split("\n")[row]


async def test_selecting_text_with_the_mouse_folds_nothing(open_chat: Open) -> None:
    async with open_chat() as chat:
        await think(chat)
        row = next(y for y, line in enumerate(chat.text.split("\n")) if "Thought for" in line)
        column = chat.transcript.region.x + 3
        await chat.pilot.mouse_down(offset=(column, row + 2))
        await chat.pilot.hover(offset=(column + 5, row))
        await chat.pilot.mouse_up(offset=(column + 5, row))
        await chat.pilot._post_mouse_events([Click], offset=(column + 5, row), button=1)  # a terminal's mouse does so
        await chat.pilot.pause(0.1)
        assert chat.screen.get_selected_text()
        assert "multiply" not in chat.text
        assert chat.app.focused is chat.prompt


async def test_a_click_selects_the_message_under_it(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("first question")
        chat.endpoint.answers = ["short"]
        await chat.ask("second question")
        await chat.sees("short")
        left = chat.transcript.region.x
        row = next(y for y, line in enumerate(chat.text.split("\n")) if "second question" in line[left:])
        await chat.pilot.click(offset=(left + 5, row))
        await chat.until(lambda: chat.transcript.selected == chat.session.tree.path()[2].id)
        assert chat.app.focused is chat.transcript


async def test_a_thought_is_kept(open_chat: Open) -> None:
    async with open_chat() as chat:
        await think(chat, tokens_per_second=20)
        await chat.sees("Thought for")
    async with open_chat() as chat:
        await chat.press("ctrl+f", "down", "down", "enter")
        await chat.sees("▸ Thought for", "340 tokens", ANSWER)
        assert "multiply" not in chat.text
        await chat.press("ctrl+t")
        await chat.sees("multiply six by seven")
        answer = chat.session.tree.path()[-1]
        assert answer.reasoning == THOUGHT
        stats = stats_from_json(answer.stats)
        assert stats is not None
        assert stats.reasoning_tokens == 340
        assert stats.reasoning_ms is not None
        assert stats.reasoning_ms >= 300
        await chat.press("ctrl+f")
        await chat.type("forty")
        await chat.sees("Forty-two")


async def test_a_thought_of_an_older_edgelm_has_no_time(open_chat: Open) -> None:
    async with open_chat() as chat:
        await think(chat)
        message = chat.session.tree.path()[-1]
        message.stats = ""
        chat.session._write(message)
    async with open_chat() as chat:
        await chat.press("ctrl+f", "down", "down", "enter")
        await chat.sees("▸ Thought", ANSWER)
        assert "Thought for" not in chat.text


async def test_copy_and_export_leave_the_thought_out(open_chat: Open) -> None:
    async with open_chat() as chat:
        await think(chat)
        await chat.press("ctrl+y")
        await chat.until(lambda: chat.app.clipboard == ANSWER)
        assert "multiply" not in to_markdown(chat.session.chat, chat.session.tree)


async def test_thoughts_are_sent_back_to_edgelm_only(open_chat: Open) -> None:
    async with open_chat() as chat:
        await think(chat)
        await chat.ask("again")
        sent = chat.endpoint.requests[-1]["messages"]
        assert sent[1] == {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
    async with open_chat() as chat:
        chat.endpoint.is_edgelm = False
        await chat.press("ctrl+f", "down", "down", "enter")
        await chat.sees(ANSWER)
        await chat.ask("more")
        assert chat.endpoint.requests[-1]["messages"][1] == {"role": "assistant", "content": ANSWER}


@pytest.mark.parametrize("key", ["escape", "ctrl+c"])
async def test_an_answer_that_is_stopped_inside_its_thought(open_chat: Open, key: str) -> None:
    async with open_chat() as chat:
        chat.endpoint.stall_after_reasoning, chat.endpoint.reasoning = True, THOUGHT
        await chat.type("q")
        await chat.press("enter")
        await chat.until(lambda: re.search(r"▸ Thinking… \d+ s", chat.text), "the time runs while nothing comes")
        await chat.press(key)
        await chat.answered()
        await chat.until(lambda: re.search(r"▸ Thought for \d+ s", chat.text) and "stopped" in chat.text)
        await chat.press("ctrl+t")
        await chat.sees("multiply six by seven")
        chat.endpoint.stall_after_reasoning, chat.endpoint.answers = False, [ANSWER]
        await chat.press("ctrl+r")
        await chat.until(lambda: chat.answer is None and chat.turns[-1][1] == ANSWER)
        await chat.sees("◂ 2/2 ▸", ANSWER)
        await chat.press("shift+tab", "left")
        await chat.sees("◂ 1/2 ▸", "multiply", "stopped")
        await chat.press("escape")
        await chat.ask("and now?")
        assert chat.endpoint.requests[-1]["messages"] == [{"role": "user", "content": "q\n\nand now?"}]


async def test_an_answer_whose_length_ended_inside_its_thought(open_chat: Open) -> None:
    async with open_chat() as chat:
        await think(chat, answers=[""], finish_reason="length")
        await chat.sees("▸ Thought for a moment · 340 tokens", "maximum length")
        await chat.press("ctrl+t")
        await chat.sees("multiply six by seven")


async def test_the_figures_of_the_last_whole_answer_stay_after_a_stopped_one(open_chat: Open) -> None:
    async with open_chat() as chat:
        await think(chat)
        await chat.sees("41 tok/s")
        chat.endpoint.stall_after_reasoning = True
        await chat.type("q")
        await chat.press("enter")
        await chat.sees("Thinking…")
        await chat.press("escape")
        await chat.answered()
        await chat.sees("stopped", "41 tok/s")


def lines_of(rows: list[Row], width: int) -> list[str]:
    return [line.text.plain for row in rows for line in row.lines(width, PALETTE)]


def test_a_streamed_thought_looks_like_a_whole_one() -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for _ in range(50):
        pieces = chance.choices(["word ", "\n", "\n\n", "- item\n", "\r\n", "日本語", "x" * 50, "\t"], k=40)
        streamed = Message(chat=0, parent=None, role="assistant", state="streaming")
        view = MessageView(streamed, live=True, show_reasoning=True)
        for piece in pieces:
            streamed.reasoning += piece
            view.append("")
            lines_of(view.rows, 30)
        streamed.state = "done"
        view.settle()
        whole = Message(chat=0, parent=None, role="assistant", reasoning=streamed.reasoning)
        expected = MessageView(whole, show_reasoning=True)
        expected.expand()
        assert lines_of(view.rows, 30) == lines_of(expected.rows, 30), f"seed {seed}"


def test_only_the_end_of_a_growing_thought_is_wrapped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    message = Message(chat=0, parent=None, role="assistant", state="streaming")
    view, flow = MessageView(message, live=True, show_reasoning=True), Flow()
    message.reasoning = "A line of the thought.\n" * 2000
    view.append("")
    flow.measure([view], 80, PALETTE)
    while flow.draw(0, flow.height):
        flow.measure([view], 80, PALETTE)
    drawn: list[Row] = []
    for kind in {type(row) for row in view.rows}:
        original = kind.draw
        monkeypatch.setattr(kind, "draw", lambda row, *a, original=original: (drawn.append(row), original(row, *a))[1])
    for _ in range(5):
        message.reasoning += "more "
        view.append("")
        flow.measure([view], 80, PALETTE)
        flow.draw(0, flow.height)
    assert 5 <= len(drawn) <= 25


def test_a_folded_thought_costs_nothing() -> None:
    message = Message(chat=0, parent=None, role="assistant", state="streaming")
    view = MessageView(message, live=True)
    message.reasoning = "x\n" * 10_000
    view.append("")
    assert len(view.rows) < 6


def test_stats_of_the_reasoning_survive() -> None:
    stats = AnswerStats(reasoning_ms=1500.0, reasoning_tokens=7)
    assert stats_from_json(stats_to_json(stats)) == stats


# The effort


async def test_the_effort_of_thinking_is_sent_and_kept(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("default")
        assert "reasoning_effort" not in chat.endpoint.requests[-1]
        for effort, sent in (("off", "none"), ("low", "low"), ("medium", "medium"), ("HIGH", "high")):
            await chat.ask(f"/think {effort}")
            await chat.hears("this chat", sent if sent != "none" else "off")
            await chat.ask("q")
            assert chat.endpoint.requests[-1]["reasoning_effort"] == sent
        await chat.ask("/params temperature=0.5")
        await chat.ask("q")
        assert chat.endpoint.requests[-1]["reasoning_effort"] == "high"
    async with open_chat() as chat:
        await chat.press("ctrl+f", "down", "down", "enter")
        await chat.until(lambda: chat.turns)
        chat.endpoint.is_edgelm = False
        await chat.ask("q")
        assert chat.endpoint.requests[-1]["reasoning_effort"] == "high", "it is a field of OpenAI"
        await chat.ask("/think auto")
        await chat.ask("q")
        assert "reasoning_effort" not in chat.endpoint.requests[-1]
        assert chat.endpoint.requests[-1]["temperature"] == 0.5


async def test_the_effort_is_chosen_from_a_list(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("/think")
        await chat.sees("auto", "off", "low", "medium", "high")
        await chat.press("down", "enter")
        await chat.hears("this chat", "off")
        assert chat.session.chat.sampling == {"reasoning_effort": "none"}
        await chat.ask("/think")
        await chat.sees("medium")
        await chat.press("escape")
        assert chat.session.chat.sampling == {"reasoning_effort": "none"}


async def test_a_wrong_effort_is_one_line(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("/think hard")
        await chat.hears("hard", "there is no effort", "auto, off, low, medium, high")
        assert chat.session.chat.sampling == {}


async def test_the_dialog_of_parameters_keeps_the_effort(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("/think low")
        await chat.ask("/params")
        await chat.sees("reasoning_effort", "low")
        await chat.type("1")
        await chat.press("enter")
        await chat.until(lambda: chat.session.chat.sampling == {"temperature": 1, "reasoning_effort": "low"})
