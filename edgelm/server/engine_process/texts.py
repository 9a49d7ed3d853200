"""The routes of an engine process that need the tokenizer or the chat template, and no answer; and its open requests.

Owns the path of such a request. The modules of the APIs have the answers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgelm.backends.model import LoadedModel
from edgelm.jobs.answer import Answerer, Prepared
from edgelm.jobs.request import AnswerRequest, ContextError
from edgelm.server.api.dialects import TEXTS, dialect_of
from edgelm.server.api.errors import ApiError
from edgelm.server.api.llama_texts import TextRequest
from edgelm.server.engine_process.kind import require_kind
from edgelm.server.engine_process.open_answers import OpenAnswers
from edgelm.server.keys import CLIENT, NAMESPACE
from edgelm.server.sse import unless_client_leaves
from edgelm.text.encoding import TextEncoder
from edgelm.text.template import TooLongError


def text_routes(
    loaded: LoadedModel, answerer: Answerer, open_answers: OpenAnswers, read: Callable[[Request], Awaitable[Any]]
) -> list[Route]:
    """Return the routes; `read` returns the checked body of a request."""
    texts = TextEncoder(loaded.tokenizer)

    async def text_answer(request: Request) -> Response:
        text_request: TextRequest = await read(request)
        namespace, client = (request.headers.get(name, "") for name in (NAMESPACE, CLIENT))

        async def prepare(answer_request: AnswerRequest) -> Prepared:
            require_kind(loaded, "text", text_request.model)
            try:
                return await answerer.prepare(answer_request, namespace, client)
            except (ContextError, TooLongError) as error:
                param = dialect_of(request.url.path).prompt_field
                raise ApiError(400, "context_length_exceeded", str(error), param=param) from error

        answer = await unless_client_leaves(request, text_request.text_answer(texts, prepare))
        return Response(answer, media_type="application/json")

    async def slots(request: Request) -> Response:
        return JSONResponse(open_answers.entries(request.headers.get(NAMESPACE, "")))

    return [*(Route(path, text_answer, methods=["POST"]) for path in TEXTS), Route("/slots", slots)]
