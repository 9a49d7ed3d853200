"""What a model answers that another server runs, for `edgelm run` and `embed`: through this user's server.

Owns the replies, which are those of a worker. Knows nothing of terminals and flags.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from edgelm.base.config import SETTINGS, Config, Settings
from edgelm.base.errors import UsageError
from edgelm.base.workers.messages import Result, RunJob, Text, Thought
from edgelm.client.answer_stream import Finished
from edgelm.client.endpoint import ChatRequest, Client
from edgelm.client.link import Link
from edgelm.client.turns import Turn
from edgelm.jobs.embed_request import Vector

T = TypeVar("T")
Reply = Text | Thought | Result
BATCH = 256  # texts of a request for vectors


@contextmanager
def remote_replies(job: RunJob, model: str, config: Config) -> Iterator[Iterator[Reply]]:
    """Give the replies of a job up to the result. Raises EdgeLMError; leaving the block ends the request."""
    request = _request(job, model)
    with _through_front(config, lambda client: _answer(client, request)) as replies:
        yield replies


@contextmanager
def remote_vectors(
    texts: Sequence[str], model: str, dimensions: int | None, config: Config, *, truncate: bool
) -> Iterator[Iterator[Vector | Result]]:
    """Give the vector of each text, and the result, as `remote_replies` does."""
    body: dict[str, Any] = {"model": model, "encoding_format": "base64", "truncate": truncate}
    if dimensions is not None:
        body["dimensions"] = dimensions
    with _through_front(config, lambda client: _vectors(client, body, texts)) as replies:
        yield replies


@contextmanager
def _through_front(config: Config, answer_of: Callable[[Client], AsyncGenerator[T, None]]) -> Iterator[Iterator[T]]:
    """Give what a front answers. Raises EdgeLMError; leaving the block ends the request."""
    link = Link(
        endpoint=None,
        api_key=config.settings.api_key,
        runtime=config.places.runtime,
        log=config.places.cache / "serve.log",
        library=config.library,
    )

    async def answers() -> AsyncGenerator[T, None]:
        async with aclosing(answer_of(await link.client())) as parts:
            async for part in parts:
                yield part

    with asyncio.Runner() as runner:
        answer = answers()

        async def following() -> T | None:
            return await anext(answer, None)

        def replies() -> Iterator[T]:
            while (reply := runner.run(following())) is not None:
                yield reply

        try:
            yield replies()
        finally:
            runner.run(answer.aclose())
            runner.run(link.close())


async def _vectors(client: Client, body: dict[str, Any], texts: Sequence[str]) -> AsyncGenerator[Vector | Result, None]:
    num_tokens = 0
    for start in range(0, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        reply = await client.post_own("/v1/embeddings", body | {"input": batch})
        for at, item in enumerate(reply["data"]):
            yield Vector(start + at, None, item["embedding"])
        num_tokens += reply["usage"]["prompt_tokens"]
    yield Result({"texts": len(texts), "tokens": num_tokens})


async def _answer(client: Client, request: ChatRequest) -> AsyncGenerator[Reply, None]:
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
