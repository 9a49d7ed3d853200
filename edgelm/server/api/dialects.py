"""The APIs that a model answers: for each route its fields, its table of other fields, and its form of an error.

The front parses a body to refuse it before any model is loaded; the engine process parses it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from edgelm.jobs.request import AnswerRequest
from edgelm.server.api import field_table, messages, ollama, responses_reply
from edgelm.server.api.chat import ChatRequest
from edgelm.server.api.chat_reply import ChatReply
from edgelm.server.api.completions import CompletionsReply, CompletionsRequest
from edgelm.server.api.dialect import COMMENT, AnswerContext, ApiRequest, PooledRequest, Reply, Routed
from edgelm.server.api.embeddings import EmbeddingsRequest
from edgelm.server.api.errors import ApiError
from edgelm.server.api.field_table import OLLAMA_OPTIONS, Table
from edgelm.server.api.fields import Body, validated
from edgelm.server.api.llama_server import CompletionRequest, InfillRequest, LlamaServerReply
from edgelm.server.api.llama_texts import ApplyTemplateRequest, DetokenizeRequest, TokenizeRequest
from edgelm.server.api.messages import MessagesRequest
from edgelm.server.api.messages_reply import MessagesReply
from edgelm.server.api.ollama import GenerateRequest, OllamaChatRequest
from edgelm.server.api.ollama_embed import OllamaEmbeddingsRequest, OllamaEmbedRequest
from edgelm.server.api.ollama_reply import OllamaReply
from edgelm.server.api.rerank import RerankRequest
from edgelm.server.api.responses import ResponsesRequest
from edgelm.server.sse import MEDIA_TYPE, NDJSON

log = logging.getLogger(__name__)


COUNTS = {"/v1/messages/count_tokens": "/v1/messages", "/v1/responses/input_tokens": "/v1/responses"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API."""

    model: type[Body]
    table: Table
    prompt_field: str  # the field to name when the prompt is too long
    required: tuple[str, ...] = ()  # fields that a count of tokens does not need
    error_body: Callable[[ApiError], dict[str, Any]] = lambda error: error.body
    error_event: Callable[[ApiError], bytes] = ApiError.event
    ping: bytes = COMMENT  # before the answer begins
    media_type: str = MEDIA_TYPE  # of a stream

    def request(self, data: dict[str, Any]) -> ApiRequest:
        """Return the checked request of a body. Raises ApiError."""
        self.table.check(data)
        request: Any = validated(self.model, data)
        parsed: ApiRequest = request
        return parsed

    def log_ignored(self, data: Mapping[str, Any]) -> None:
        """Log the fields of a body that no list has."""
        known = self.model.model_fields.keys() | self.table.ignored.keys() | self.table.refused.keys()
        if unknown := sorted(data.keys() - known):
            log.info("%s: ignored unknown fields: %s", self.table.route, ", ".join(map(ascii, unknown))[:400])


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDialect(Dialect):
    """One API whose requests are answered by a model's text."""

    reply: Callable[[Any, AnswerContext], Reply]  # the form of the answer to a checked request

    def notes(self, data: Mapping[str, Any]) -> tuple[str, ...]:
        """Return a note about the fields of a body that only another of our APIs has."""
        names = _of_other_apis(data, self.model, self.table)
        options = data.get("options")
        if "options" in self.model.model_fields and isinstance(options, dict):
            names += [f"options.{name}" for name in _of_other_apis(options, ollama.Options, OLLAMA_OPTIONS)]
        return (f"ignored fields, not of {self.table.route}: {', '.join(names)}",) if names else ()


def _of_other_apis(data: Mapping[str, Any], model: type[Body], table: Table) -> list[str]:
    given = {name for name, value in data.items() if value not in (None, False, "", [], {})}
    return sorted((given & _all_fields()) - model.model_fields.keys() - table.ignored.keys() - table.refused.keys())


_CHAT = AnswerDialect(
    model=ChatRequest,
    table=field_table.CHAT,
    prompt_field="messages",
    reply=lambda request, context: ChatReply(request.reply_options(), context),
)
_ANTHROPIC = AnswerDialect(
    model=MessagesRequest,
    table=field_table.MESSAGES,
    prompt_field="messages",
    required=("max_tokens",),
    error_body=messages.error_body,
    error_event=messages.error_event,
    ping=messages.PING,
    reply=MessagesReply,
)
_OLLAMA = AnswerDialect(
    model=OllamaChatRequest,
    table=field_table.OLLAMA_CHAT,
    prompt_field="messages",
    error_body=ollama.error_body,
    error_event=ollama.error_event,
    ping=ollama.PING,
    media_type=NDJSON,
    reply=OllamaReply,
)
_RESPONSES = AnswerDialect(
    model=ResponsesRequest,
    table=field_table.RESPONSES,
    prompt_field="input",
    error_event=responses_reply.error_event,
    reply=responses_reply.ResponsesReply,
)
_COMPLETIONS = AnswerDialect(
    model=CompletionsRequest,
    table=field_table.COMPLETIONS,
    prompt_field="prompt",
    required=("prompt",),
    reply=CompletionsReply,
)
_LLAMA_SERVER = AnswerDialect(
    model=CompletionRequest, table=field_table.COMPLETION, prompt_field="prompt", reply=LlamaServerReply
)
DIALECTS: Mapping[str, AnswerDialect] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": _COMPLETIONS,
    "/v1/responses": _RESPONSES,
    "/v1/messages": _ANTHROPIC,
    "/api/chat": _OLLAMA,
    "/api/generate": replace(_OLLAMA, model=GenerateRequest, table=field_table.OLLAMA_GENERATE, prompt_field="prompt"),
    "/completion": _LLAMA_SERVER,
    "/infill": replace(_LLAMA_SERVER, model=InfillRequest, table=field_table.INFILL, prompt_field="input_prefix"),
}
# Routes between texts, tokens and prompts: they need the model, and no answer of it.
TEXTS = {
    "/tokenize": Dialect(TokenizeRequest, field_table.TOKENIZE, "content"),
    "/detokenize": Dialect(DetokenizeRequest, field_table.DETOKENIZE, "tokens"),
    "/apply-template": Dialect(ApplyTemplateRequest, field_table.CHAT, "messages"),
}
_RERANK = Dialect(RerankRequest, field_table.RERANK, "documents", ("query",))
_OLLAMA_EMBED = Dialect(
    model=OllamaEmbedRequest,
    table=field_table.OLLAMA_EMBED,
    prompt_field="input",
    required=("input",),
    error_body=ollama.error_body,
    error_event=ollama.error_event,
    ping=ollama.PING,
    media_type=NDJSON,
)
# Routes for vectors and rankings, which are computed behind the answers.
POOLED = {
    "/v1/embeddings": Dialect(EmbeddingsRequest, field_table.EMBEDDINGS, "input", ("input",)),
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/rerank": _RERANK,
    "/api/embed": _OLLAMA_EMBED,
    "/api/embeddings": replace(
        _OLLAMA_EMBED,
        model=OllamaEmbeddingsRequest,
        table=field_table.OLLAMA_EMBEDDINGS,
        prompt_field="prompt",
        required=("prompt",),
    ),
}


@cache
def _all_fields() -> frozenset[str]:
    """Return the fields that any API for answers implements or refuses."""
    tables = [(dialect.model, dialect.table) for dialect in DIALECTS.values()] + [(ollama.Options, OLLAMA_OPTIONS)]
    return frozenset(name for model, table in tables for name in model.model_fields.keys() | table.refused.keys())


def dialect_of(path: str) -> Dialect:
    """Return the API of a route that needs a model."""
    return POOLED.get(path) or TEXTS.get(path) or DIALECTS[COUNTS.get(path, path)]


def parse_request(path: str, data: dict[str, Any], *, logs_ignored: bool = False) -> ApiRequest:
    """Return the checked request of a body; the front logs its ignored fields. Raises ApiError."""
    return parse_answers(path, data, logs_ignored=logs_ignored)[0]


def parse_answers(
    path: str, data: dict[str, Any], *, logs_ignored: bool = False
) -> tuple[ApiRequest, list[AnswerRequest]]:
    """Return the checked request of a body, also in our words. Raises ApiError."""
    request: ApiRequest = _parsed(path, data, logs_ignored)
    return request, request.answer_requests()  # they check what types cannot say


def parse_pooled(path: str, data: dict[str, Any], *, logs_ignored: bool = False) -> PooledRequest:
    """Return the checked request of a body for vectors or a ranking. Raises ApiError."""
    request: PooledRequest = _parsed(path, data, logs_ignored)
    request.pooled_request()
    return request


def parse_routed(path: str, data: dict[str, Any]) -> Routed:
    """Return the checked request of any body, for the front. Raises ApiError."""
    return (parse_pooled if path in POOLED else parse_request)(path, data, logs_ignored=True)


def _parsed(path: str, data: dict[str, Any], logs_ignored: bool) -> Any:
    dialect = dialect_of(path)
    for name in () if path in COUNTS else dialect.required:
        if data.get(name) is None:
            raise ApiError(400, "missing_required_parameter", f"{name} is missing", param=name)
    request: Any = dialect.request(data)
    if isinstance(dialect, AnswerDialect):
        request.noted((*request.notes, *dialect.notes(data)))
    if logs_ignored:
        dialect.log_ignored(data)
    return request


def reply_to(path: str, request: ApiRequest, context: AnswerContext) -> Reply:
    """Return the form of the answer to a checked request."""
    return DIALECTS[path].reply(request, context)


def count_reply(path: str, num_tokens: int) -> dict[str, Any]:
    """Return the answer of a route of COUNTS."""
    kind = {} if path.startswith("/v1/messages") else {"object": "response.input_tokens"}
    return kind | {"input_tokens": num_tokens}


def error_status_of(path: str, error: ApiError) -> int:
    """Return the status of an error in the API that a path belongs to."""
    return messages.error_status(error) if path.startswith("/v1/messages") else error.status


def error_body_of(path: str, error: ApiError) -> dict[str, Any]:
    """Return an error in the form of the API that a path belongs to."""
    if path.startswith("/api/"):
        return ollama.error_body(error)
    return (_ANTHROPIC if path.startswith("/v1/messages") else _CHAT).error_body(error)
