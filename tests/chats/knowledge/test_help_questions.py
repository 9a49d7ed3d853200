"""How often the starter finds the section of the guide for a question, in four languages: the list only gets better."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgelm.chats.knowledge.guide import sections
from edgelm.chats.knowledge.index import Knowledge
from edgelm.chats.knowledge.languages import LINES, LONGEST_SHORT_NAME, in_english, language_of
from edgelm.chats.knowledge.starter import larger_model, starter_answers, starter_passages

QUESTIONS = tomllib.loads(Path(__file__).with_name("help_questions.toml").read_text(encoding="utf-8"))
FLOORS = {"en": 29, "de": 23, "fr": 18, "zh": 22}  # questions whose first section is right
MOST_TWICE = 10  # questions that get two sections
LARGER = larger_model(None)


@pytest.fixture(scope="module")
def knowledge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Knowledge]:
    opened = Knowledge(tmp_path_factory.mktemp("help") / "knowledge.db")
    yield opened
    opened.close()


def test_the_answers_of_the_list_are_sections() -> None:
    titles = {section.title for section in sections()}
    assert {title for asked in QUESTIONS.values() for answers in asked.values() for title in answers} <= titles


def test_questions_get_the_section_that_answers_them(knowledge: Knowledge) -> None:
    right, wrong, num_twice = dict.fromkeys(FLOORS, 0), [], 0
    for language, asked in QUESTIONS.items():
        for question, answers in asked.items():
            found = [p.heading for p in starter_passages(knowledge, question, None) if p != LARGER]
            num_twice += len(found) > 1
            if found and found[0] in answers:
                right[language] += 1
            else:
                wrong.append((question, found))
    print(right, {language: len(asked) for language, asked in QUESTIONS.items()}, num_twice, wrong)
    assert all(right[language] >= floor for language, floor in FLOORS.items()), (right, wrong)
    assert num_twice <= MOST_TWICE


def test_capitals_change_no_words_of_a_question() -> None:
    for language in LINES:
        for question in (*QUESTIONS[language], "Wie groß ist das Modell?"):
            if language_of(question) == language:
                assert language_of(question.upper()) == language
                whole, upper = (in_english(text, language).lower().split() for text in (question, question.upper()))
                assert set(upper) == set(whole), question
                for word in {word for word in re.findall(r"\w+", question) if len(word) > LONGEST_SHORT_NAME}:
                    stressed = question.replace(word, word.upper())
                    assert set(in_english(stressed, language).lower().split()) == set(whole), stressed


def test_each_language_is_recognized_and_its_answer_says_that_it_is_in_english(knowledge: Knowledge) -> None:
    for language, asked in QUESTIONS.items():
        for question in asked:
            assert language_of(question) == ("" if language == "en" else language), question
            if language == "en":
                continue
            answers = starter_answers(starter_passages(knowledge, question, None), question)
            if answers[0].startswith(LINES[language]):
                assert len(answers) == 1, question
                assert answers[0].split("\n\n")[1].startswith("## ")


@pytest.mark.parametrize(
    "question",
    [
        "Warum ist der Himmel blau?",
        "Wie geht es dir?",
        "comment faire une mayonnaise",
        "quelle est la capitale du Canada",
        "今天天气怎么样",
        "番茄炒蛋怎么做",
    ],
)
def test_a_question_about_something_else_finds_nothing(knowledge: Knowledge, question: str) -> None:
    assert starter_passages(knowledge, question, None) == [LARGER]


def test_names_and_numbers_stay_as_they_are() -> None:
    assert in_english("Wie lade ich Qwen3-4B herunter?", "de").split()[-2:] == ["Qwen3", "4B"]
    assert in_english("Wie geht es?", "de") == ""
    assert in_english("Wie benutze ich die API?", "de").split()[-1] == "API", "a name is enough"
    assert in_english("\u600e\u6837\u4f7f\u7528gpu?", "zh").split()[-1] == "gpu"
