"""Completion: tokens in, text out, over an engine and a tokenizer.

Owns the way from sampled tokens to text that may be shown, and stop strings. Knows nothing of prompts, chat templates
or who asks.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from edgelm.core import FinishReason, Sampled, SamplingParams, Stats
from edgelm.engine.engine import Engine
from edgelm.errors import RequestError
from edgelm.text.stream import TextStream
from edgelm.text.tokenizer import Tokenizer

MAX_TOKEN_LEN = 128  # characters; the longest of the known vocabularies

Span = tuple[int, int]  # of a text: its first character, and the one behind its last


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the last one; the last has a finish reason and stats."""

    text: str
    sampled: tuple[Sampled, ...]
    finish_reason: FinishReason | None = None
    stats: Stats | None = None
    drafted: tuple[Span, ...] = ()  # the parts of `text` that were drafted and accepted


def check_text_size(text: str, context: int) -> None:
    """Raise RequestError for a text that cannot fit: llama.cpp's tokenizers may take minutes for megabytes."""
    if len(text) > MAX_TOKEN_LEN * context:
        raise RequestError(
            f"the prompt has {len(text):,} characters, a context of {context:,} tokens holds at most "
            f"{MAX_TOKEN_LEN * context:,}",
            "shorten it, or raise --ctx",
        )


async def complete(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: list[int],
    params: SamplingParams,
    stop: Sequence[str] = (),
    *,
    past: Sequence[int] = (),
    owner: str = "",
) -> AsyncGenerator[Delta, None]:
    """Yield the completion of a prompt as it is decoded. Leaving the iterator cancels it.

    The text never holds half a character or part of a stop string. `past` and `owner` are those of `Engine.submit`.
    Raises what that does, and the error with which the request fails.
    """
    text = _Text(tokenizer, params.stop_ids, stop)
    num_tokens = 0
    async with aclosing(engine.submit(prompt, params, past=past, owner=owner)) as stream:
        async for event in stream:
            sampled = text.push(event.sampled, event.accepted)
            num_tokens += len(sampled)
            if text.stopped:
                stats = event.stats or await stream.stop()
                shown, drafted = text.take()
                yield Delta(shown, sampled, "stop", replace(stats, completion_tokens=num_tokens), drafted)
                return
            if event.finish_reason:
                text.flush()
            shown, drafted = text.take()
            yield Delta(shown, sampled, event.finish_reason, event.stats, drafted)


class _Text:
    """The text of one completion, and which of its characters were drafted."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._stream = TextStream(stop)
        self._shown = ""  # since the last `take`
        self._begin = 0  # where in the text that starts
        self._drafted: list[Span] = []  # of the text; what is held back may be among it

    @property
    def stopped(self) -> bool:
        return self._stream.stopped

    @property
    def _end(self) -> int:
        return self._begin + len(self._shown) + self._stream.held_len

    def push(self, sampled: tuple[Sampled, ...], accepted: int) -> tuple[Sampled, ...]:
        """Add new tokens, the first `accepted` of which were drafted; return those of them up to a stop string."""
        for index, sample in enumerate(sampled):
            if sample.id not in self._stop_ids:
                before = self._end
                self._shown += self._stream.push(self._tokenizer.piece(sample.id))
                if index < accepted and self._end > before:
                    self._note(before, self._end)
            if self.stopped:
                return sampled[: index + 1]
        return sampled

    def flush(self) -> None:
        """Add what was held back: the text ends."""
        self._shown += self._stream.flush()

    def take(self) -> tuple[str, tuple[Span, ...]]:
        """Return what may be shown now, and the parts of it that were drafted."""
        shown, begin = self._shown, self._begin
        end = begin + len(shown)
        spans = tuple((max(a, begin) - begin, min(b, end) - begin) for a, b in self._drafted if a < end)
        self._drafted = [(max(a, end), b) for a, b in self._drafted if b > end]
        self._shown, self._begin = "", end
        return shown, spans

    def _note(self, begin: int, end: int) -> None:
        if self._drafted and self._drafted[-1][1] == begin:
            begin = self._drafted.pop()[0]
        self._drafted.append((begin, end))
