"""POST /v1/completions: a text to continue, without a chat template.

Owns its fields, and its form of an answer.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, Tag

from edgelm import __version__
from edgelm.base.sampling import MAX_LOGPROBS
from edgelm.jobs.request import AnswerDelta, AnswerRequest
from edgelm.server.api.chat_reply import event, figures, openai_reason, usage
from edgelm.server.api.dialect import DONE, AnswerContext, Reply
from edgelm.server.api.errors import ApiError
from edgelm.server.api.fields import (
    MAX_CHOICES,
    GrammarFields,
    KeepAliveFields,
    ModelName,
    SamplingFields,
    StreamOptions,
    text_form,
)
from edgelm.server.api.logprobs import TextOffsets, completion_logprobs
from edgelm.server.api.sentinels import OFF_OF_TEXTS

DEFAULT_TOKENS = 16  # OpenAI's default
MAX_PROMPTS = 64
MAX_ANSWERS = 64  # of one request, to all its prompts


def _without_pictures(value: object) -> object:
    """Return a text for llama-server's form of a prompt that may have pictures. Raises ApiError if it has some."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_without_pictures(prompt) for prompt in value]
    if isinstance(value, dict) and "prompt_string" in value:
        if value.get("multimodal_data"):
            message = "prompt: multimodal_data is not read here: send pictures in messages to POST /v1/chat/completions"
            raise ApiError(400, "unsupported_content", message, param="prompt")
        return value["prompt_string"]
    return value


Ids = Annotated[list[int], Field(fail_fast=True)]
Prompt = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[list[str], Tag("strs"), Field(fail_fast=True)]
    | Annotated[Ids, Tag("ids")]
    | Annotated[list[Ids], Tag("lists"), Field(fail_fast=True)],
    Discriminator(text_form),
    BeforeValidator(_without_pictures),
]


class CompletionsRequest(GrammarFields, SamplingFields, KeepAliveFields):
    """The body of POST /v1/completions."""

    sentinels = OFF_OF_TEXTS
    model: ModelName
    prompt: Prompt | None = None
    suffix: str | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=-1)  # below 0: until the model ends
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES)

    @property
    def streamed(self) -> bool:
        return bool(self.stream)

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_candidates(self) -> int:
        return self.best_of or self.num_choices

    def answer_requests(self) -> list[AnswerRequest]:
        """Return a request for each prompt. Raises ApiError."""
        if self.num_candidates < self.num_choices or (self.streamed and self.num_candidates > self.num_choices):
            message = "best_of is smaller than n" if not self.streamed else "best_of cannot be streamed"
            raise ApiError(400, "invalid_value", message, param="best_of")
        if self.echo and self.suffix:
            raise ApiError(400, "invalid_value", "echo and suffix are both given: omit one", param="suffix")
        prompts = self._prompts()
        if len(prompts) * self.num_candidates > MAX_ANSWERS:
            field = "n" if self.best_of is None else "best_of"
            given = f"{field} is {self.num_candidates} for {len(prompts)} prompts"
            message = f"{given}: a request has {MAX_ANSWERS} answers at most"
            raise ApiError(400, "invalid_value", message, param=field)
        return [self._answer_request(prompt) for prompt in prompts]

    def _prompts(self) -> list[str | list[int]]:
        prompt = self.prompt
        if prompt is None or isinstance(prompt, str):
            return [prompt or ""]
        if ids := [token for token in prompt if isinstance(token, int)]:
            return [ids]
        texts: list[str | list[int]] = [text for text in prompt if not isinstance(text, int)]
        if not 1 <= len(texts) <= MAX_PROMPTS:
            raise ApiError(400, "invalid_value", f"prompt has not 1 to {MAX_PROMPTS} texts", param="prompt")
        return texts

    def _answer_request(self, prompt: str | list[int]) -> AnswerRequest:
        limit = DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens
        sampling = self.sampling() | ({"max_tokens": limit} if limit >= 0 else {})
        if self.logprobs is not None or self.num_candidates > self.num_choices:  # the best is chosen by them
            sampling["num_logprobs"] = self.logprobs or 0
        return AnswerRequest(
            prompt=prompt,
            suffix=self.suffix or None,
            echo=bool(self.echo),
            grammar=self.grammar_spec(),
            sampling=sampling,
            stop=self.stops,
            num_choices=self.num_candidates,
        )


class CompletionsReply(Reply):
    """The choices of one request, numbered by prompt and by answer to it."""

    def __init__(self, request: CompletionsRequest, context: AnswerContext) -> None:
        self._request = request
        self._context = context
        self._id = f"cmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._offsets: dict[int, TextOffsets] = {}  # by choice
        self._last: dict[int, AnswerDelta] = {}  # by choice

    def delta(self, delta: AnswerDelta) -> bytes:
        if not (delta.text or delta.reason or (delta.sampled and self._request.logprobs is not None)):
            return b""
        if delta.reason:
            self._last[delta.choice] = delta
        return event(self._envelope([self._choice(delta.choice, [delta])]))

    def closing(self) -> bytes:
        options = self._request.stream_options
        chunk = event(self._envelope([]) | {"usage": self._usage()}) if options and options.include_usage else b""
        return chunk + DONE

    def whole(self, deltas: Sequence[AnswerDelta]) -> dict[str, Any]:
        answers: dict[int, list[AnswerDelta]] = {}
        for delta in deltas:
            answers.setdefault(delta.choice, []).append(delta)
        self._last = {choice: answer[-1] for choice, answer in answers.items()}
        choices = []
        for index, choice in enumerate(self._best(answers)):
            answer = answers[choice]
            choices.append(self._choice(choice, answer) | {"index": index})
        return self._envelope(choices) | {"usage": self._usage()}

    def _best(self, answers: dict[int, list[AnswerDelta]]) -> list[int]:
        """Return the choices that are shown: of each prompt, the n with the highest mean log-probability."""
        shown, candidates = self._request.num_choices, self._request.num_candidates
        order = sorted(answers)
        if shown == candidates:
            return order
        best: list[int] = []
        for first in range(0, len(order), candidates):
            group = order[first : first + candidates]
            first_delta = int(bool(self._request.echo))  # the prompt is the same for all
            best += sorted(group, key=lambda choice: -_mean_logprob(answers[choice][first_delta:]))[:shown]
        return best

    def _choice(self, index: int, deltas: Sequence[AnswerDelta]) -> dict[str, Any]:
        """Return a choice, or the next part of one."""
        last = deltas[-1]
        choice = {
            "index": index,
            "text": "".join(delta.text for delta in deltas),
            "logprobs": None if self._request.logprobs is None else self._logprobs(index, deltas),
            "finish_reason": openai_reason(last.reason) if last.reason else None,
        }
        if last.reason and last.stats:
            choice["edgelm"] = figures(last, self._context.executor)
        return choice

    def _logprobs(self, index: int, deltas: Sequence[AnswerDelta]) -> dict[str, Any]:
        """Return the log-probabilities of the tokens, with the token that ends an answer, as vLLM does."""
        starts: list[int] = []
        for delta in deltas:
            ids = [sample.id for sample in delta.sampled]
            if index not in self._offsets:
                self._offsets[index] = offsets = TextOffsets(self._context.tokenizer)
                if self._request.echo:
                    starts += offsets.of_prompt(delta.text, ids)
                    continue
            starts += map(self._offsets[index].next, ids)
        sampled = [sample for delta in deltas for sample in delta.sampled]
        return completion_logprobs(self._context.tokenizer, sampled, starts)

    def _usage(self) -> dict[str, Any]:
        return usage(self._last, self._request.num_candidates)

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._context.model,
            "system_fingerprint": f"edgelm-{__version__}",
            "choices": choices,
        }


def _mean_logprob(answer: Sequence[AnswerDelta]) -> float:
    values = [s.logprob for delta in answer for s in delta.sampled if s.logprob is not None]
    return sum(values) / max(len(values), 1)
