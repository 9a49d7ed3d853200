"""Prompts: the tokens of what a request asks, be it messages, a text, tokens, or a gap in a file.

Owns the composition of templates and vocabulary. A prompt that cannot fit is refused before it is encoded whole.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from edgelm.backends.model import LoadedModel
from edgelm.base.config import Settings
from edgelm.base.errors import RequestError
from edgelm.jobs.constraints import Style
from edgelm.jobs.pictures import Pictures, read_pictures
from edgelm.jobs.request import AnswerRequest, too_long
from edgelm.text.calls.generic import with_plain_calls, with_tools_text
from edgelm.text.encoding import TextEncoder
from edgelm.text.fim import fim_tokens, infill_tokens
from edgelm.text.history import text_of
from edgelm.text.own_marks import with_own_marks
from edgelm.text.prompt_token_cache import Prompt
from edgelm.text.template import Message
from edgelm.text.template_runner import TemplateRunner
from edgelm.text.tokenizer import Tokenizer

TOKEN_BYTES = 128  # more than the average token of any vocabulary
LEAST_BYTES = 2**20  # an exact token count of fewer bytes is cheap
MAX_PAST_CHARS = 2**20  # the newest; a drafter keeps no more of one conversation
MAX_KEPT_PASTS = 4  # conversations


class Prompts:
    """Encodes the prompts of one model."""

    def __init__(self, loaded: LoadedModel, templates: TemplateRunner, settings: Settings) -> None:
        self._loaded = loaded
        self._settings = settings
        self._templates = templates
        self._texts = TextEncoder(loaded.tokenizer)

    def text_tokens(self, request: AnswerRequest) -> list[int]:
        """Return the tokens of a request with a prompt. Raises RequestError; ContextError if it is too long."""
        tokenizer, prompt = self._loaded.tokenizer, request.prompt
        assert prompt is not None
        info = self._loaded.engine.info
        if not isinstance(prompt, str):
            if request.suffix is not None:
                raise RequestError("suffix needs a prompt that is text", "send text, or omit suffix")
            if not 0 <= min(prompt, default=0) <= max(prompt, default=0) < tokenizer.num_tokens:
                raise RequestError(f"the prompt has a token id outside of the vocabulary of {tokenizer.num_tokens:,}")
            return list(prompt)
        if request.files is not None:
            # An editor warms the cache with a request for no tokens: it must cut like the next one.
            reserved = min(max(request.sampling.get("max_tokens", 0), info.context // 4), info.context // 2)
            return infill_tokens(self._texts, prompt, request.suffix or "", request.files, info.context - reserved)
        size = len(prompt) + len(request.suffix or "")
        if size > TOKEN_BYTES * info.context:
            raise too_long(f"the prompt has {size:,} characters", info.context)
        if request.suffix is not None:
            return prompt_ids(fim_tokens(self._texts, prompt, request.suffix), info.context)
        return prompt_ids(self._texts.prompt(prompt, special=True), info.context)

    async def chat(self, request: AnswerRequest, style: Style, cache_namespace: str) -> tuple[Prompt, Pictures]:
        """Render and encode a request with messages; its pictures have one token each.

        Raises RequestError, and the errors of the template worker.
        """
        others = (request.tools, request.template_kwargs)
        pictures = await read_pictures(self._loaded, self._settings, request.messages, *others)
        messages, tools = list(pictures.messages), list(map(_described, request.tools))
        if request.tool_choice.mode == "none":
            tools = []
        support, own_marks = style.tools, dict[str, str]()
        if support is not None and not (support.writes_calls and support.describes_tools):
            form, own_marks = with_own_marks(support.form, style.marks, messages, *others)
            results = support.shows_results
            if not support.writes_calls:
                messages = await asyncio.to_thread(with_plain_calls, messages, form, results=results)
            if tools and not support.describes_tools:
                plain = [{**message, "content": text_of(message.get("content"))} for message in messages]
                messages, tools = with_tools_text(plain, form, tools, results=results), []
        context = self._loaded.engine.info.context
        prompt = await self._templates.render_prompt(
            messages,
            max_bytes=max(context * TOKEN_BYTES, LEAST_BYTES),
            tools=tools or None,
            add_generation_prompt=not request.continues_last,
            continue_final_message=request.continues_last,
            template_kwargs=request.template_kwargs,
            cache_namespace=cache_namespace,
            pictures=pictures.marks,
            own_marks=own_marks,
        )
        return prompt, pictures


def _described(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with a description: some templates fail without one."""
    function = tool.get("function")
    if not isinstance(function, dict) or function.get("description") is not None:
        return tool
    return {**tool, "function": {**function, "description": ""}}


def prompt_ids(pieces: Iterable[list[int]], context: int) -> list[int]:
    """Return the tokens of a prompt. Raises ContextError when too many have come: the rest may take minutes."""
    ids: list[int] = []
    for piece in pieces:
        if len(ids) > context:
            raise too_long(f"the prompt has more than {context:,} tokens", context)
        ids += piece
    return ids


class PastTokens:
    """The tokens of messages that a conversation no longer sends: drafters read them, the model does not.

    The last few are kept: the same ones come with every message of a shortened chat. Never fails a request.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[tuple[str, ...], list[int]] = OrderedDict()

    async def tokens(self, past: Sequence[Message]) -> list[int]:
        """Return the tokens of the texts of these messages, as plain text."""
        if not past:
            return []
        texts = _newest([text_of(message["content"]) for message in past])
        if texts not in self._kept:
            self._kept[texts] = await asyncio.to_thread(self._encode, texts)
        self._kept.move_to_end(texts)
        tokens = self._kept[texts]
        while len(self._kept) > MAX_KEPT_PASTS:
            self._kept.popitem(last=False)
        return tokens

    def _encode(self, texts: tuple[str, ...]) -> list[int]:
        tokens: list[int] = []
        for text in texts:
            try:
                tokens += self._tokenizer.encode(text, special=False, bos=False)
            except RequestError:  # text that the vocabulary cannot encode cannot be drafted either
                continue
        return tokens


def _newest(texts: list[str]) -> tuple[str, ...]:
    """Return the last texts that fit into MAX_PAST_CHARS."""
    room, kept = MAX_PAST_CHARS, list[str]()
    for text in reversed(texts):
        room -= len(text)
        if room < 0:
            break
        kept.append(text)
    return tuple(reversed(kept))
