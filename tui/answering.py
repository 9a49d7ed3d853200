"""One answer, from the request to its end, whatever that is.

Owns the order of things and what each end means. Knows nothing of the screen but a view and two calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from edgelm.chats.model import Message
from edgelm.client.endpoint import AnswerStats, ChatRequest, Client, Delta, Finished, ModelEntry
from edgelm.client.failures import ContextFullError, UnreachableError
from edgelm.errors import EdgeLMError, RequestError
from edgelm.tui.link import Link
from edgelm.tui.session import Session
from edgelm.tui.spans import Spans
from edgelm.tui.views import GO_ON, MessageView

LOOK_S = 0.25  # between two looks at how far things are
NOTED_REASONS = ("length", "context", "content_filter")


@dataclass(eq=False)
class Answer:
    """An answer that is being written."""

    session: Session
    message: Message
    view: MessageView
    options: Mapping[str, float | int]
    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    tokens: int = 0
    drafted: Spans = field(default_factory=Spans)  # of the message's text

    @property
    def speed(self) -> float | None:
        """Return the tokens per second so far."""
        if self.first_token is None or self.tokens < 2:
            return None
        return (self.tokens - 1) / max(time.monotonic() - self.first_token, 1e-3)


@dataclass(frozen=True)
class Watcher:
    """Who wants to know: `changed` when the view is to be drawn, `progress` with what the status line says."""

    changed: Callable[[Answer], None]
    progress: Callable[[Answer, str, AnswerStats | None], None]


def choose_model(wanted: Sequence[str], models: Sequence[ModelEntry]) -> str:
    """Return the first wanted model that is offered, or the first offered one. Raises RequestError without any."""
    offered = [model.id for model in models]
    for name in filter(None, wanted):
        if name in offered or name.startswith("/") or ("/" in name and name.endswith(".gguf")):  # named, not listed
            return name
    if not offered:
        raise RequestError("the endpoint offers no model", "install one, or name a .gguf file or a folder with --model")
    return offered[0]


async def write_answer(link: Link, answer: Answer, wanted: Sequence[str], watcher: Watcher) -> None:
    """Stream an answer into its session and view. Every failure becomes the end of the message, none is raised."""
    session, message = answer.session, answer.message
    try:
        finished = await _stream(link, answer, wanted, watcher)
    except EdgeLMError as error:
        if isinstance(error, ContextFullError):
            error = ContextFullError(error.message, GO_ON)
        session.finish(message, "failed", str(error))
        stats = None
    except asyncio.CancelledError:
        session.finish(message, "stopped")
        answer.view.settle()
        watcher.changed(answer)
        raise
    else:
        stats = finished.stats
        session.finish(message, "done", finished.reason if finished.reason in NOTED_REASONS else "", stats)
    answer.view.settle()
    watcher.changed(answer)
    watcher.progress(answer, "ready", stats)


async def _stream(link: Link, answer: Answer, wanted: Sequence[str], watcher: Watcher) -> Finished:
    for attempt in (1, 2):
        client: Client | None = None
        looking = asyncio.create_task(_look(link, answer, watcher))
        try:
            client = await link.client()
            model = choose_model(wanted, await link.models())
            if model != answer.message.model:
                answer.view.set_model(model)
            past, turns = answer.session.turns(answer.message)
            request = ChatRequest(model, turns, answer.options, past)
            async for item in client.chat(request):
                if isinstance(item, Finished):
                    return item
                _take(answer, item, watcher)
        except UnreachableError:
            await link.lost()
            if attempt == 2 or client is None or answer.message.text:
                raise
        finally:
            looking.cancel()
    raise AssertionError("an answer ends with Finished or an error")


def _take(answer: Answer, delta: Delta, watcher: Watcher) -> None:
    if answer.first_token is None:
        answer.first_token = time.monotonic()
        watcher.progress(answer, "writing", None)
    answer.tokens += 1
    if delta.drafted:
        answer.drafted.add(delta.drafted, len(answer.message.text))
    answer.session.append(answer.message, delta.text, delta.reasoning)
    answer.view.append(delta.text, delta.drafted)
    watcher.changed(answer)


async def _look(link: Link, answer: Answer, watcher: Watcher) -> None:
    """Say what is being waited for, then how fast the answer comes."""
    while True:
        if answer.first_token is not None:
            watcher.progress(answer, "writing", AnswerStats(tokens_per_second=answer.speed))
        else:
            status, seconds = "waiting", time.monotonic() - answer.started
            if (client := link.connected) is None:
                status = "connecting"
            else:
                with suppress(EdgeLMError):
                    if (loading := await client.loading(answer.message.model)) is not None:
                        share = f" {100 * loading.progress:.0f} %" if loading.progress is not None else ""
                        status = f"loading the model{share}"
            if answer.first_token is None:  # it may have come while we asked
                waited = f", {seconds:.0f} s" if seconds >= 2 else ""
                answer.view.set_status(f"{status}{waited}")
                watcher.progress(answer, status, None)
                watcher.changed(answer)
        await asyncio.sleep(LOOK_S)
