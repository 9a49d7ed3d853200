"""A first conversation with the starter: questions to choose from, the guide behind each answer, and a larger model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgelm.chats.knowledge.starter import UNKNOWN, larger_model
from edgelm.library.catalog import FIRST_CHAT, find_entry
from edgelm.library.names import CatalogName, parse_name
from edgelm.library.suggestion import suggested_entry
from edgelm.tui.prompt.box import Completion
from edgelm.tui.prompt.offers import EXAMPLES
from tests.tui.conftest import Open
from tests.tui.fake_endpoint import ANSWER

DECLINED = f"{UNKNOWN} {larger_model('qwen3:0.6b').text}"


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgelm.library.suggestion.available_memory_bytes", lambda: 4 * 10**9)


async def test_a_first_question_is_chosen_and_the_guide_is_read(open_chat: Open) -> None:
    async with open_chat(pulling=["false"]) as chat:
        await chat.ready()
        await chat.sees(*EXAMPLES)
        await chat.press("enter")
        assert chat.turns == [], "nothing was chosen"
        await chat.press("down", "down", "up", "enter")
        await chat.until(lambda: len(chat.turns) == 2, "the question and its answer")
        await chat.answered()
        assert chat.turns == [("user", EXAMPLES[0]), ("assistant", ANSWER)]
        request = chat.endpoint.requests[-1]
        assert request["temperature"] == 0
        choices = request["structured_outputs"]["choice"]
        assert any(text.startswith("## Download a model\n\n") for text in choices)
        system, question = request["messages"]
        assert question == {"role": "user", "content": EXAMPLES[0].lower()}
        assert "models › Download a model" in system["content"]
        assert EXAMPLES[1] not in chat.text
        await chat.sees("read: 1 ")
        await chat.ask("Who wrote the Iliad?")
        request = chat.endpoint.requests[-1]
        assert f"{UNKNOWN} {larger_model('qwen3:4b').text}" in request["structured_outputs"]["choice"]
        assert "`edgelm pull qwen3:4b` downloads a larger model" in request["messages"][-2]["content"]


async def test_one_key_gets_a_model_for_a_first_chat(open_chat: Open, tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    pulling = [sys.executable, "-m", "tests.tui.fake_pulling", str(tmp_path / "hub")]
    async with open_chat(pulling=pulling) as chat:
        await chat.ready()
        await chat.sees(f"/pull {FIRST_CHAT}", "Tab gets it")
        await chat.press("tab")
        await chat.sees(f"↓ {FIRST_CHAT}")
        jobs = tmp_path / "hub" / "jobs"
        await chat.until(lambda: jobs.exists() and jobs.read_text() == f"{FIRST_CHAT}\n", "the worker has the job")
        assert chat.turns == []
        (tmp_path / "hub" / "go").touch()
        await chat.until(lambda: not chat.screen.pulls, "the end of the pull")


async def test_the_first_model_is_the_small_one_also_where_a_larger_one_fits(open_chat: Open) -> None:
    async with open_chat(pulling=["false"]) as chat:
        chat.endpoint.models = ["starter"]
        await chat.ready()
        chat.screen.view.better_model = "qwen3:8b"
        await chat.press("ctrl+n")
        await chat.sees(f"/pull {FIRST_CHAT}", "Tab gets it")
        assert "qwen3:8b" not in chat.text
        chat.endpoint.models = ["starter", FIRST_CHAT]
        await chat.ask("/model starter")
        await chat.press("ctrl+n")
        await chat.sees("/pull qwen3:8b", "Tab gets it")
        chat.endpoint.models = ["starter", "qwen3:8b"]
        await chat.ask("/model starter")
        await chat.press("ctrl+n")
        await chat.sees(*EXAMPLES)
        assert "Tab gets it" not in chat.text, "neither a smaller one than the one here, nor that"


async def test_tab_asks_the_chosen_question(open_chat: Open) -> None:
    async with open_chat(pulling=["false"]) as chat:
        await chat.ready()
        await chat.sees(f"/pull {FIRST_CHAT}", "Tab gets it")
        await chat.press("down", "down", "tab")
        await chat.until(lambda: len(chat.turns) == 2, "the question and its answer")
        await chat.answered()
        assert chat.turns[0] == ("user", EXAMPLES[1])
        assert not chat.screen.pulls.running


async def test_a_click_asks_what_is_offered(open_chat: Open) -> None:
    async with open_chat(pulling=["false"]) as chat:
        await chat.ready()
        await chat.sees(*EXAMPLES)
        await chat.pilot.click(Completion, offset=(4, 1))
        await chat.until(lambda: len(chat.turns) == 2, "the question and its answer")
        assert chat.turns[0] == ("user", EXAMPLES[1])
        await chat.answered()


async def test_a_model_that_is_here_answers_and_is_not_offered(open_chat: Open) -> None:
    async with open_chat(pulling=["false"]) as chat:
        chat.endpoint.models = ["starter", FIRST_CHAT]
        await chat.ready()
        await chat.ask("q1")
        assert chat.endpoint.requests[-1]["model"] == FIRST_CHAT
        await chat.ask("/model starter")
        await chat.press("ctrl+n")
        await chat.sees(*EXAMPLES)
        assert f"/pull {FIRST_CHAT}" not in chat.text
        await chat.press("tab")  # as everywhere: to the next part of the screen
        assert not chat.screen.pulls


async def test_help_is_quoted_from_the_guide_whatever_the_model(open_chat: Open) -> None:
    async with open_chat(pulling=["false"]) as chat:
        await chat.ready()
        await chat.ask("/model qwen3-4b-q4_k_m.gguf")
        question = "How do I download a model with edgelm?"
        await chat.ask(question)
        assert chat.endpoint.requests[-1]["model"] == "qwen3-4b-q4_k_m.gguf"
        await chat.sees(f"/help {question}", "Tab asks it")
        await chat.press("tab")
        await chat.until(lambda: len(chat.turns) == 4, "the question and its answer")
        await chat.answered()
        request = chat.endpoint.requests[-1]
        assert request["model"] == "starter"
        assert any(text.startswith("## Download a model") for text in request["structured_outputs"]["choice"])
        assert "/help" not in chat.text
        await chat.ask("Thanks")
        assert chat.endpoint.requests[-1]["model"] == "qwen3-4b-q4_k_m.gguf"
        assert "structured_outputs" not in chat.endpoint.requests[-1]
        assert "/help" not in chat.text, "no question about edgelm"


async def test_help_gives_a_chat_no_model(open_chat: Open) -> None:
    async with open_chat(pulling=["false"]) as chat:
        chat.endpoint.models = ["starter", FIRST_CHAT]
        await chat.ready()
        await chat.ask_only("/help How do I download a model?")
        await chat.until(lambda: len(chat.turns) == 2, "the question and its answer")
        await chat.answered()
        assert chat.endpoint.requests[-1]["model"] == "starter"
        chat_id = chat.session.chat.id
        await chat.press("ctrl+n")
        await chat.screen.workspace.open_chat(chat_id)
        assert chat.session.chat.model == ""
        chat.screen.view.show_chat()
        await chat.ask("Thanks")
        assert chat.endpoint.requests[-1]["model"] == FIRST_CHAT


async def test_offers_make_way_for_what_is_typed(open_chat: Open) -> None:
    async with open_chat(pulling=["false"]) as chat:
        await chat.ready()
        await chat.sees(*EXAMPLES)
        await chat.type("x")
        await chat.until(lambda: EXAMPLES[0] not in chat.text, "no offers")
        await chat.press("backspace")
        await chat.sees(*EXAMPLES)
        await chat.press("escape")
        await chat.until(lambda: EXAMPLES[0] not in chat.text, "no offers")
        await chat.press("ctrl+n")
        await chat.sees(*EXAMPLES)
        await chat.ask("/model qwen3-4b-q4_k_m.gguf")
        await chat.until(lambda: EXAMPLES[0] not in chat.text, "no offers of another model")
        await chat.ask("q1")
        assert [message["role"] for message in chat.endpoint.requests[-1]["messages"]] == ["user"]
        assert "structured_outputs" not in chat.endpoint.requests[-1]


async def test_what_the_starter_does_not_know_offers_a_larger_model(open_chat: Open, tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    pulling = [sys.executable, "-m", "tests.tui.fake_pulling", str(tmp_path / "hub")]
    async with open_chat(pulling=pulling) as chat:
        chat.endpoint.answers = [DECLINED, ANSWER]
        await chat.ready()
        await chat.ask("Who was the first king of Spain?")
        await chat.sees("/pull qwen3:0.6b", "Down and Enter get it")
        await chat.press("enter", "tab", "shift+tab")
        assert not chat.screen.pulls, "neither Enter nor Tab alone downloads it"
        await chat.press("down", "enter")
        await chat.sees("↓ qwen3:0.6b · 90 %")
        (tmp_path / "hub" / "go").touch()
        await chat.until(lambda: not chat.screen.pulls, "the end of the pull")
        await chat.ask("How do I stop an answer?")
        assert "Down and Enter" not in chat.text


async def test_a_starter_of_another_server_reads_nothing_of_itself(open_chat: Open) -> None:
    async with open_chat() as chat:
        await chat.ready()
        assert EXAMPLES[0] not in chat.text
        await chat.ask("q1")
        assert [message["role"] for message in chat.endpoint.requests[-1]["messages"]] == ["user"]


def test_the_suggested_model_fits() -> None:
    def size(usable: float) -> str | None:
        entry = suggested_entry(int(usable))
        return entry.name if entry else None

    assert [size(nbytes) for nbytes in (1e9, 2e9, 4e9, 6e9, 500e9)] == [
        None, "qwen3:0.6b", "qwen3:4b", "qwen3:8b", "qwen3:8b",
    ]  # fmt: skip
    reference = parse_name("qwen3:8b")
    assert isinstance(reference, CatalogName)
    assert not find_entry(reference).gated


async def test_a_quotation_is_shown_from_its_top_until_somebody_scrolls(open_chat: Open) -> None:
    long = "\n\n".join(["## Download a model", *(f"Paragraph {number}." for number in range(80)), "The last one."])
    async with open_chat(pulling=["false"]) as chat:
        chat.endpoint.answers = [long, long]
        await chat.ready()
        await chat.ask("/help How do I download a model?")
        await chat.sees("Download a model", "Paragraph 0.")
        assert "The last one." not in chat.text
        chat.transcript.scroll_end(animate=False)
        await chat.sees("The last one.")
        chat.transcript.changed()
        await chat.pilot.pause()
        assert "Paragraph 0." not in chat.text, "it is shown from its top only once"
        await chat.ask("/model qwen3-4b-q4_k_m.gguf")
        await chat.ask("another question")
        await chat.sees("The last one.")


async def test_a_question_in_another_language_gets_the_english_quotation(open_chat: Open) -> None:
    async with open_chat(pulling=["false"]) as chat:
        await chat.ready()
        await chat.ask("/help Wie lade ich ein Modell herunter?")
        (choice,) = chat.endpoint.requests[-1]["structured_outputs"]["choice"]
        line, heading, *_ = choice.split("\n\n")
        assert "auf Englisch" in line
        assert heading == "## Download a model"
        await chat.ask("/help Warum ist der Himmel blau?")
        assert not any("auf Englisch" in text for text in chat.endpoint.requests[-1]["structured_outputs"]["choice"])
