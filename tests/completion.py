"""Completion: tokens in, text out, with an engine and a tokenizer, up to a stop string."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from edgelm.engine.core import FinishReason, Matcher, Sampled, SamplingParams, Stats
from edgelm.engine.engine import Engine
from edgelm.text.stream import TextStream
from edgelm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """The part of a completion since the previous delta. The last one has a finish reason and stats."""

    text: str
    sampled: tuple[Sampled, ...]
    finish_reason: FinishReason | None = None
    stats: Stats | None = None


async def complete(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: list[int],
    params: SamplingParams,
    stop: Sequence[str] = (),
    *,
    matcher: Matcher | None = None,
    cache_namespace: str = "",
) -> AsyncGenerator[Delta, None]:
    """Yield the completion of a prompt as it is decoded. Raises the errors of `Engine.submit` and of the request."""
    text = TextStream(stop)
    num_tokens = 0
    async with aclosing(engine.submit(prompt, params, matcher=matcher, cache_namespace=cache_namespace)) as stream:
        async for event in stream:
            shown, sampled = "", event.sampled
            for number, sample in enumerate(event.sampled, 1):
                if sample.id not in params.stop_ids:
                    shown += text.push(tokenizer.piece(sample.id))
                if text.stopped:
                    sampled = event.sampled[:number]
                    break
            num_tokens += len(sampled)
            if text.stopped:
                stats = event.stats or await stream.stop()
                yield Delta(shown, sampled, "stop", replace(stats, completion_tokens=num_tokens))
                return
            if event.finish_reason:
                shown += text.flush()
            yield Delta(shown, sampled, event.finish_reason, event.stats)
