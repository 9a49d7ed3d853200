"""The starter's own task on changed weights: which of the answers that the chat allows does it choose?

Owns the questions, a part of those of packaging/starter_test, and greedy decoding among the allowed answers. Knows
nothing of servers: the forward pass is the one of tests/bench/plain_llama.py.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from torch import Tensor

from edgelm.backends.llama.model import LlamaModel
from edgelm.knowledge.index import Knowledge
from edgelm.knowledge.passages import Passage
from edgelm.knowledge.quote import system_message
from edgelm.knowledge.starter import UNKNOWN, starter_answers, starter_passages
from edgelm.text.tokenizer import LlamaTokenizer
from tests.bench.plain_llama import PlainLlama

FOLDER = Path(__file__).resolve().parents[2] / "packaging" / "starter_test"
NUM_ASKED = 40  # questions about edgelm, and as many others
LARGER = "qwen3:4b"


def prompt_of(tokenizer: LlamaTokenizer, passages: list[Passage], question: str) -> list[int]:
    """Return the tokens of the starter's prompt."""
    text = f"<|system|>{system_message(passages)}<|end|><|user|>{question}<|end|><|assistant|>"
    return tokenizer.encode(text, special=True, bos=False)


class Task:
    """The starter's own task: which of the answers that the chat allows it begins."""

    def __init__(self, path: Path, model: PlainLlama, work: Path) -> None:
        self._model = model
        lines = (FOLDER / "questions.jsonl").read_text(encoding="utf-8").splitlines()
        others = (FOLDER / "general.txt").read_text(encoding="utf-8").splitlines()
        entries = [json.loads(line) for line in _spread(lines)]
        self._asked: list[tuple[str, list[list[str]] | None]] = [(it["question"], it["facts"]) for it in entries]
        self._asked += [(question, None) for question in _spread(others)]
        knowledge = Knowledge(work / "outliers-knowledge.db")
        self._prompts = []
        with closing(knowledge), closing(LlamaModel(path)) as native:
            tokenizer = LlamaTokenizer.of_model(native.native, native)
            for question, _ in self._asked:
                passages = starter_passages(knowledge, question, LARGER)
                answers = {text: tokenizer.encode(text, special=False, bos=False) for text in starter_answers(passages)}
                self._prompts.append((prompt_of(tokenizer, passages, question), answers))

    def counts(self, changed: dict[str, Tensor]) -> tuple[int, int]:
        """Return how many answers about edgelm are right, and how many other questions are declined."""
        right = declined = 0
        for (_, facts), (prompt, answers) in zip(self._asked, self._prompts, strict=True):
            answer = self._answer(prompt, answers, changed)
            if facts is None:
                declined += answer.startswith(UNKNOWN)
            else:
                right += holds(answer, facts)
        return right, declined

    def _answer(self, prompt: list[int], answers: dict[str, list[int]], changed: dict[str, Tensor]) -> str:
        """Return the answer that greedy decoding under the chat's grammar leads to."""
        begun: list[int] = []
        while len(answers) > 1:
            allowed = sorted({tokens[len(begun)] for tokens in answers.values() if len(tokens) > len(begun)})
            if len(allowed) > 1:
                log_probs = self._model.log_probs(prompt + begun, changed)[-1]
                allowed = [max(allowed, key=lambda token: log_probs[token].item())]
            begun.append(allowed[0])
            answers = {text: tokens for text, tokens in answers.items() if tokens[: len(begun)] == begun}
        return next(iter(answers))


def _spread(lines: list[str]) -> list[str]:
    return lines[:: len(lines) // NUM_ASKED][:NUM_ASKED]


def holds(text: str, facts: list[list[str]]) -> bool:
    """Tell whether a text has all facts, every one in any of its wordings; as packaging/starter_test/check.py does."""
    joined = " ".join(text.split()).casefold()
    return all(any(" ".join(words.split()).casefold() in joined for words in fact) for fact in facts)
