"""A conversation by keys: sending, stopping, answering again, branches, chats and search."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual import events

from edgelm.chats.store import Store
from edgelm.tui.workspace import ChatDefaults
from tests.tui.conftest import Driver, Open
from tests.tui.fake_endpoint import ANSWER, FakeEndpoint


async def test_one_costly_frame_delays_no_other(
    open_chat: Open, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block of code imports its lexer, and a laptop sleeps."""
    endpoint.tokens_per_second = 100
    async with open_chat() as chat:
        await chat.ready()
        times = iter((0.0, 600.0))
        monkeypatch.setattr("time.thread_time", lambda: next(times, 600.0))
        await chat.ask("q1")
        await chat.sees("It is not stable.", "tok/s")


async def test_a_message_is_answered_and_saved(open_chat: Open, tmp_path: Path) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.type("Explain quicksort")
        await chat.press("enter")
        await chat.answered()
        assert chat.turns == [("user", "Explain quicksort"), ("assistant", ANSWER)]
        await chat.sees("Explain quicksort", "def quicksort", "│ O(n log n)", "41 tok/s")
        assert chat.prompt.text == ""
    store = Store(tmp_path / "chats.db")
    (saved,) = store.chats()
    assert saved.title == "Explain quicksort"
    assert [message.text for message in store.messages(saved.id)] == ["Explain quicksort", ANSWER]
    store.close()


async def test_line_breaks_are_part_of_the_message(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.type("one\ntwo")
        await chat.press("shift+enter", *"three", "alt+enter", *"four", "enter")
        await chat.answered()
        assert chat.turns[0] == ("user", "one\ntwo\nthree\nfour")


async def test_a_paste_of_many_lines_is_not_sent(open_chat: Open) -> None:
    from textual.events import Paste

    async with open_chat() as chat:
        chat.app.post_message(Paste("first\nsecond\n/new\n"))
        await chat.until(lambda: chat.prompt.text == "first\nsecond\n/new\n")
        assert chat.turns == []


async def test_the_cursor_rests_after_a_while_and_blinks_again_with_a_key(
    open_chat: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgelm.tui.prompt.box.BLINK_S", 0.1)
    async with open_chat() as chat:
        await chat.until(lambda: not chat.prompt.cursor_blink)
        assert chat.prompt.has_focus
        monkeypatch.setattr("edgelm.tui.prompt.box.BLINK_S", 60.0)
        await chat.type("a")
        assert chat.prompt.cursor_blink


def keys_at_once(chat: Driver, keys: str) -> None:
    """Press keys as a terminal sends them in one piece: none waits for the effect of another."""
    for key in keys:
        chat.app.post_message(events.Key("enter" if key == "\r" else key, None if key == "\r" else key))


async def test_what_is_typed_or_pasted_right_after_enter_stays(open_chat: Open, endpoint: FakeEndpoint) -> None:
    async with open_chat() as chat:
        await chat.ready()
        keys_at_once(chat, "AAA\rBBB")
        chat.app.post_message(events.Paste("CCC"))
        await chat.answered()
        await chat.until(lambda: chat.turns[:1] == [("user", "AAA")] and chat.answer is None, "the answer")
        assert chat.prompt.text == "BBBCCC"
        endpoint.stall_after = 1
        keys_at_once(chat, "\rDDD\rEEE")  # the second is refused
        await chat.hears("an answer is being written")
        assert chat.turns[2] == ("user", "BBBCCC")
        assert chat.prompt.text == "DDD\nEEE"


async def test_a_command_is_no_draft_of_the_next_run(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        keys_at_once(chat, "/quit\r")
        await chat.until(lambda: not chat.app.is_running, "the end")
    async with open_chat() as chat:
        await chat.ready()
        assert chat.prompt.text == ""


async def test_a_message_that_was_set_aside_for_an_edit_comes_back(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("first")
        await chat.type("later")
        await chat.press("f4")
        keys_at_once(chat, "!\r")
        await chat.until(lambda: chat.turns[0] == ("user", "first!") and chat.answer is None, "the answer")
        assert chat.prompt.text == "later"


async def test_a_message_that_was_set_aside_for_an_edit_is_the_draft_of_the_next_run(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("first")
        await chat.type("later")
        await chat.press("f4")
        await chat.until(lambda: chat.prompt.text == "first", "edited")
    async with open_chat() as chat:
        await chat.until(lambda: chat.prompt.text == "later", "the draft of the last time")


async def test_nothing_is_sent_without_text(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.press("enter", "space", "ctrl+j", "enter")
        assert chat.turns == []
        assert chat.endpoint.requests == []


async def test_escape_stops_and_keeps_what_came(open_chat: Open, tmp_path: Path) -> None:
    async with open_chat() as chat:
        chat.endpoint.stall_after = 5
        await chat.type("go")
        await chat.press("enter")
        await chat.sees("Quicksort picks a pivot and")
        await chat.press("escape")
        await chat.answered()
        await chat.sees("· stopped")
        assert chat.turns[1] == ("assistant", "Quicksort picks a *pivot* and")
        await chat.until(lambda: chat.endpoint.cancelled == 1, "the end of the request")
    store = Store(tmp_path / "chats.db")
    assert [message.state for message in store.messages(store.chats()[0].id)] == ["done", "stopped"]
    store.close()


async def test_the_conversation_is_sent_in_order(open_chat: Open) -> None:
    async with open_chat() as chat:
        chat.endpoint.answers = ["a1", "a2"]
        await chat.ask("/system Be brief.")
        await chat.ask("q1")
        await chat.ask("q2")
        assert chat.endpoint.requests[1]["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "q1"},
            {"role": "assistant", "content": "a1"},
            {"role": "user", "content": "q2"},
        ]


async def test_regenerating_keeps_the_old_answer(open_chat: Open) -> None:
    async with open_chat() as chat:
        chat.endpoint.answers = ["one", "two", "three"]
        await chat.ask("q")
        await chat.press("ctrl+r")
        await chat.until(lambda: chat.turns[-1][1] == "two" and chat.answer is None)
        await chat.sees("◂ 2/2 ▸", "two")
        await chat.press("shift+tab", "left")
        await chat.until(lambda: chat.turns[-1][1] == "one")
        await chat.sees("◂ 1/2 ▸")
        await chat.press("left")  # there is none before
        assert chat.turns[-1][1] == "one"
        await chat.press("right")
        await chat.until(lambda: chat.turns[-1][1] == "two")


async def test_editing_makes_a_branch_and_keeps_the_old_one(open_chat: Open) -> None:
    async with open_chat() as chat:
        chat.endpoint.answers = ["a1", "a2", "a3"]
        await chat.ask("q1")
        await chat.ask("q2")
        await chat.press("shift+tab", "up", "up", "up", "e")  # q1
        await chat.until(lambda: chat.prompt.text == "q1", "the text to edit")
        await chat.type("!")
        await chat.press("enter")
        await chat.answered()
        assert chat.turns == [("user", "q1!"), ("assistant", "a3")]
        await chat.press("shift+tab", "up", "left")
        await chat.until(lambda: len(chat.turns) == 4)
        assert [text for _, text in chat.turns] == ["q1", "a1", "q2", "a2"]


async def test_escape_leaves_the_editing(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("q1")
        await chat.press("f4")
        await chat.until(lambda: chat.screen.pane.editing is not None)
        await chat.press("escape")
        assert chat.screen.pane.editing is None
        assert chat.prompt.text == ""
        await chat.ask("q2")
        assert [text for role, text in chat.turns if role == "user"] == ["q1", "q2"]


async def test_chats_are_listed_newest_first_and_reopened(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("alpha question")
        await chat.press("ctrl+n")
        await chat.until(lambda: chat.turns == [])
        await chat.ask("beta question")
    async with open_chat() as chat:
        await chat.sees("alpha question", "beta question", "F1 shows every key")
        lines = chat.text.split("\n")
        rows = [next(i for i, line in enumerate(lines) if word in line) for word in ("beta", "alpha")]
        assert rows == sorted(rows)
        await chat.press("ctrl+f", "down", "down", "enter")
        await chat.until(lambda: chat.turns[:1] == [("user", "alpha question")])
        await chat.sees("It is not stable.")
        assert chat.app.focused is chat.prompt


async def test_search_finds_text_of_old_chats_and_goes_there(open_chat: Open) -> None:
    async with open_chat() as chat:
        chat.endpoint.answers = ["something about ferrets", "nothing"]
        await chat.ask("pets")
        for i in range(12):
            await chat.ask(f"more {i}")
        await chat.press("ctrl+n")
        await chat.ask("other")
        await chat.press("ctrl+f")
        await chat.type("ferr")
        await chat.sees("something about ferrets")
        await chat.press("enter", "enter")
        await chat.until(lambda: len(chat.turns) == 26)
        await chat.until(lambda: chat.transcript.selected == chat.session.tree.path()[1].id)
        assert "something about ferrets" in chat.text.split("pets", 1)[1]
        await chat.press("ctrl+f", "escape")
        await chat.sees("other")


async def test_a_chat_that_is_open_twice_says_so(open_chat: Open) -> None:
    async with open_chat() as one, open_chat() as other:
        await one.ask("begin")
        await other.ready()
        await other.screen.workspace.open_chat(one.session.chat.id)
        other.screen.view.show_chat()
        await one.ask("from the first window")
        await other.ask("from the second window")
        await other.hears("another window has written in this chat")
        texts = {message.text for message in other.session.tree.messages.values() if message.role == "user"}
        assert texts == {"begin", "from the first window", "from the second window"}
        assert other.turns[2] == ("user", "from the second window")
        await other.sees("2/2")
        await other.ask("again")
        assert await other.screen.workspace.adopt(other.session) == "", "it is told once"


async def test_enter_in_a_search_waits_for_its_hits(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("about cats")
        cats = chat.session.chat.id
        await chat.press("ctrl+n")
        await chat.ask("about dogs")
        await chat.press("ctrl+f")
        keys_at_once(chat, "cats\r\r")
        await chat.until(lambda: chat.session.chat.id == cats, "the chat that was searched for")


async def test_hints_are_those_of_the_open_list(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.type("/mo")
        await chat.sees("Enter run", "Tab complete", "Esc close")
        await chat.press("escape")
        await chat.sees("Enter send")
        chat.prompt.put("")
        await chat.type("see @")
        await chat.sees("Enter attach", "Tab open", "Esc close")
        await chat.press("ctrl+f")
        await chat.sees("Enter results", "Esc back")
        assert "p pin" not in chat.text


async def test_history_with_up(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ask("first")
        await chat.ask("second\nline")
        await chat.type("draft")
        await chat.press("up")
        assert chat.prompt.text == "second\nline"
        await chat.press("up")
        assert chat.prompt.text == "second\nline", "the cursor moves to the first line at first"
        await chat.press("up")
        assert chat.prompt.text == "first"
        await chat.press("down", "down", "down")
        assert chat.prompt.text == "draft"
    async with open_chat() as chat:
        await chat.until(lambda: chat.prompt.text == "draft", "the draft of the last time")
        chat.prompt.put("")
        await chat.press("up")
        assert chat.prompt.text == "second\nline"
        chat.prompt.put("/quit")
        await chat.press("enter")
        await chat.until(lambda: not chat.app.is_running)
    async with open_chat() as chat:
        await chat.until(lambda: chat.screen.workspace.chats, "the state of the last time")
        assert chat.prompt.text == "", "the command that ended it is no draft"


async def test_an_answer_goes_on_while_another_chat_is_open(open_chat: Open) -> None:
    async with open_chat() as chat:
        chat.endpoint.tokens_per_second = 5
        await chat.type("long")
        await chat.press("enter")
        await chat.sees("Quicksort picks")
        first = chat.answer
        assert first is not None
        await chat.press("ctrl+n")
        await chat.until(lambda: chat.turns == [])
        chat.endpoint.tokens_per_second = 0
        await chat.ask("short")
        assert chat.turns[1][1] == ANSWER
        await chat.press("ctrl+f", "down", "down", "enter")
        await chat.until(lambda: chat.turns[:1] == [("user", "long")])
        await chat.answered()
        assert first.message.text == ANSWER
        await chat.sees("It is not stable.")


async def test_the_model_of_a_chat_is_chosen_from_the_list(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        await chat.press("ctrl+o")
        await chat.sees("Model of this chat", "starter", "Q8_0")
        await chat.type("qwen")
        await chat.press("enter")
        await chat.until(lambda: chat.screen.status.status.model.startswith("qwen3"))
        await chat.ask("hello")
        assert chat.endpoint.requests[0]["model"] == "qwen3-4b-q4_k_m.gguf"
    async with open_chat() as chat:
        await chat.ready()
        await chat.sees("qwen3-4b-q4_k_m.gguf")


async def test_a_resize_in_the_middle_of_a_stream_loses_nothing(open_chat: Open) -> None:
    async with open_chat() as chat:
        chat.endpoint.tokens_per_second = 150
        await chat.type("go")
        await chat.press("enter")
        for size in ((60, 20), (200, 60), (20, 6), (3, 2), (100, 40)):
            await chat.pilot.resize_terminal(*size)
            await chat.pilot.pause(0.1)
        await chat.answered()
        assert chat.turns[1][1] == ANSWER
        await chat.sees("def quicksort", "It is not stable.")


async def test_a_model_path_is_requested_even_if_the_endpoint_does_not_list_it(open_chat: Open) -> None:
    for path in ("/own/tiny2.5-1b", "/own/other.gguf"):
        async with open_chat(defaults=ChatDefaults(model=path)) as chat:
            await chat.type("hi")
            await chat.press("enter")
            await chat.answered()
            assert chat.endpoint.requests[-1]["model"] == path
            await chat.sees(path.rpartition("/")[2])


GPU = "NVIDIA GeForce RTX 3060 is not used: triton is not installed; type: pipx inject edgelm edgelm-llama-cuda"


async def test_a_gpu_that_is_not_used_is_told_once_and_stays_in_the_row_of_state(
    open_chat: Open, endpoint: FakeEndpoint
) -> None:
    endpoint.unused_gpu = GPU
    async with open_chat(size=(160, 32)) as chat:
        await chat.ready()
        await chat.ask("hello")
        await chat.hears(GPU)
        await chat.sees("hello", GPU[:60])  # the row has no room for its end
        await chat.ask("again")
        assert [GPU in note.message for note in chat.app._notifications].count(True) == 1


async def test_the_row_of_state_says_that_another_server_runs_the_model(
    open_chat: Open, endpoint: FakeEndpoint
) -> None:
    endpoint.runs_at = dict.fromkeys(endpoint.models, "box:8000")
    async with open_chat(size=(100, 32)) as chat:
        await chat.ready()
        await chat.sees("answers from box:8000")
        await chat.ask("hello")
        await chat.sees("runs at box:8000")
