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


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the last one; the last has a finish reason and stats."""

    text: str
    sampled: tuple[Sampled, ...]
    finish_reason: FinishReason | None = None
    stats: Stats | None = None


def check_text_size(text: str, context: int) -> None:
    """Raise RequestError for a text that cannot fit: llama.cpp's tokenizers may take minutes for megabytes."""
    if len(text) > MAX_TOKEN_LEN * context:
        raise RequestError(
            f"the prompt has {len(text):,} characters, a context of {context:,} tokens holds at most "
            f"{MAX_TOKEN_LEN * context:,}",
            "shorten it, or raise --ctx",
        )


async def complete(
    engine: Engine, tokenizer: Tokenizer, prompt: list[int], params: SamplingParams, stop: Sequence[str] = ()
) -> AsyncGenerator[Delta, None]:
    """Yield the completion of a prompt as it is decoded. Leaving the iterator cancels it.

    The text never holds half a character or part of a stop string. Raises what `Engine.submit` does, and the error
    with which the request fails.
    """
    text = TextStream(stop)
    num_tokens = 0
    async with aclosing(engine.submit(prompt, params)) as stream:
        async for event in stream:
            shown, sampled = _text_of(event.sampled, params.stop_ids, text, tokenizer)
            num_tokens += len(sampled)
            if text.stopped:
                stats = event.stats or await stream.stop()
                yield Delta(shown, sampled, "stop", replace(stats, completion_tokens=num_tokens))
                return
            if event.finish_reason:
                shown += text.flush()
            yield Delta(shown, sampled, event.finish_reason, event.stats)


def _text_of(
    sampled: tuple[Sampled, ...], stop_ids: frozenset[int], text: TextStream, tokenizer: Tokenizer
) -> tuple[str, tuple[Sampled, ...]]:
    """Return what may be shown of new tokens, and those of them up to a stop string."""
    shown = ""
    for count, sample in enumerate(sampled, 1):
        if sample.id not in stop_ids:
            shown += text.push(tokenizer.piece(sample.id))
        if text.stopped:
            return shown, sampled[:count]
    return shown, sampled
