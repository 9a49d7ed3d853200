"""Streams of tokens that mislead a drafter, for the parts of it that protect.

Owns the streams. Those of `Contradicting` depend on the drafts: there is no draft whose tokens come.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

SEED = 7
VOCAB = 32_000
FEW = 64  # tokens of the streams whose contexts repeat by chance
NUM_REQUESTS = 24
PROMPT_LEN, ANSWER_LEN = 200, 400
PHASE = 48  # tokens of a predictable or an unpredictable part


class Answer(Protocol):
    """The answer to one request."""

    prompt: list[int]

    def after(self, text: list[int], draft: list[int]) -> list[int]:
        """Return the next tokens of the text: those of the draft that are accepted, and one more; none: the end."""


class Recorded:
    """An answer that does not depend on the drafts."""

    def __init__(self, prompt: list[int], answer: list[int]) -> None:
        self.prompt = prompt
        self._tokens = prompt + answer

    def after(self, text: list[int], draft: list[int]) -> list[int]:
        tokens, at = self._tokens, len(text)
        accepted = 0
        while accepted < len(draft) and tokens[at + accepted : at + accepted + 1] == [draft[accepted]]:
            accepted += 1
        return tokens[at : at + accepted + 1]


class Contradicting:
    """An answer that copies its own text, except where a draft is made; `kept` tokens of every 2 x `kept` are kept."""

    def __init__(self, rng: random.Random, kept: int = 0) -> None:
        self.prompt = [rng.randrange(VOCAB) for _ in range(PROMPT_LEN)]
        self._rng = rng
        self._kept = kept
        self._source = 0  # of the next token

    def after(self, text: list[int], draft: list[int]) -> list[int]:
        tokens: list[int] = []
        for guess in [*draft, None]:
            at = len(text) + len(tokens)
            if at == PROMPT_LEN + ANSWER_LEN:
                break
            token = text[self._source]
            self._source = (self._source + 1) % PROMPT_LEN
            is_kept = self._kept and (at // self._kept) % 2 == 0
            if guess is not None and guess == token and not is_kept:
                token = (token + 1 + self._rng.randrange(VOCAB - 1)) % VOCAB
                self._source = self._rng.randrange(PROMPT_LEN)
            tokens.append(token)
            if token != guess:
                break
        return tokens


def streams() -> dict[str, Callable[[], list[Answer]]]:
    """Return functions that make the requests of each stream, always the same ones."""
    return {
        "random": lambda: _recorded(_uniform),
        "few tokens": lambda: _recorded(_frequent),
        "near-repeats": lambda: _recorded(_near_repeats),
        "forks": lambda: _recorded(_forks),
        "alternating": lambda: _recorded(_alternating),
        "contradicting": lambda: _contradicting(0),
        "betraying": lambda: _contradicting(PHASE),
    }


def _recorded(make: Callable[[random.Random], list[int]]) -> list[Answer]:
    rng = random.Random(SEED)
    texts = [make(rng) for _ in range(NUM_REQUESTS)]
    return [Recorded(text[:PROMPT_LEN], text[PROMPT_LEN : PROMPT_LEN + ANSWER_LEN]) for text in texts]


def _contradicting(kept: int) -> list[Answer]:
    rng = random.Random(SEED)
    return [Contradicting(rng, kept) for _ in range(NUM_REQUESTS)]


def _uniform(rng: random.Random) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(PROMPT_LEN + ANSWER_LEN)]


def _frequent(rng: random.Random) -> list[int]:
    """Independent tokens with Zipf's frequencies."""
    return rng.choices(range(FEW), [1 / (rank + 1) for rank in range(FEW)], k=PROMPT_LEN + ANSWER_LEN)


def _near_repeats(rng: random.Random) -> list[int]:
    """A passage again and again, with every second to eighth token replaced."""
    passage = [rng.randrange(VOCAB) for _ in range(60)]
    text: list[int] = []
    while len(text) < PROMPT_LEN + ANSWER_LEN:
        every = rng.randrange(2, 9)
        text += [rng.randrange(VOCAB) if at % every == every - 1 else token for at, token in enumerate(passage)]
    return text


def _forks(rng: random.Random) -> list[int]:
    """The same few tokens, and after them another one each time."""
    words = [[rng.randrange(VOCAB) for _ in range(length)] for length in (2, 3, 5)]
    text: list[int] = []
    while len(text) < PROMPT_LEN + ANSWER_LEN:
        text += [*rng.choice(words), rng.randrange(VOCAB)]
    return text


def _alternating(rng: random.Random) -> list[int]:
    """A passage that is known, then frequent tokens by chance."""
    passage = [rng.randrange(VOCAB) for _ in range(PHASE)]
    text: list[int] = []
    while len(text) < PROMPT_LEN + ANSWER_LEN:
        text += passage + _frequent(rng)[:PHASE]
    return text
