"""Completion: tokens in, text out, with an engine and a tokenizer.

Owns the way from sampled tokens to text that may be shown, and stop strings. Knows nothing of prompts, chat templates
and clients.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from edgelm.engine.core import FinishReason, Matcher, Sampled, SamplingParams, Stats
from edgelm.engine.engine import Engine
from edgelm.text.stream import TextStream
from edgelm.text.tokenizer import Tokenizer

Span = tuple[int, int]  # of characters: start and end


@dataclass(frozen=True, slots=True)
class Delta:
    """The part of a completion since the previous delta. The last one has a finish reason and stats."""

    text: str
    sampled: tuple[Sampled, ...]
    finish_reason: FinishReason | None = None
    stats: Stats | None = None
    drafted: tuple[Span, ...] = ()  # the parts of `text` that were drafted and accepted


async def complete(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: list[int],
    params: SamplingParams,
    stop: Sequence[str] = (),
    *,
    matcher: Matcher | None = None,
    past: Sequence[int] = (),
    cache_namespace: str = "",
) -> AsyncGenerator[Delta, None]:
    """Yield the completion of a prompt as it is decoded. Leaving the iterator cancels it.

    Text is held back while it may be part of a character or a stop string.
    `matcher`, `past` and `cache_namespace` are passed to `Engine.submit`. Raises its errors, and the error of a failed
    request.
    """
    text = _Text(tokenizer, params.stop_ids, stop)
    num_tokens = 0
    async with aclosing(
        engine.submit(prompt, params, matcher=matcher, past=past, cache_namespace=cache_namespace)
    ) as stream:
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
    """The text of one completion, and its spans of drafted characters."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._stream = TextStream(stop)
        self._ready = ""  # text since the last `take`
        self._ready_at = 0  # its start in the whole text
        self._drafted: list[Span] = []  # in the whole text, held-back characters included

    @property
    def stopped(self) -> bool:
        return self._stream.stopped

    @property
    def _end(self) -> int:
        return self._ready_at + len(self._ready) + self._stream.held_len

    def push(self, sampled: tuple[Sampled, ...], accepted: int) -> tuple[Sampled, ...]:
        """Add new tokens, the first `accepted` of which were drafted. Return the tokens up to a stop string."""
        for index, sample in enumerate(sampled):
            if sample.id not in self._stop_ids:
                before = self._end
                self._ready += self._stream.push(self._tokenizer.piece(sample.id))
                if index < accepted and self._end > before:
                    self._add_drafted(before, self._end)
            if self.stopped:
                return sampled[: index + 1]
        return sampled

    def flush(self) -> None:
        """Release the held-back characters at the end of the text."""
        self._ready += self._stream.flush()

    def take(self) -> tuple[str, tuple[Span, ...]]:
        """Return the text that may be shown now, and the spans of it that were drafted."""
        text, start = self._ready, self._ready_at
        end = start + len(text)
        spans = tuple((max(a, start) - start, min(b, end) - start) for a, b in self._drafted if a < end)
        self._drafted = [(max(a, end), b) for a, b in self._drafted if b > end]
        self._ready, self._ready_at = "", end
        return text, spans

    def _add_drafted(self, start: int, end: int) -> None:
        if self._drafted and self._drafted[-1][1] == start:
            start = self._drafted.pop()[0]
        self._drafted.append((start, end))
