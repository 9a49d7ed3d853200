"""The answer of a model that another server runs, for `edgelm run`: through this user's own server, or one for it.

Owns the replies, which are those of a worker. Knows nothing of terminals and flags.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from edgelm.base.config import SETTINGS, Config, Settings
from edgelm.base.errors import UsageError
from edgelm.base.workers.messages import Result, RunJob, Text, Thought
from edgelm.client.answer_stream import Finished
from edgelm.client.endpoint import ChatRequest
from edgelm.client.link import Link
from edgelm.client.turns import Turn

Reply = Text | Thought | Result


@contextmanager
def remote_replies(job: RunJob, model: str, config: Config) -> Iterator[Iterator[Reply]]:
    """Give the replies of a job up to the result. Raises EdgeLMError; leaving the block ends the request."""
    request = _request(job, model)
    places = config.places
    link = Link(
        endpoint=None,
        api_key=config.settings.api_key,
        runtime=places.runtime,
        log=places.cache / "serve.log",
        library=config.library,
    )
    with asyncio.Runner() as runner:
        answer = _answer(link, request)

        async def following() -> Reply | None:
            return await anext(answer, None)

        def replies() -> Iterator[Reply]:
            while (reply := runner.run(following())) is not None:
                yield reply

        try:
            yield replies()
        finally:
            runner.run(answer.aclose())
            runner.run(link.close())


async def _answer(link: Link, request: ChatRequest) -> AsyncGenerator[Reply, None]:
    client = await link.client()
    text = reasoning = ""
    async with aclosing(client.chat(request)) as deltas:  # type: ignore[type-var]
        async for delta in deltas:
            if isinstance(delta, Finished):
                yield Result(_document(request.model, text, reasoning, delta))
                continue
            text, reasoning = text + delta.text, reasoning + delta.reasoning
            if delta.reasoning:
                yield Thought(delta.reasoning)
            if delta.text:
                yield Text(delta.text)


def _request(job: RunJob, model: str) -> ChatRequest:
    defaults = Settings()
    options: dict[str, Any] = {
        name: value
        for name, setting in SETTINGS.items()
        if setting.sampling and (value := getattr(job.settings, name)) != getattr(defaults, name)
    }
    if job.stop:
        options["stop"] = list(job.stop)
    if job.think != "auto":
        options["reasoning_effort"] = "none" if job.think == "off" else job.think
    if job.grammar is not None:
        if job.grammar.kind not in ("json_object", "json_schema"):
            raise UsageError(f"{model} runs on another server, which follows JSON schemas only", "use --schema")
        options["response_format"] = {"type": job.grammar.kind}
        if job.grammar.kind == "json_schema":
            options["response_format"]["json_schema"] = {"name": "answer", "schema": json.loads(job.grammar.source)}
    before = tuple(Turn(said.role, said.text) for said in job.before)
    return ChatRequest(model, (*before, Turn("user", job.prompt, images=job.images)), options)


def _document(model: str, text: str, reasoning: str, end: Finished) -> dict[str, Any]:
    """Return the document of `run --json`, without tokens: only the other server knows them."""
    stats = end.stats
    first_ms = round(stats.first_token_ms or 0.0, 3)
    return {
        "model": model,
        "text": text,
        **({"reasoning": reasoning} if reasoning else {}),
        "finish_reason": end.reason,
        "usage": {
            "prompt_tokens": stats.prompt_tokens or 0,
            "cached_tokens": stats.cached_tokens or 0,
            "completion_tokens": stats.completion_tokens or 0,
        },
        "timings": {
            "prompt_ms": first_ms,
            "first_token_ms": first_ms,
            "decode_tokens_per_second": round(stats.tokens_per_second or 0.0, 2),
        },
    }
