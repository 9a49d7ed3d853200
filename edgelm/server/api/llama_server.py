"""POST /completion and /infill: llama-server's own routes for a text to continue, and for the middle of a file.

Owns their fields, and their form of an answer. File names are labels in a prompt: no path of a request is opened.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

from pydantic import Field, field_validator

from edgelm.engine.core import Stats
from edgelm.jobs.request import AnswerDelta, AnswerRequest
from edgelm.server.api.chat_reply import event
from edgelm.server.api.completions import Prompt
from edgelm.server.api.dialect import AnswerContext, Reply
from edgelm.server.api.errors import ApiError
from edgelm.server.api.fields import Body, GrammarFields, KeepAliveFields, SamplingFields
from edgelm.server.api.sentinels import OFF_OF_TEXTS

MAX_INDENT = 4096
STOP_TYPES = {"stop": "eos", "length": "limit", "context": "limit"}


class OptionalModel(KeepAliveFields):
    """A request that names no model means the one that is in use."""

    model: str = Field(default="", max_length=4096)

    @field_validator("model", mode="before")
    @classmethod
    def _null_as_empty(cls, value: object) -> object:
        return "" if value is None else value


class LlamaServerRequest(GrammarFields, SamplingFields, OptionalModel):
    """The fields that both routes have."""

    sentinels = OFF_OF_TEXTS
    stream: bool | None = None
    n_predict: int | None = Field(default=None, ge=-2)  # below 0: until the model ends or the context is full
    max_tokens: int | None = Field(default=None, ge=-1)
    n_indent: int | None = Field(default=None, ge=0, le=MAX_INDENT)
    t_max_predict_ms: int | None = None
    response_fields: list[str] | None = Field(default=None, fail_fast=True)

    @property
    def streamed(self) -> bool:
        return bool(self.stream)

    @property
    def num_tokens(self) -> int | None:
        """The most tokens of the answer; None: no limit."""
        number = self.max_tokens if self.n_predict is None else self.n_predict
        return None if number is None or number < 0 else number

    def answer_requests(self) -> list[AnswerRequest]:
        """Return the request in our words. Raises ApiError."""
        return [self._answer_request(self._common())]

    @abstractmethod
    def _answer_request(self, common: dict[str, Any]) -> AnswerRequest: ...

    def _common(self) -> dict[str, Any]:
        limit = {} if self.num_tokens is None else {"max_tokens": self.num_tokens}
        return {
            "grammar": self.grammar_spec(),
            "sampling": self.sampling() | limit,
            "stop": self.stops,
            "least_indent": self.n_indent or 0,
            "time_limit_ms": self.t_max_predict_ms if self.t_max_predict_ms and self.t_max_predict_ms > 0 else None,
        }


class CompletionRequest(LlamaServerRequest):
    """The body of POST /completion."""

    prompt: Prompt

    def _answer_request(self, common: dict[str, Any]) -> AnswerRequest:
        prompt = self.prompt
        if isinstance(prompt, list) and any(not isinstance(token, int) for token in prompt):
            raise ApiError(400, "invalid_value", "prompt is neither a text nor a list of token ids", param="prompt")
        return AnswerRequest(prompt=cast("str | list[int]", prompt), **common)


class ExtraFile(Body):
    """Another file of an editor: its name is a label."""

    filename: str | None = None
    text: str | None = None


class InfillRequest(LlamaServerRequest):
    """The body of POST /infill."""

    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: list[ExtraFile] | None = Field(default=None, fail_fast=True)
    prompt: str | None = None  # the end of the prefix, behind the cursor's line break

    def _answer_request(self, common: dict[str, Any]) -> AnswerRequest:
        extra = self.input_extra or ()
        return AnswerRequest(
            prompt=(self.input_prefix or "") + (self.prompt or ""),
            suffix=self.input_suffix or "",
            files=[(file.filename or "tmp", file.text or "") for file in extra],
            interactive=self.num_tokens != 0,
            **common,
        )


class LlamaServerReply(Reply):
    """The answer to one request."""

    def __init__(self, request: LlamaServerRequest, context: AnswerContext) -> None:
        self._request = request
        self._context = context

    def delta(self, delta: AnswerDelta) -> bytes:
        text = b""
        if delta.text:
            text = event({"index": 0, "content": delta.text, "tokens": [], "stop": False})
        return text + event(self._chosen(self._end(delta, ""))) if delta.reason else text

    def whole(self, deltas: Sequence[AnswerDelta]) -> dict[str, Any]:
        return self._chosen(self._end(deltas[-1], "".join(delta.text for delta in deltas)))

    def _end(self, last: AnswerDelta, text: str) -> dict[str, Any]:
        assert last.stats
        assert last.reason
        stats, context, limit = last.stats, self._context.executor.context, self._request.num_tokens
        return {
            "index": 0,
            "content": text,
            "tokens": [],
            "stop": True,
            "model": self._context.model,
            "tokens_predicted": stats.completion_tokens,
            "tokens_evaluated": stats.prompt_tokens,
            "tokens_cached": stats.prompt_tokens + stats.completion_tokens,
            "truncated": last.reason == "context",
            "stop_type": "word" if last.stop else STOP_TYPES.get(last.reason, "eos"),
            "stopping_word": last.stop or "",
            "generation_settings": {"n_ctx": context, "n_predict": -1 if limit is None else limit},
            "timings": timings(stats),
            **({"edgelm": {"notes": list(last.notes)}} if last.notes else {}),
        }

    def _chosen(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that the client wants: "content", "timings/prompt_n"."""
        if not self._request.response_fields:
            return answer
        chosen = {}
        for path in self._request.response_fields:
            value: Any = answer
            for name in path.split("/"):
                value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
            if value is not _MISSING:
                chosen[path] = value
        return chosen


_MISSING = object()


def timings(stats: Stats) -> dict[str, Any]:
    """Return the times of an answer by llama-server's names."""
    prompt, predicted = stats.prompt_tokens - stats.cached_tokens, stats.completion_tokens
    return {
        "cache_n": stats.cached_tokens,
        "prompt_n": prompt,
        "prompt_ms": stats.prompt_ms,
        "prompt_per_token_ms": stats.prompt_ms / max(prompt, 1),
        "prompt_per_second": 1000 * prompt / stats.prompt_ms if stats.prompt_ms else 0.0,
        "predicted_n": predicted,
        "predicted_ms": stats.decode_ms,
        "predicted_per_token_ms": stats.decode_ms / max(predicted, 1),
        "predicted_per_second": stats.decode_tokens_per_second,
        "draft_n": stats.drafted,
        "draft_n_accepted": stats.accepted,
    }
