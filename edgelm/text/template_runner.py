"""The parent's side of the worker that runs a model's chat template.

Owns the worker's life and its limits of time. It encodes the text; template_worker.py, which never imports this module,
renders it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgelm.base.errors import EdgeLMError, EngineError, ModelError, RequestError
from edgelm.base.workers.parent import Worker, in_daemon_thread
from edgelm.base.workers.wire import encode
from edgelm.text.chat import Rendered, Span
from edgelm.text.chat_tokens import encode_rendered
from edgelm.text.prompt_token_cache import Prompt, PromptTokenCache
from edgelm.text.template import ChatTemplate, Message, RefusedError, TemplateFailedError, TooLongError
from edgelm.text.template_worker import LIMIT_S, Render, RenderedText, TemplateReady, UseTemplate

if TYPE_CHECKING:
    from edgelm.text.tokenizer import Tokenizer

START_LIMIT_S = 60.0  # Python starts slowly on a machine that is busy loading a model
WORKER = "edgelm.text.template_worker"
# The names that a request's options for the template must not have.
RESERVED = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "max_bytes",
        "with_spans",
        "pictures",
        "own_marks",
    }
    | {"template", "bos_token", "eos_token"}
)
ERRORS = (ModelError, RequestError, RefusedError, TemplateFailedError, TooLongError)


def start_template_worker() -> Worker:
    """Start a worker for a TemplateRunner. It waits for a template, so that it can start while a model is loaded."""
    return Worker(WORKER, replies=(TemplateReady, RenderedText), errors=ERRORS, echo="")


class TemplateRunner:
    """Renders chats with a model's template, one at a time, off the event loop. Close it with the application.

    `worker` is the first worker, if it has been started already.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tokens: PromptTokenCache | None = None,
        *,
        worker: Worker | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt_tokens = prompt_tokens or PromptTokenCache()
        self._limit_s = limit_s
        self._reading: asyncio.Future[ChatTemplate] | None = None  # by the first request, for all
        self._worker: Worker | None = None
        self._started_worker = worker
        self._lock = asyncio.Lock()
        self._closed = False

    async def template(self) -> ChatTemplate:
        """Return the template. It is never compiled in this process."""
        if self._reading is None:  # reading the special strings of a large vocabulary takes 0.1 s
            self._reading = in_daemon_thread(lambda: ChatTemplate.of(self._tokenizer))
        return await asyncio.shield(self._reading)

    async def render_tokens(
        self,
        messages: Sequence[Message],
        /,
        *,
        max_bytes: int,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Return the tokens of a conversation, with one BOS if the model wants it. For the rest see `render`."""
        rendered = await self.render(
            messages, max_bytes=max_bytes, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
        )
        template = await self.template()
        return await asyncio.to_thread(encode_rendered, self._tokenizer, template, rendered)

    async def render_prompt(
        self,
        messages: Sequence[Message],
        *,
        max_bytes: int,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        cache_namespace: str = "",
        pictures: Mapping[str, str] | None = None,
        own_marks: Mapping[str, str] | None = None,
    ) -> Prompt:
        """Return the prompt of a conversation, with the generated text and tokens of the answers that are cached.

        `template_kwargs` go to the template, such as `enable_thinking`; `pictures` are the marks of pictures in the
        messages, `own_marks` those of control tokens. With `continue_final_message`, the answer continues the last
        message. For the errors see `render`.
        """
        kwargs = dict(template_kwargs or {})
        marks = {"pictures": dict(pictures)} if pictures else {}
        marks |= {"own_marks": dict(own_marks)} if own_marks else {}
        if reserved := sorted(RESERVED & kwargs.keys()):
            raise RequestError(f"{reserved[0]!r} is no option of a chat template", "remove it")
        new_turn = add_generation_prompt and not continue_final_message
        rendered = await self.render(
            messages,
            max_bytes=max_bytes,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            with_spans=new_turn and any(message.get("role") == "assistant" for message in messages),
            **marks,
            **kwargs,
        )
        template = await self.template()
        return await asyncio.to_thread(
            self._prompt_tokens.encode,
            self._tokenizer,
            template,
            rendered,
            cache_namespace,
            list(messages) if new_turn else None,
        )

    async def cache_answer(self, prompt: Prompt, answer: Sequence[int], message: Message | None = None) -> None:
        """Keep the tokens of an answer for prompts that continue the conversation.

        `message` is what the client gets: with it, the answer is found again even if its text is spelled differently.
        """
        template = await self.template()
        await asyncio.to_thread(self._prompt_tokens.add, self._tokenizer, template, prompt, answer, message)

    async def render(
        self,
        messages: Sequence[Message],
        /,  # other arguments have names of the client
        *,
        max_bytes: int,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> Rendered:
        """Return the text of a conversation, as `render_chat` does.

        `max_bytes` limits the rendered text. Raises RequestError, ModelError for a broken template, and EngineError if
        no process can be started. Cancelling it ends the process; the next call starts another one.
        """
        template = await self.template()
        options = {"tools": tools, "add_generation_prompt": add_generation_prompt, "max_bytes": max_bytes, **kwargs}
        try:
            request = await asyncio.to_thread(encode, Render(list(messages), options))
        except RecursionError as error:
            raise RequestError("the messages are nested too deep", "send messages with less nesting") from error
        async with self._lock:
            return await self._ask(template, request)

    async def close(self) -> None:
        """End the worker. A render in progress fails."""
        self._closed = True
        self._worker = self._worker or self._started_worker
        await self._stop()

    async def _ask(self, template: ChatTemplate, request: bytes) -> Rendered:
        """Return the result of an encoded `Render`. End a worker that gives none."""
        healthy = False
        try:
            worker = await self._started(template)
            try:
                async with asyncio.timeout(self._limit_s):
                    await in_daemon_thread(lambda: worker.send_line(request))
                    reply = await worker.areceive()
                healthy = reply is not None
            except TimeoutError as error:
                raise RequestError(
                    f"the model's chat template took more than {self._limit_s:g} s", "shorten the messages"
                ) from error
            except EdgeLMError:  # the worker's answer: it cannot render this conversation
                healthy = True
                raise
            if reply is None:
                end = await worker.aexit()
                raise ModelError(
                    f"the process that runs the model's chat template {end.how}",
                    "try again; if it happens again, use another model",
                )
            spans = [Span(*span) for span in reply.spans]
            return Rendered(reply.text, reply.plain, spans, reply.effort, reply.stays_on)
        finally:
            if not healthy:
                await self._stop()

    async def _started(self, template: ChatTemplate) -> Worker:
        if self._closed:
            raise EngineError("the model is being unloaded", "try again")
        if self._worker is not None and not self._worker.exited:
            return self._worker
        await self._stop()
        self._worker = worker = self._started_worker or start_template_worker()
        self._started_worker = None
        request = UseTemplate(
            template.source,
            template.bos,
            template.eos,
            tuple(sorted(template.special_strings)),
            tuple(sorted(template.user_defined)),
            self._limit_s,
        )
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await in_daemon_thread(lambda: worker.send(request))  # it may be more than a pipe holds
                ready = await worker.areceive()
        except TimeoutError:
            ready = None
        if ready is None:
            raise EngineError("the process that runs chat templates does not start", "see the log")
        return worker

    async def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            await worker.aclose()
