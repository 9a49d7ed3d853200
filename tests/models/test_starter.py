"""The built-in model is small enough to ship, and answers from the passages that it reads.

The 400 questions of packaging/starter_test are asked by its check.py; here are some of them.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import pytest

from edgelm.backends.build import build
from edgelm.backends.model import LoadedModel
from edgelm.base.config import Settings
from edgelm.base.passages import Passage
from edgelm.base.workers.grammars import GrammarSpec
from edgelm.base.workers.messages import EngineJob
from edgelm.chats.knowledge.index import Knowledge
from edgelm.chats.knowledge.quote import system_message
from edgelm.chats.knowledge.starter import (
    CONTEXT,
    UNKNOWN,
    larger_model,
    offered_model,
    starter_answers,
    starter_passages,
)
from edgelm.engine.sampling.grammar import GrammarCompiler
from edgelm.jobs.answer import Answerer
from edgelm.jobs.request import AnswerRequest
from edgelm.library.local import find_local
from edgelm.text.template_runner import TemplateRunner
from tests.counts import Count

QUESTIONS = Count(test=20, soak=200)  # of each kind
TESTS = Path(__file__).parents[2] / "packaging" / "starter_test"
LARGER = "qwen3:4b"
# Of all questions it answers more (check.py); a sample of 20 may be worse, and so may another processor's arithmetic.
LEAST_RIGHT, LEAST_DECLINED = 0.65, 0.8


@pytest.fixture(scope="module")
def starter() -> Iterator[LoadedModel]:
    loaded = build(EngineJob(model=find_local("starter").path, settings=Settings()))
    yield loaded
    loaded.engine.close()


@pytest.fixture(scope="module")
def knowledge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Knowledge]:
    opened = Knowledge(tmp_path_factory.mktemp("cache") / "knowledge.db")
    yield opened
    opened.close()


async def answer(starter: LoadedModel, question: str, passages: Sequence[Passage]) -> str:
    """Return the answer as the chat and `edgelm run` ask for it."""
    grammars = GrammarCompiler(starter.tokenizer, starter.engine.info.num_vocab)
    templates = TemplateRunner(starter.tokenizer)
    answerer = Answerer(starter, templates, grammars, Settings(temperature=0.0, max_tokens=900))
    system = [{"role": "system", "content": system_message(passages)}] if passages else []
    request = AnswerRequest(
        messages=[*system, {"role": "user", "content": question}],
        grammar=GrammarSpec("choice", json.dumps(starter_answers(passages))) if passages else None,
    )
    try:
        prepared = await answerer.prepare(request)
        return "".join([delta.text async for delta in answerer.answer(prepared)])
    finally:
        await templates.close()
        await grammars.close()


def ask(starter: LoadedModel, question: str, passages: Sequence[Passage]) -> str:
    return " ".join(asyncio.run(answer(starter, question, passages)).split())


def test_it_is_small_and_can_be_quantized() -> None:
    path = find_local("starter").path
    assert path.stat().st_size <= 8_000_000
    tensors = gguf.GGUFReader(path).tensors
    assert sum(int(tensor.n_elements) for tensor in tensors) <= 7_000_000
    assert all(tensor.shape[0] % 256 == 0 for tensor in tensors), "K-quants have blocks of 256"


def test_its_context_is_what_its_passages_are_chosen_for(starter: LoadedModel) -> None:
    assert starter.engine.info.context == CONTEXT
    assert starter.tokenizer.chat_template
    assert starter.name == "starter"


def test_it_answers_questions_about_edgelm(starter: LoadedModel, knowledge: Knowledge) -> None:
    entries = [json.loads(line) for line in (TESTS / "questions.jsonl").read_text(encoding="utf-8").splitlines()]
    entries = random.Random(1).sample(entries, min(QUESTIONS, len(entries)))
    wrong = []
    for entry in entries:
        text = ask(starter, entry["question"], starter_passages(knowledge, entry["question"], LARGER)).casefold()
        if not all(any(" ".join(fact.split()).casefold() in text for fact in facts) for facts in entry["facts"]):
            wrong.append((entry["question"], text))
    assert len(wrong) <= (1 - LEAST_RIGHT) * len(entries), wrong


def test_it_declines_what_it_does_not_know(starter: LoadedModel, knowledge: Knowledge) -> None:
    questions = (TESTS / "general.txt").read_text(encoding="utf-8").splitlines()
    questions = random.Random(1).sample(questions, min(QUESTIONS, len(questions)))
    answers = [ask(starter, text, starter_passages(knowledge, text, LARGER)) for text in questions]
    declined = [text for text in answers if text.startswith(UNKNOWN)]
    assert len(declined) >= LEAST_DECLINED * len(answers), answers
    assert {offered_model(text) for text in declined} == {LARGER}


@pytest.mark.parametrize("model", ["gemma3:1b", "phi4:14b"])
def test_it_names_the_larger_model_that_stands_there(starter: LoadedModel, model: str) -> None:
    assert offered_model(ask(starter, "Who wrote Hamlet?", [larger_model(model)])) == model


@pytest.mark.parametrize(("question", "told"), [("How do I stop an answer?", "Ctrl+Z"), ("stop the answer", "F11")])
def test_it_reads_and_does_not_remember(starter: LoadedModel, question: str, told: str) -> None:
    """The guide says Esc."""
    text = (
        f"## Stop an answer\n\nPress `{told}` to stop the answer that is being written. The part that is there is kept."
    )
    passages = [Passage("chat", "Stop an answer", text), larger_model(LARGER)]
    assert f"`{told}`" in ask(starter, question, passages)


def test_without_passages_it_says_where_they_come_from(starter: LoadedModel) -> None:
    assert "edgelm help TOPIC" in ask(starter, "How do I download a model?", [])
