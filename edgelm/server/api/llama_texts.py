"""POST /tokenize, /detokenize and /apply-template: llama-server's routes between texts, tokens and prompts.

The first two have the fields of vLLM, too, whose routes have the same names: `prompt` in place of `content`.

Owns their fields and their answers, which are made in the engine process and need no engine.
"""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from pydantic import Field

from edgelm.jobs.request import AnswerRequest
from edgelm.server.api.chat import ChatRequest
from edgelm.server.api.completions import Ids
from edgelm.server.api.errors import ApiError
from edgelm.server.api.llama_server import OptionalModel

if TYPE_CHECKING:
    from edgelm.jobs.answer import Prepared
    from edgelm.text.encoding import TextEncoder
    from edgelm.text.tokenizer import Tokenizer

MAX_TEXT_BYTES = 2**20  # llama.cpp takes quadratic time for some texts: 20 s for this size
Prepare = Callable[[AnswerRequest], Awaitable["Prepared"]]


class TextRequest(Protocol):
    """A request that the tokenizer or the chat template answers."""

    model: str  # as the client named it

    async def text_answer(self, texts: TextEncoder, prepare: Prepare) -> bytes:
        """Return the answer in JSON. Raises ApiError and RequestError."""


class _NoAnswer(OptionalModel):
    """A request without an answer of the model."""

    @property
    def streamed(self) -> bool:
        return False

    def answer_requests(self) -> list[AnswerRequest]:
        return []

    async def text_answer(self, texts: TextEncoder, prepare: Prepare) -> bytes:
        return await asyncio.to_thread(self._answer, texts)

    @abstractmethod
    def _answer(self, texts: TextEncoder) -> bytes: ...


class TokenizeRequest(_NoAnswer):
    """The body of POST /tokenize."""

    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    prompt: str | None = None  # vLLM's name of content; then it counts, and special tokens are added by default
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def answer_requests(self) -> list[AnswerRequest]:
        name, text = ("content", self.content) if self.prompt is None else ("prompt", self.prompt)
        if text is None:
            raise ApiError(400, "missing_required_parameter", "content is missing", param="content")
        if self.prompt is not None and self.content is not None:
            message = "content and prompt are both given: omit one"
            raise ApiError(400, "invalid_value", message, param="prompt")
        if len(text.encode()) > MAX_TEXT_BYTES:
            message = f"{name} is larger than {MAX_TEXT_BYTES // 2**20} MiB: send it in parts"
            raise ApiError(413, "request_too_large", message, param=name)
        return []

    def _answer(self, texts: TextEncoder) -> bytes:
        special, tokenizer = self.parse_special is not False, texts.tokenizer
        text = self.content or self.prompt or ""
        whole = self.add_special if self.prompt is None else self.add_special_tokens is not False
        pieces = texts.prompt(text, special=special) if whole else texts.part(text, special=special)
        ids = [token for piece in pieces for token in piece]
        if self.with_pieces:
            shown = {token: json.dumps({"id": token, "piece": _piece(tokenizer, token)}) for token in set(ids)}
        else:
            shown = {token: str(token) for token in set(ids)}
        # json.dumps of a million entries would let no other thread run for a second.
        answer = f'{{"tokens":[{",".join([shown[token] for token in ids])}]'
        if self.prompt is not None:
            answer += f',"count":{len(ids)}'
        if self.return_token_strs:
            strings = {token: json.dumps(tokenizer.text_of(token)) for token in set(ids)}
            answer += f',"token_strs":[{",".join([strings[token] for token in ids])}]'
        return f"{answer}}}".encode()


class DetokenizeRequest(_NoAnswer):
    """The body of POST /detokenize."""

    tokens: Ids

    def _answer(self, texts: TextEncoder) -> bytes:
        tokenizer = texts.tokenizer
        if not 0 <= min(self.tokens, default=0) <= max(self.tokens, default=0) < tokenizer.num_tokens:
            message = f"tokens has an id outside of the vocabulary of {tokenizer.num_tokens:,}"
            raise ApiError(400, "invalid_value", message, param="tokens")
        text = b"".join(_bytes(tokenizer, token) for token in self.tokens).decode("utf-8", "replace")
        return json.dumps({"content": text, "prompt": text}).encode()


class ApplyTemplateRequest(ChatRequest):
    """The body of POST /apply-template: a chat, whose prompt is the answer."""

    model: str = Field(default="", max_length=4096)

    async def text_answer(self, texts: TextEncoder, prepare: Prepare) -> bytes:
        (request,) = await asyncio.to_thread(self.answer_requests)
        prepared = await prepare(request)
        assert prepared.chat
        return json.dumps({"prompt": prepared.chat.rendered.restored}).encode()


def _bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the text of a token, also of a control token."""
    return tokenizer.piece(token) or tokenizer.text_of(token).encode()


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """Return the text of a token; its bytes, if they are a part of a character."""
    piece = _bytes(tokenizer, token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
