"""The process that runs a model's chat template, and the parent's side of it.

A template is a program from a model's file. It runs in a child process with limited time and memory, so that one that
never ends, or wants all memory, is one failed request:

    standard input    frames: first the template, then one a request; when it closes, the process ends
    standard output   frames: one when it is ready, then one an answer

A frame is its length in 4 bytes and JSON. Memory is limited on Linux only; elsewhere the limit of time must do.

Owns the process and its protocol. The child imports neither llama.cpp nor torch; tokens are made in the parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import resource
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from edgelm.errors import EdgeLMError, EngineError, ModelError, RequestError
from edgelm.text.chat import Rendered, encode_rendered, render_chat
from edgelm.text.known_chats import KnownChats, Prompt
from edgelm.text.template import ChatTemplate, Message, RefusedError, TemplateFailedError, TooLongError

if TYPE_CHECKING:
    from edgelm.text.tokenizer import Tokenizer

LIMIT_S = 5.0  # for one chat, from the request to its text
START_LIMIT_S = 60.0  # Python's own start, on a machine that is busy loading a model
MEMORY_BYTES = 2**30  # of the child's address space
_ERRORS: dict[str, type[EdgeLMError]] = {
    kind.__name__: kind for kind in (ModelError, RequestError, RefusedError, TemplateFailedError, TooLongError)
}


class TemplateRunner:
    """Renders chats with a model's template, one at a time, off the event loop. Close it with the application."""

    def __init__(self, tokenizer: Tokenizer, known: KnownChats | None = None, *, limit_s: float = LIMIT_S) -> None:
        self._tokenizer = tokenizer
        self._known = known or KnownChats()
        self._limit_s = limit_s
        self._template: ChatTemplate | None = None
        self._process: Process | None = None
        self._lock = asyncio.Lock()
        self._closed = False

    async def template(self) -> ChatTemplate:
        """Return the template, which is never compiled in this process."""
        if self._template is None:  # reading the special strings of a large vocabulary takes 0.1 s
            self._template = await asyncio.to_thread(ChatTemplate.of, self._tokenizer)
        return self._template

    async def render_tokens(
        self,
        messages: Sequence[Message],
        *,
        max_bytes: int,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Return the tokens of a conversation, as `encode_chat` does; for the rest see `render`."""
        rendered = await self.render(
            messages, max_bytes=max_bytes, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
        )
        template = await self.template()
        return await asyncio.to_thread(encode_rendered, self._tokenizer, template, rendered)

    async def render_prompt(self, messages: Sequence[Message], *, max_bytes: int, owner: str = "") -> Prompt:
        """Return a conversation's prompt, with the tokens that were generated where its owner's answers are in it."""
        rendered = await self.render(messages, max_bytes=max_bytes)
        template = await self.template()
        return await asyncio.to_thread(self._known.encode, self._tokenizer, template, rendered, owner)

    async def learn(self, prompt: Prompt, answer: Sequence[int]) -> None:
        """Keep the tokens of an answer for the prompts that go on from it."""
        await asyncio.to_thread(self._known.add, self._tokenizer, await self.template(), prompt, answer)

    async def render(
        self,
        messages: Sequence[Message],
        *,
        max_bytes: int,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> Rendered:
        """Return the text of a conversation, as `render_chat` does.

        `max_bytes` bounds the rendered text. Raises RequestError, ModelError for a template that is broken, and
        EngineError where no process can be started. Cancelling it ends the process; the next call starts another.
        """
        template = await self.template()
        options = {"tools": tools, "add_generation_prompt": add_generation_prompt, "max_bytes": max_bytes, **kwargs}
        try:
            job = await asyncio.to_thread(_frame, {"messages": list(messages), "options": options})
        except RecursionError as error:
            raise RequestError("the messages are nested too deep", "send them flatter") from error
        async with self._lock:
            data = await self._ask(template, job)

        return await asyncio.to_thread(lambda: _rendered(json.loads(data)))

    async def close(self) -> None:
        """End the process; a rendering that runs fails."""
        self._closed = True
        await self._stop()

    async def _ask(self, template: ChatTemplate, job: bytes) -> bytes:
        """Return the answer to a request. Whatever goes wrong, the process is gone afterwards."""
        done = False
        try:
            process = await self._started(template)
            try:
                async with asyncio.timeout(self._limit_s):
                    answer = await _exchange(process, job)
            except TimeoutError as error:
                raise RequestError(
                    f"the model's chat template took more than {self._limit_s:g} s", "shorten the messages"
                ) from error
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise ModelError(
                    f"the process that runs the model's chat template died: {await _ending(process)}",
                    "try again; if it stays so, take the model elsewhere",
                ) from error
            done = True
            return answer
        finally:
            if not done:
                await self._stop()

    async def _started(self, template: ChatTemplate) -> Process:
        if self._closed:
            raise EngineError("the model is being unloaded", "try again")
        if self._process is not None and not _is_dead(self._process):
            return self._process
        await self._stop()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "edgelm.text.template_worker", str(self._limit_s), stdin=PIPE, stdout=PIPE
        )
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await _exchange(self._process, _frame(_description(template)))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            raise EngineError("the process that runs chat templates does not start", "look at the log") from error
        return self._process

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def _exchange(process: Process, frame: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(frame)
    await process.stdin.drain()
    length = int.from_bytes(await process.stdout.readexactly(4))
    return await process.stdout.readexactly(length)


def _is_dead(process: Process) -> bool:
    assert process.stdout is not None
    return process.returncode is not None or process.stdout.at_eof()


async def _ending(process: Process) -> str:
    """Return how a process ended whose output is closed."""
    try:
        code = await asyncio.wait_for(process.wait(), timeout=1)
    except TimeoutError:
        return "it closed its output"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _frame(value: Any) -> bytes:
    data = json.dumps(value).encode()
    return len(data).to_bytes(4) + data


def _description(template: ChatTemplate) -> dict[str, Any]:
    return {
        "source": template.source,
        "bos": template.bos,
        "eos": template.eos,
        "special_strings": sorted(template.special_strings),
        "user_defined": sorted(template.user_defined),
    }


def _rendered(answer: dict[str, Any]) -> Rendered:
    if kind := answer.get("error"):
        raise _ERRORS[kind](answer["message"], answer["hint"])
    return Rendered(answer["text"], answer["plain"])


def main() -> int:
    """Render the chats that standard input brings, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the parent's to handle
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _limit_resources()
    # A template that never returns does not keep the process alive when the parent is gone, nor does one C call.
    limit_s = float(sys.argv[1]) + 1
    frames: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_frames, args=(sys.stdin.buffer, frames), daemon=True).start()
    described = frames.get()
    template = ChatTemplate(
        **{**described, **{name: frozenset(described[name]) for name in ("special_strings", "user_defined")}}
    )
    answer: dict[str, Any] = {}
    while True:
        output.write(_frame(answer))
        output.flush()
        job = frames.get()
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        answer = _answer(template, job)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(template: ChatTemplate, job: dict[str, Any]) -> dict[str, Any]:
    try:
        rendered = render_chat(template, job["messages"], **job["options"])
    except EdgeLMError as error:
        return {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    return {"text": rendered.text, "plain": rendered.plain}


def _read_frames(source: BinaryIO, frames: queue.SimpleQueue[dict[str, Any]]) -> None:
    while len(head := source.read(4)) == 4:
        frames.put(json.loads(source.read(int.from_bytes(head))))
    os._exit(0)


def _limit_resources() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = MEMORY_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_BYTES, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    sys.exit(main())
