"""What an engine process serves on its private socket: one model's answers.

Owns the way from a request to the engine and back. The front has checked who asks, and parsed the body once already.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import resource
import secrets
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edgelm.build import Loaded
from edgelm.completion import Delta, complete
from edgelm.config import Settings
from edgelm.core import MAX_SEED, SamplingParams
from edgelm.errors import EdgeLMError
from edgelm.server.api_error import EXCEPTION_HANDLERS, ApiError, as_api_error
from edgelm.server.chat_reply import ChatReply, event
from edgelm.server.chat_request import ChatRequest, parse_chat
from edgelm.server.guard import read_body
from edgelm.server.past import PastTokens
from edgelm.server.sse import DONE, ClientLeftError, EventStream, unless_client_leaves
from edgelm.text.known_chats import Prompt
from edgelm.text.template import TooLongError
from edgelm.text.template_worker import TemplateRunner

TOKEN_BYTES = 128  # more than a token of any vocabulary stands for, on average
LEAST_BYTES = 2**20  # below, an exact count costs next to nothing
PATIENCE_S = 5.0  # for the first token, before the stream is opened without it
PING_S = 15.0  # between signs of life while nothing comes
PING = b": still at work\n\n"


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What the routes use."""

    loaded: Loaded
    templates: TemplateRunner
    settings: Settings  # of sampling, where a request does not say
    owner: str = ""  # whose requests these are


def engine_app(parts: EngineParts, key: str) -> Starlette:
    """Return the ASGI application of an engine process; only who has the key is answered."""
    past = PastTokens(parts.loaded.tokenizer)

    async def chat(request: Request) -> Response:
        return await _chat(parts, past, request)

    async def stats(_: Request) -> Response:
        return JSONResponse({"requests": parts.loaded.engine.num_requests, "rss_bytes": _rss_bytes()})

    return Starlette(
        routes=[Route("/v1/chat/completions", chat, methods=["POST"]), Route("/stats", stats)],
        middleware=[Middleware(_KeyGuard, key=key)],
        exception_handlers={**EXCEPTION_HANDLERS, ClientLeftError: _on_client_left},
    )


def sampling_params(wanted: ChatRequest, settings: Settings, stop_ids: frozenset[int]) -> SamplingParams:
    """Return how a request is sampled. Raises ApiError, RequestError."""

    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    seed = given(wanted.seed, given(settings.seed, secrets.randbits(32)))
    limit = wanted.max_tokens if wanted.max_completion_tokens is None else wanted.max_completion_tokens
    return SamplingParams(
        max_tokens=given(limit, settings.max_tokens),
        temperature=given(wanted.temperature, settings.temperature),
        top_k=given(wanted.top_k, settings.top_k),
        top_p=given(wanted.top_p, settings.top_p),
        min_p=given(wanted.min_p, settings.min_p),
        repetition_penalty=given(wanted.repetition_penalty, 1.0),
        frequency_penalty=given(wanted.frequency_penalty, 0.0),
        presence_penalty=given(wanted.presence_penalty, 0.0),
        logit_bias=tuple(_token_bias(*each) for each in (wanted.logit_bias or {}).items()),
        seed=seed & MAX_SEED,  # OpenAI's may be negative
        num_logprobs=(wanted.top_logprobs or 0) if wanted.logprobs else None,
        stop_ids=stop_ids,
    )


def _token_bias(token: str, bias: float) -> tuple[int, float]:
    if not (token.isascii() and token.isdecimal() and len(token) < 10):
        raise ApiError(400, "invalid_value", f"logit_bias: {token[:40]} is no token id", param="logit_bias")
    if not -100 <= bias <= 100:
        raise ApiError(400, "invalid_value", f"logit_bias: {bias} is not within -100 to 100", param="logit_bias")
    return int(token), bias


async def _chat(parts: EngineParts, past: PastTokens, request: Request) -> Response:
    wanted = parse_chat(await read_body(request))
    loaded = parts.loaded
    info = loaded.engine.info
    params = sampling_params(wanted, parts.settings, loaded.tokenizer.stop_ids)
    prompt = await unless_client_leaves(request, _prompt(parts, wanted))
    past_tokens = await past.tokens(wanted.past)
    stops = [*wanted.stops, *(await parts.templates.template()).stop_strings]
    reply = ChatReply(wanted.model, loaded.tokenizer, info, logprobs=bool(wanted.logprobs))
    async with AsyncExitStack() as stack:
        answer = complete(
            loaded.engine, loaded.tokenizer, prompt.ids, params, stops, past=past_tokens, owner=parts.owner
        )
        deltas = _learning(parts, prompt, answer)
        stack.push_async_callback(deltas.aclose)
        if not wanted.streamed:
            every = await unless_client_leaves(request, _all(deltas))
            return JSONResponse(reply.whole(every))
        # The first token is waited for: what makes the request fail by then is a status, not an event.
        first = asyncio.ensure_future(anext(deltas))
        stack.push_async_callback(_cancel, first)
        await unless_client_leaves(request, asyncio.wait({first}, timeout=PATIENCE_S))
        if first.done():
            first.result()
        events = _events(reply, first, deltas, wanted.streams_usage)
        return EventStream(events, stack.pop_all())


async def _learning(
    parts: EngineParts, prompt: Prompt, deltas: AsyncGenerator[Delta, None]
) -> AsyncGenerator[Delta, None]:
    """Yield the deltas; then, or when left, keep the answer's tokens for the next turn."""
    answer: list[int] = []
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                answer += [sample.id for sample in delta.sampled]
                yield delta
    finally:
        if answer:
            await parts.templates.learn(prompt, answer)


async def _prompt(parts: EngineParts, wanted: ChatRequest) -> Prompt:
    """Return the tokens of the messages. Raises ApiError where they and an answer are more than the context."""
    context = parts.loaded.engine.info.context
    messages = [each.for_template() for each in wanted.messages]
    try:
        prompt = await parts.templates.render_prompt(messages, max_bytes=max(context * TOKEN_BYTES, LEAST_BYTES))
    except TooLongError as error:
        raise _too_long(error.message, context) from error
    if len(prompt.ids) >= context:
        raise _too_long(f"the messages have {len(prompt.ids):,} tokens", context)
    return prompt


def _too_long(what: str, context: int) -> ApiError:
    message = (
        f"{what}, the context holds {context:,} tokens with the answer: "
        "shorten them, or start edgelm with a larger --ctx"
    )
    return ApiError(400, "context_length_exceeded", message, param="messages")


async def _all(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


async def _events(
    reply: ChatReply, first: asyncio.Future[Delta], deltas: AsyncIterator[Delta], usage: bool
) -> AsyncIterator[bytes]:
    """Yield the events of a stream; a failure on the way is the last of them."""
    yield event(reply.opening())
    while not first.done():
        await asyncio.wait({first}, timeout=PING_S)
        if not first.done():
            yield PING
    try:
        last = first.result()
        while True:
            if (chunk := reply.chunk(last)) is not None:
                yield event(chunk)
            if last.finish_reason:
                break
            last = await anext(deltas)
    except EdgeLMError as error:
        yield as_api_error(error).event()
        return
    if usage:
        yield event(reply.usage_chunk(last))
    yield DONE


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # seen, or asyncio would complain


async def _on_client_left(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


class _KeyGuard:
    """ASGI middleware: only the front, which made the key, is answered."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        else:
            error = ApiError(401, "invalid_api_key", "this socket is for edgelm's own front")
            await error.response()(scope, receive, send)


def _rss_bytes() -> int:
    """Return the memory this process holds; on macOS, the most that it ever held."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    else:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
