"""The starter's passages for a question, and its possible answers: quotations of them, and its own sentences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgelm.base.passages import Passage
from edgelm.chats.knowledge.guide import TOPICS, question_groups, sections
from edgelm.chats.knowledge.index import Knowledge
from edgelm.chats.knowledge.languages import LINES, in_english, language_of
from edgelm.chats.knowledge.starter import (
    SMALL_TALK,
    UNKNOWN,
    WITHOUT_PASSAGES,
    larger_model,
    offered_model,
    starter_answers,
    starter_passages,
)

SHORT = Passage("chat", "Stop", "## Stop\n\nPress `Esc`.\n\n    edgelm run")
OTHER = Passage("keys", "Keys", "## Keys\n\n`Esc` stops.\n")


def test_the_answers_are_quotations_and_sentences_of_its_own() -> None:
    last = larger_model("qwen3:4b")
    declined = f"{UNKNOWN} {last.text}"
    assert starter_answers([SHORT, last]) == [*SMALL_TALK, SHORT.text, declined]
    assert starter_answers([SHORT, OTHER, last])[-2:] == [f"{SHORT.text}\n\n## Keys\n\n`Esc` stops.", declined]
    assert starter_answers([last]) == [*SMALL_TALK, declined]
    assert starter_answers([SHORT]) == [*SMALL_TALK, SHORT.text], "it is certainly about the guide"


def test_without_passages_it_says_where_they_come_from() -> None:
    assert starter_answers([]) == [*SMALL_TALK, UNKNOWN, WITHOUT_PASSAGES]


def test_only_where_it_knows_nothing_it_offers_a_model() -> None:
    for name in ("qwen3:4b", "gemma3:1b"):
        (declined,) = [text for text in starter_answers([SHORT, larger_model(name)]) if text.startswith(UNKNOWN)]
        assert offered_model(declined) == name
    assert offered_model(f"{UNKNOWN} {larger_model(None).text}") is None
    assert offered_model("`edgelm pull qwen3:4b`; in the chat, `/pull qwen3:4b`.") is None


@pytest.fixture
def knowledge(tmp_path: Path) -> Iterator[Knowledge]:
    opened = Knowledge(tmp_path / "knowledge.db")
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("question", "heading"),
    [
        ("How do I stop an answer?", "Stop an answer, or quit"),
        ("kv int8", "What the KV cache is, and its modes"),
        ("I have no internet here, does it work?", "Use edgelm without a network"),
    ],
)
def test_it_reads_the_section_that_a_question_is_about(knowledge: Knowledge, question: str, heading: str) -> None:
    passages = starter_passages(knowledge, question, "qwen3:4b")
    assert heading in [passage.heading for passage in passages]
    assert len(passages) <= 3


def test_a_question_of_the_list_gets_its_section_also_in_capitals(knowledge: Knowledge) -> None:
    """The index is read again for each one: these are every 300th, and those that failed."""
    asked = [(text, group.title) for topic in TOPICS for group in question_groups(topic) for text in group.questions]
    attach = ("can I attach a photo?", "What can be attached")
    assert attach in asked
    for text, title in [attach, *(pair for pair in asked[::300] if " " in pair[0] and not language_of(pair[0]))]:
        for question in (text, text[0].upper() + text[1:], text.upper()):
            passages = starter_passages(knowledge, question, None)
            assert [passage.heading for passage in passages] == [title], question
            assert starter_answers(passages, question) == [passages[0].text.strip("\n")], question


@pytest.mark.parametrize("question", ["What is a preset?", "How do I make a preset?", "What are presets?", "Presets"])
def test_a_question_for_what_a_title_names_is_certain(knowledge: Knowledge, question: str) -> None:
    passages = starter_passages(knowledge, question, None)
    assert [passage.heading for passage in passages] == ["Presets of the chat"]
    assert len(starter_answers(passages, question)) == 1, "the model has no choice"


@pytest.mark.parametrize("text", ["bye", "see you", "I see now"])
def test_small_talk_has_its_answers(knowledge: Knowledge, text: str) -> None:
    assert set(SMALL_TALK) < set(starter_answers(starter_passages(knowledge, text, None), text))


def test_a_question_about_something_else_finds_nothing(knowledge: Knowledge) -> None:
    assert starter_passages(knowledge, "Who wrote the Iliad?", None) == [larger_model(None)]


def test_every_section_of_the_guide_can_be_quoted() -> None:
    for section in sections():
        assert section.text.strip() in starter_answers([Passage(section.topic, section.title, section.text)])


NEWCOMERS = {
    "where do I find bigger models?": "Download a model",
    "HOW CAN I MAKE IT USE LESS RAM?": "Out of memory: the model does not fit",
    "can it run on my graphics card": "Use an NVIDIA GPU",
    "how do I give a model tools?": "Use tools of MCP servers in the chat",
    "can I show it an image?": "What can be attached",
    "best coding model": "Choose a first model",
    "Wie kann ich den Speicherverbrauch verringern?": "Out of memory: the model does not fit",
    "Wo werden meine Chats gespeichert?": "What edgelm stores about conversations",
    "which model is best for coding?": "Choose a first model",
    "What is the best model for coding?": "Choose a first model",
    "What's a good model for coding?": "Choose a first model",
    "how do I use edgelm in python": "Use the OpenAI API",
    "How do I use edgelm with Python?": "Use the OpenAI API",
    "can I call edgelm in my python script?": "Use the OpenAI API",
    "Where can I find a larger model?": "Download a model",
    "How can I get a larger model than this one?": "Download a model",
    "can it use my graphics card?": "Use an NVIDIA GPU",
    "can the program use my graphics card": "Use an NVIDIA GPU",
    "Wie benutze ich edgelm mit Python?": "Use the OpenAI API",
    "WIE LADE ICH EIN MODELL?": "Download a model",
    "WO WERDEN MEINE CHATS GESPEICHERT?": "What edgelm stores about conversations",
    "KANN ICH EIN BILD SCHICKEN?": "What can be attached",
    "COMMENT RÉDUIRE L'UTILISATION DE LA MÉMOIRE ?": "Out of memory: the model does not fit",
    "\u600e\u6837\u51cf\u5c11\u5185\u5b58\u5360\u7528\uff1f": "Out of memory: the model does not fit",
}


def test_no_list_has_what_newcomers_ask() -> None:
    asked = {
        text.casefold().rstrip(" ?") for topic in TOPICS for group in question_groups(topic) for text in group.questions
    }
    assert not asked & {question.casefold().rstrip(" ?") for question in NEWCOMERS}, "the test would be a look-up"


@pytest.mark.parametrize(("question", "title"), NEWCOMERS.items())
def test_what_newcomers_ask_has_its_section(knowledge: Knowledge, question: str, title: str) -> None:
    assert starter_passages(knowledge, question, None)[0].heading == title


@pytest.mark.parametrize("question", ["Wie setze ich EDGELM_MEMORY?", "WIE SETZE ICH EDGELM_MEMORY?"])
def test_the_name_of_a_variable_keeps_its_words(question: str) -> None:
    """A long word in capitals is one that is stressed, but not in a name."""
    assert {"edgelm", "memory"} <= set(in_english(question, "de").casefold().split())
    assert "wirklich" not in in_english(f"{question} WIRKLICH?", "de").casefold()


@pytest.mark.parametrize("name", ["EDGELM_MEMORY", "EDGELM_CACHE_DIR", "EDGELM_CONFIG_DIR"])
def test_a_variable_is_found_in_german_as_in_english(knowledge: Knowledge, name: str) -> None:
    sections = [
        starter_passages(knowledge, text, None)[0] for text in (f"Wie setze ich {name}?", f"How do I set {name}?")
    ]
    assert sections[0].heading == sections[1].heading


@pytest.mark.parametrize("text", ["Hallo Speicher", "Bonjour m\u00e9moire"])
def test_a_word_behind_a_greeting_is_asked_about_in_its_language(knowledge: Knowledge, text: str) -> None:
    (answer,) = starter_answers(starter_passages(knowledge, text, None), text)
    assert answer.startswith((LINES["de"], LINES["fr"]))


@pytest.mark.parametrize(
    "text",
    [
        "Hi",
        "hello!",
        "Good evening",
        "hello there, friend",
        "HEY EDGELM",
        "Hello Brunhilde",
        "Guten Abend",
        "bonsoir",
        "\u4f60\u597d",
    ],
)
def test_a_greeting_is_answered_by_one(knowledge: Knowledge, text: str) -> None:
    assert starter_answers(starter_passages(knowledge, text, None), text) == [SMALL_TALK[0]]


@pytest.mark.parametrize(
    "text",
    [
        "hi memory",
        "Hallo Speicher",
        "Hallo, Modelle?",
        "Bonjour m\u00e9moire",
        "Hello, how do I download a model?",
        "good model",
        "history",
        "hi 4b",
        "\u4f60\u597d\uff0c\u600e\u4e48\u4e0b\u8f7d\u6a21\u578b\uff1f",
        "hi \u5185\u5b58",
    ],
)
def test_a_question_that_only_begins_so_is_no_greeting(knowledge: Knowledge, text: str) -> None:
    assert starter_answers(starter_passages(knowledge, text, None), text) != [SMALL_TALK[0]]
