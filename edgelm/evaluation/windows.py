"""Which stretches of a text a model sees, which of their tokens are scored, and in which steps.

Owns this cutting alone: integers in, integers out. Knows neither text nor logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

LEAST_WINDOW = 4


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that the model sees from an empty cache on; `tokens[first:]` are scored, and `first` is at least 1."""

    tokens: list[int]
    first: int

    @property
    def num_scored(self) -> int:
        return len(self.tokens) - self.first


@dataclass(frozen=True, slots=True)
class Cut:
    """How a text is cut into windows of at most `length` tokens.

    Without a stride the windows do not overlap and their second half is scored, so that each scored token has a context
    of at least half a window: what llama.cpp's perplexity tool does; an incomplete window at the end is left out.

    With a stride, each window starts `stride` tokens of text later than the one before and scores what that one did not
    reach, so each token once: as in Hugging Face's guide to the perplexity of fixed-length models. The last may be
    shorter.
    """

    length: int
    stride: int | None = None

    def windows(self, text: Iterator[int], bos: Sequence[int]) -> Iterator[Window]:
        """Yield the windows of a text without its BOS. Each begins with `bos`, which is empty where there is none.

        Without a stride, BOS takes the place of a window's first token: the text has one at its start already.
        """
        if self.stride is None:
            stream = chain(bos, text)
            while len(tokens := list(islice(stream, self.length))) == self.length:
                tokens[: len(bos)] = bos
                yield Window(tokens, self.length // 2 + 1)
            return
        held = list(islice(text, self.length - len(bos)))
        if len(bos) + len(held) > 1:
            yield Window([*bos, *held], 1)
        while fresh := list(islice(text, self.stride)):
            held = held[self.stride :] + fresh
            yield Window([*bos, *held], len(bos) + len(held) - len(fresh))

    def count(self, num_tokens: int, bos: Sequence[int]) -> int:
        """Return how many windows a text of so many tokens, its BOS not counted, has."""
        if self.stride is None:
            return (len(bos) + num_tokens) // self.length
        behind = max(num_tokens - (self.length - len(bos)), 0)
        return int(len(bos) + num_tokens > 1) + -(-behind // self.stride)


def steps(window: Window, max_tokens: int, max_rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, rows): feed `tokens[start:end]`, and score by the logits of its last `rows` tokens.

    The logits at a position predict the next token, so the window's last token is not fed.
    """
    start, last, first_row = 0, len(window.tokens) - 1, window.first - 1
    while start < last:
        scored_from = max(start, first_row)
        end = min(start + max_tokens, scored_from + max_rows, last)
        yield start, end, max(end - scored_from, 0)
        start = end
