"""Vectors that another server computes, for the routes of OpenAI and Ollama.

Owns the body of such a request and what may be wrong in its answer. The vectors are as the server sends them; longer
ones than requested are cut as an engine here cuts them.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from edgelm.client.json_values import mapping, whole
from edgelm.jobs.embed_request import Embedded, EmbedRequest
from edgelm.server.api.dialects import parse_pooled
from edgelm.server.api.embeddings import MAX_WIDTH
from edgelm.server.api.json_body import read_json
from edgelm.server.bodies import Bodies
from edgelm.server.remotes.boxes import EMBEDDINGS, Box
from edgelm.server.remotes.models import RemoteModel
from edgelm.server.request_log import record_of
from edgelm.server.sse import json_pieces, unless_client_leaves

EMBED_PATHS = frozenset({"/v1/embeddings", "/api/embed", "/api/embeddings"})


async def embed_remotely(
    request: Request,
    body: bytes,
    model: RemoteModel,
    bodies: Bodies,
    client: str,
    forwarded: Callable[[], Awaitable[None]],
) -> Response:
    """Return the vectors of a POST; `forwarded` is called when they are there. Raises ApiError, ClientLeftError."""
    path = request.url.path
    parsed = await bodies.parse(body, lambda body: parse_pooled(path, read_json(body)))
    asked = parsed.pooled_request()
    assert isinstance(asked, EmbedRequest)
    record = record_of(request)
    record.model = model.name
    with model.admitted(client):
        embedded = await unless_client_leaves(request, _embedded(asked, model, client, len(body)))
    await forwarded()
    model.counters.embedded([range(count) for count in embedded.num_tokens])
    record.usage = {"prompt_tokens": sum(embedded.num_tokens)}

    def content() -> bytes:
        return b"".join(json_pieces(parsed.response(embedded, parsed.model)))

    return Response(await asyncio.to_thread(content), media_type="application/json")


async def _embedded(asked: EmbedRequest, model: RemoteModel, client: str, num_bytes: int) -> Embedded:
    if not asked.inputs:
        return Embedded([], [])
    loop = asyncio.get_running_loop()

    async def of(box: Box, sent_at: float) -> AsyncGenerator[Embedded, None]:
        data = await box.document(EMBEDDINGS, _body(asked, model.model, box.omitted), num_bytes)
        try:
            embedded = await asyncio.to_thread(_read, data, asked)
        except (ValueError, RecursionError, OverflowError):
            raise box.strange("sends what are not the vectors of these texts") from None
        box.answered(sent_at, loop.time() - sent_at, num_bytes)
        yield embedded

    async with aclosing(model.first_answer(client, of)) as parts:
        return await anext(parts)


def _body(asked: EmbedRequest, model: str, omitted: frozenset[str]) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "input": asked.inputs, "encoding_format": "base64"}
    if asked.dimensions is not None:
        body["dimensions"] = asked.dimensions
    if asked.truncate:  # vLLM's name, and ours
        body["truncate_prompt_tokens"] = -1 if asked.max_tokens is None else asked.max_tokens
    return {name: value for name, value in body.items() if name not in omitted}


def _read(data: bytes, asked: EmbedRequest) -> Embedded:
    """Return the vectors of an answer. Raises ValueError for anything else."""
    document = mapping(json.loads(data))
    items = document.get("data")
    rows: dict[int, array[float]] = {}
    for at, item in enumerate(map(mapping, items if isinstance(items, list) else ())):
        index = whole(item.get("index"))
        rows[at if index is None else index] = _vector(item.get("embedding"), asked.dimensions)
    if sorted(rows) != list(range(len(asked.inputs))) or len({len(row) for row in rows.values()}) != 1:
        raise ValueError("another number of vectors, or of different lengths")
    tokens = whole(mapping(document.get("usage")).get("prompt_tokens")) or 0
    counts = [max(tokens, 0)] + [0] * (len(rows) - 1)  # it tells that of all texts only
    return Embedded([rows[at] for at in range(len(rows))], counts)


def _vector(value: object, dimensions: int | None) -> array[float]:
    if isinstance(value, str):
        vector = array("f", base64.b64decode(value, validate=True))
    elif isinstance(value, list) and all(type(number) in (int, float) for number in value):
        vector = array("f", value)
    else:
        raise ValueError("no vector")
    if not 0 < len(vector) <= MAX_WIDTH or not all(map(math.isfinite, vector)):
        raise ValueError("no vector of numbers")
    if dimensions is None or len(vector) <= dimensions:
        return vector
    length = math.hypot(*vector[:dimensions]) or 1.0
    return array("f", (number / length for number in vector[:dimensions]))
