"""The routes of an engine process for vectors and rankings, in every dialect.

Owns the path of such a request to the engine and back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgelm.backends.model import LoadedModel
from edgelm.base.errors import RequestError
from edgelm.engine.usage import Usage
from edgelm.jobs.embed import Embeddings
from edgelm.jobs.embed_request import Embedded, EmbedRequest, Ranked
from edgelm.jobs.request import ContextError
from edgelm.server.api.dialects import POOLED, dialect_of, parse_pooled
from edgelm.server.api.errors import ApiError
from edgelm.server.api.json_body import read_json
from edgelm.server.bodies import Bodies
from edgelm.server.keys import CLIENT
from edgelm.server.sse import json_pieces, unless_client_leaves


def pooled_routes(loaded: LoadedModel, bodies: Bodies, usage_of: Callable[[Request], Usage]) -> list[Route]:
    """Return the routes. A request whose client leaves is cancelled."""
    embeddings = Embeddings(loaded)

    async def answer(request: Request) -> Response:
        usage, path = usage_of(request), request.url.path
        async with bodies.read(request) as body:
            parsed = await bodies.parse(body, lambda body: parse_pooled(path, read_json(body)))
        asked, client = parsed.pooled_request(), request.headers.get(CLIENT, "")
        loaded.require("embedding" if isinstance(asked, EmbedRequest) else "rerank", parsed.model)
        result: Embedded | Ranked
        try:
            if isinstance(asked, EmbedRequest):
                result = await unless_client_leaves(request, embeddings.embed(asked, client))
            else:
                result = await unless_client_leaves(request, embeddings.rank(asked, client))
        except ContextError as error:
            field = dialect_of(path).prompt_field
            raise ApiError(400, "context_length_exceeded", str(error), param=field) from error
        except RequestError as error:
            raise ApiError(400, "invalid_value", str(error)) from error

        usage.add_inputs(sum(result.num_tokens))

        def content() -> bytes:
            return b"".join(json_pieces(parsed.response(result, parsed.model)))

        # In a thread: millions of numbers take seconds.
        return Response(await asyncio.to_thread(content), media_type="application/json")

    return [Route(path, answer, methods=["POST"]) for path in POOLED]
