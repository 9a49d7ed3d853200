"""The path of a request to a model that another server runs, and back: in every dialect that a model answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgelm.engine.core import ExecutorInfo, Stats
from edgelm.jobs.request import AnswerDelta, AnswerRequest
from edgelm.server.answers import answer_response
from edgelm.server.api.dialect import AnswerContext
from edgelm.server.api.dialects import COUNTS, DIALECTS, count_reply, parse_answers, reply_to
from edgelm.server.api.errors import ApiError
from edgelm.server.api.json_body import read_json
from edgelm.server.api.ollama import OllamaRequest
from edgelm.server.api.ollama_reply import loaded_reply
from edgelm.server.bodies import Bodies
from edgelm.server.remotes.boxes import Box
from edgelm.server.remotes.embedding import EMBED_PATHS, embed_remotely
from edgelm.server.remotes.models import RemoteModel
from edgelm.server.remotes.wire import Chunks, TokenTexts, body_of, echoes_of, notes_of, path_of
from edgelm.server.request_log import RequestRecord, record_of
from edgelm.server.sse import unless_client_leaves
from edgelm.text.tokenizer import Tokenizer


def answers_remotely(path: str) -> bool:
    """Return whether another server can answer a route's requests."""
    return (path in DIALECTS and path != "/infill") or path in COUNTS or path in EMBED_PATHS


def not_remote(model: RemoteModel, what: str) -> ApiError:
    """Return the error of a route that only a model of this machine has."""
    message = f"{model.name} runs at {model.where}: {what} is only for models of this machine"
    return ApiError(400, "unsupported_by_remote", message, param="model")


async def answer_remotely(
    request: Request,
    body: bytes,
    model: RemoteModel,
    bodies: Bodies,
    client: str,
    forwarded: Callable[[], Awaitable[None]],
) -> Response:
    """Return the answer to a POST; `forwarded` is called when it begins: the body is not sent again.

    Raises ApiError, BusyError, ClientLeftError.
    """
    path = request.url.path
    if path in EMBED_PATHS:
        return await embed_remotely(request, body, model, bodies, client, forwarded)
    api_request, requests = await bodies.parse(body, lambda body: parse_answers(path, read_json(body)))
    record = record_of(request)
    record.model = model.name
    if isinstance(api_request, OllamaRequest) and api_request.only_loads:
        return JSONResponse(loaded_reply(api_request, "unload" if api_request.keep_alive == 0 else "load"))
    body_of(requests, model.model, frozenset())  # refuse it before it waits
    texts = TokenTexts()
    if path in COUNTS:  # every server counts what it reads, and few count otherwise
        requests = [replace(one, sampling=one.sampling | {"max_tokens": 1}) for one in requests]
        with model.admitted(client):
            work = _Work(model, requests, (), texts, client, record, forwarded, len(body))
            deltas = await unless_client_leaves(request, _all(work.deltas()))
        return JSONResponse(count_reply(path, _prompt_tokens(deltas, model)))
    context = AnswerContext(api_request.model or model.name, cast(Tokenizer, texts), _executor_of(model))
    reply = reply_to(path, api_request, context)
    async with AsyncExitStack() as stack:
        stack.enter_context(model.admitted(client))
        work = _Work(model, requests, api_request.notes, texts, client, record, forwarded, len(body))
        return await answer_response(request, reply, work.deltas(), stack, streamed=api_request.streamed)
    raise AssertionError


async def _all(deltas: AsyncGenerator[AnswerDelta, None]) -> list[AnswerDelta]:
    async with aclosing(deltas):
        return [delta async for delta in deltas]


def _prompt_tokens(deltas: Sequence[AnswerDelta], model: RemoteModel) -> int:
    count = next((delta.stats.prompt_tokens for delta in deltas if delta.stats), 0)
    if not count:
        raise ApiError(502, "remote_failed", f"{model.name} runs at {model.where}, which tells no token counts")
    return count


class _Work:
    """One request on its way."""

    def __init__(
        self,
        model: RemoteModel,
        requests: Sequence[AnswerRequest],
        notes: tuple[str, ...],
        texts: TokenTexts,
        client: str,
        record: RequestRecord,
        forwarded: Callable[[], Awaitable[None]],
        num_bytes: int,
    ) -> None:
        self._model = model
        self._requests = requests
        self._notes = notes
        self._texts = texts
        self._client = client
        self._record = record
        self._forwarded = forwarded
        self._num_bytes = num_bytes
        self._began = _now()

    def deltas(self) -> AsyncGenerator[AnswerDelta, None]:
        """Yield the answer of the first server that gives one. Raises ApiError."""
        return self._model.first_answer(self._client, self._of)

    async def _of(self, box: Box, sent_at: float) -> AsyncGenerator[AnswerDelta, None]:
        """Yield the answer of one server. Raises BoxError."""
        body = body_of(self._requests, self._model.model, box.omitted)
        notes = (*self._notes, *notes_of(self._requests[0], box.omitted))
        chunks = Chunks(self._requests, notes, self._texts)
        has_begun, first, last = False, 0.0, 0.0
        async with aclosing(box.chunks(path_of(self._requests), body, self._num_bytes)) as received:
            async for chunk in received:
                if not has_begun:  # the first chunks may have no text
                    has_begun = True
                    await self._forwarded()
                    for delta in echoes_of(self._requests):
                        yield delta
                for delta in chunks.take(chunk):
                    last = _now()
                    first = first or last
                    yield delta
        if not chunks.is_complete:
            raise box.broken()
        last = last or _now()
        first = first or last
        box.answered(sent_at, first - sent_at, self._num_bytes)
        times = (1000 * (sent_at - self._began), 1000 * (first - self._began), 1000 * (last - first))
        ends = chunks.finish(*times)
        self._note(ends[0])
        for delta in ends:
            yield delta

    def _note(self, end: AnswerDelta) -> None:
        """Count an answer."""
        stats = end.stats
        assert isinstance(stats, Stats)
        assert end.reason
        self._model.counters.answered("stop" if end.reason == "tool_calls" else end.reason, stats)
        self._record.usage = {
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "generated_tokens": stats.completion_tokens,
            "time_to_first_token_s": stats.first_token_ms / 1000,
            "finish_reason": end.reason,
        }


def _executor_of(model: RemoteModel) -> ExecutorInfo:
    """Return what replies show of an engine."""
    numbers: Any = dict.fromkeys(("num_vocab", "capacity", "max_tokens", "max_rows", "max_sequences"), 0)
    where = model.where
    return ExecutorInfo(engine="remote", device=where, context=model.context or 0, kv_bytes_per_token=0, **numbers)


def _now() -> float:
    return asyncio.get_running_loop().time()
