"""The answers being written: at most one for each chat, also for chats that are not on the screen.

Owns one worker for each answer, the steps from the request to its end, and the state that each end leads to. Knows
nothing of the screen: a watcher is told when text arrives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from textual.worker import WorkerError

from edgelm.base.errors import EdgeLMError, EngineError, RequestError
from edgelm.chats.history import Message, split_sent
from edgelm.client.answer_stream import AnswerStats, Delta, Finished
from edgelm.client.endpoint import ChatRequest, Client, ModelEntry
from edgelm.client.failures import ContextFullError, UnreachableError
from edgelm.client.link import Link, sees
from edgelm.client.reader import Reader, guide_roots
from edgelm.client.session import Session
from edgelm.client.tool_runner import ToolRunner
from edgelm.client.turns import Turn
from edgelm.client.work import Work
from edgelm.library.catalog import FIRST_CHAT
from edgelm.tui.lines import short_name
from edgelm.tui.model_names import is_path
from edgelm.tui.transcript.drafted import Spans
from edgelm.tui.transcript.passages import one_line
from edgelm.tui.transcript.prompt_progress import follow_prompt
from edgelm.tui.transcript.thought import ThoughtClock, ThoughtFigures, estimate_tokens
from edgelm.tui.transcript.views import GO_ON

POLL_S = 0.25  # between two reports of progress
NOTED_REASONS = ("length", "context", "content_filter", "tool_limit")
MAX_FAILURE = 200  # characters of an exception
OWN_BUG = "this is a bug of edgelm: report it"
NO_TOOLS = "/tools off answers without tools; /model chooses another model"
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Answer:
    """One answer that is being written."""

    session: Session
    message: Message  # its text may have a beginning already, from which the model goes on
    sampling: Mapping[str, float | int | str]
    begun: str = field(init=False)  # that beginning
    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None  # when it arrived
    num_tokens: int = 0
    drafted: Spans = field(default_factory=Spans)  # of the message's text
    clock: ThoughtClock = field(default_factory=ThoughtClock)
    num_thoughts: int = 0  # tokens of reasoning
    preparing: str = ""  # what is done before a request
    status: str = ""  # what it waits for, until its first token

    def __post_init__(self) -> None:
        self.begun = self.message.text

    @property
    def has_begun(self) -> bool:
        """Tell whether the model has written text."""
        return len(self.message.text) > len(self.begun)

    @property
    def question(self) -> Message:
        """Return the message that is answered."""
        assert self.message.parent is not None, "an answer has a question"
        return self.session.tree.messages[self.message.parent]

    @property
    def activity(self) -> str:
        """Return what the model does now, after its first token."""
        return self.preparing or ("thinking" if self.clock.running else "writing")

    @property
    def thought(self) -> ThoughtFigures:
        """Return how long the model has thought."""
        tokens = estimate_tokens(self.num_thoughts, len(self.message.reasoning)) if self.clock.running else None
        return ThoughtFigures(self.clock.seconds, tokens, self.clock.running)

    def timed(self, stats: AnswerStats | None) -> AnswerStats | None:
        """Return the endpoint's stats, if they came, with the time of the thought, if there was one."""
        if not self.message.reasoning:
            return stats
        return replace(stats or AnswerStats(), reasoning_ms=round(1000 * self.clock.seconds))

    @property
    def tokens_per_second(self) -> float | None:
        """Return the speed so far; None before the second token."""
        if self.first_token is None or self.num_tokens < 2:
            return None
        return (self.num_tokens - 1) / max(time.monotonic() - self.first_token, 1e-3)


class AnswerWatcher(Protocol):
    """An observer of answers. The chat screen is one."""

    def answer_changed(self, answer: Answer) -> None:
        """Show the text, the calls and the state that the answer has now."""

    def answer_progressed(self, answer: Answer, activity: str, stats: AnswerStats | None) -> None:
        """Show what the answer is doing and, if they are given, its figures."""

    def answer_noted(self, answer: Answer, note: str) -> None:
        """Show a line about what the model is sent."""

    def answer_ended(self, answer: Answer) -> None:
        """Show the chat without a running answer."""


class Answers:
    """Starts and stops answers. `run` starts a worker for a coroutine.

    `num_logprobs` is the number of likeliest tokens that an edgelm endpoint computes for each token from now on.
    """

    def __init__(
        self,
        link: Link,
        reader: Reader,
        run: Callable[[Coroutine[Any, Any, None]], Work],
        watcher: AnswerWatcher,
        tools: ToolRunner,
    ) -> None:
        self.tools = tools
        self._link = link
        self._reader = reader
        self._run = run
        self._watcher = watcher
        self.num_logprobs = 0
        self.blind: set[tuple[int, str]] = set()  # chats and models that were told to get no pictures
        self._running: dict[int, tuple[Answer, Work]] = {}  # by chat

    def __bool__(self) -> bool:
        return bool(self._running)

    def of_chat(self, chat_id: int) -> Answer | None:
        """Return the answer that is being written in a chat."""
        entry = self._running.get(chat_id)
        return entry[0] if entry else None

    def start(self, answer: Answer, named: str, remembered: str = "") -> None:
        """Write an answer with the model that `choose_model` returns for these names."""
        chat_id = answer.session.chat.id
        assert chat_id not in self._running
        self._running[chat_id] = answer, self._run(self._write(answer, named, remembered))

    def stop(self, chat_id: int) -> bool:
        """Stop the answer of a chat; return whether there was one."""
        entry = self._running.get(chat_id)
        if entry is not None:
            entry[1].cancel()
        return entry is not None

    async def end(self, chat_id: int | None = None) -> None:
        """Stop the answer of a chat, or all, and wait until their text was handed to the store."""
        for running_id, (_, worker) in list(self._running.items()):
            if chat_id in (None, running_id):
                worker.cancel()
                with suppress(WorkerError):
                    await worker.wait()

    async def wait(self, chat_id: int) -> None:
        """Wait until the answer of a chat has ended by itself."""
        if (entry := self._running.get(chat_id)) is not None:
            await entry[1].wait()

    async def _write(self, answer: Answer, named: str, remembered: str) -> None:
        try:
            await _write_answer(self, self._link, self._reader, answer, (named, remembered), self._watcher)
        finally:
            del self._running[answer.session.chat.id]
            self._watcher.answer_ended(answer)


def choose_model(named: str, remembered: str, models: Sequence[ModelEntry], *, paths: bool) -> str:
    """Return the named model; where none is named, the remembered one if it is offered, else the first offered one.

    `paths`: the endpoint takes any path. Raises RequestError where the named one is not offered: no other answers in
    its place.
    """
    listed = [model.id for model in models]
    if named:
        if named in listed or (paths and is_path(named)):
            return named
        if f"{named}:latest" in listed:  # as Ollama lists it
            return f"{named}:latest"
        raise RequestError(f"the endpoint does not offer {one_line(named)}", "/model shows what it offers")
    if remembered in listed or (paths and is_path(remembered)):
        return remembered
    offered = [model.id for model in models if model.kind in ("", "text")]
    if not offered:
        raise RequestError("the endpoint offers no model", "install one, or name a .gguf file or a folder with --model")
    return FIRST_CHAT if FIRST_CHAT in offered else offered[0]


def failure_words(error: BaseException | None) -> str:
    """Return an exception that nothing handles, on one line."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) <= MAX_FAILURE else f"{words[:MAX_FAILURE]}…"


async def _write_answer(
    answers: Answers, link: Link, reader: Reader, answer: Answer, names: tuple[str, str], watcher: AnswerWatcher
) -> None:
    """Stream an answer into its session. A failure becomes the final state of the message; none is raised."""
    session, message = answer.session, answer.message
    try:
        finished = await _stream(answers, link, reader, answer, names, watcher)
    except EdgeLMError as error:
        if isinstance(error, ContextFullError):
            error = ContextFullError(error.message, GO_ON)
        session.finish(message, "failed", str(error), answer.timed(None))
        stats = None
    except asyncio.CancelledError:
        session.finish(message, "stopped", stats=answer.timed(None))
        watcher.answer_changed(answer)
        raise
    except Exception as error:  # the boundary of a worker: it would end the app with all answers
        log.exception("an answer failed")
        session.finish(message, "failed", f"edgelm failed here: {failure_words(error)}; {OWN_BUG}", answer.timed(None))
        stats = None
    else:
        stats = answer.timed(finished.stats)
        session.finish(message, "done", finished.reason if finished.reason in NOTED_REASONS else "", stats)
    watcher.answer_changed(answer)
    watcher.answer_progressed(answer, "ready" if link.is_ready else "not connected", stats)


async def _stream(
    answers: Answers, link: Link, reader: Reader, answer: Answer, names: tuple[str, str], watcher: AnswerWatcher
) -> Finished:
    for attempt in (1, 2):
        client: Client | None = None
        reporting = asyncio.create_task(_report_progress(link, answer, watcher))
        try:
            client = await link.client()
            model = await offered_model(link, client, names)
            if model != answer.message.model:
                answer.message.model = model
            if not answer.session.chat.model and not guide_roots(answer.question):  # the starter answers /help alone
                answer.session.set_model(model)
            await reader.require_consent(answer.session, model)
            await _read(reader, answer, client, model, watcher)
            pictures = await _sends_pictures(answers, link, answer, model, watcher)
            finished = await _request(answers, reader, answer, client, model, watcher, pictures=pictures)
            await link.learn_gpu(model)
            return finished
        except UnreachableError:
            await link.lost()
            # Retry once where an existing connection was lost before the first text.
            if attempt == 2 or client is None or answer.has_begun:
                raise
        finally:
            reporting.cancel()
    raise AssertionError("the second attempt returns or raises")


async def offered_model(link: Link, client: Client, names: tuple[str, str]) -> str:
    """Return the model for an answer; where it is not in the known list, request a new one."""
    try:
        return choose_model(*names, await link.models(), paths=client.is_edgelm)
    except RequestError:
        if names[0] and await client.knows(names[0]):
            return names[0]
        return choose_model(*names, await link.models(again=True), paths=client.is_edgelm)


async def _read(reader: Reader, answer: Answer, client: Client, model: str, watcher: AnswerWatcher) -> None:
    """Read for the question, and show what was read."""

    def show(activity: str) -> None:
        answer.preparing = activity

    await reader.read(answer.session, answer.question, client, model, show)
    answer.preparing = ""
    watcher.answer_changed(answer)


async def _sends_pictures(answers: Answers, link: Link, answer: Answer, model: str, watcher: AnswerWatcher) -> bool:
    """Return whether the conversation's pictures are sent. A model that reads none gets their names, told once."""
    _, sent = split_sent(answer.session.tree.path_to(answer.message.id))
    pictures = [file for message in sent for file in message.attachments if file.kind == "image"]
    if not pictures or await sees(link, model):
        return True
    key = answer.session.chat.id, model
    if key not in answers.blind:
        answers.blind.add(key)
        names = ", ".join(dict.fromkeys(one_line(picture.name) for picture in pictures))
        watcher.answer_noted(answer, f"left out for {short_name(model)}, which reads no images: {names}")
    return False


async def _request(
    answers: Answers,
    reader: Reader,
    answer: Answer,
    client: Client,
    model: str,
    watcher: AnswerWatcher,
    *,
    pictures: bool,
) -> Finished:
    """Stream the answer, with calls of tools in it; send fewer passages where the context has no room for them."""
    session, message = answer.session, answer.message

    def show(activity: str) -> None:
        answer.preparing = activity
        watcher.answer_progressed(answer, answer.activity, None)
        watcher.answer_changed(answer)

    choices = () if answer.begun else reader.choices(answer.question, model)  # they are whole answers
    offer = await answers.tools.offer(session, show) if session.chat.tools and not choices else None
    sampling = {"temperature": 0, **answer.sampling} if choices else answer.sampling
    while True:
        past, turns = session.turns(message, pictures=pictures)
        if choices:  # capitals would change the starter's choice
            turns = tuple(replace(turn, text=turn.text.lower()) if turn.role == "user" else turn for turn in turns)
        begun = Turn("assistant", answer.begun, message.reasoning) if answer.begun and not message.calls else None
        functions = offer.functions if offer else ()
        request = ChatRequest(model, turns, sampling, past, choices, begun, answers.num_logprobs, functions)
        try:
            finished = await _receive(client, request, answer, watcher)
        except ContextFullError as error:
            if answer.has_begun or message.calls or not reader.drop_half(session, answer.question):
                if functions:
                    raise ContextFullError(f"{error.message} (/tools leaves out tools, which take room)") from error
                raise
            choices = reader.choices(answer.question, model) if choices else ()
            watcher.answer_changed(answer)
            continue
        except (RequestError, EngineError) as error:
            if functions and "tool" in error.message.lower():
                raise RequestError(error.message, NO_TOOLS) from error
            raise
        if offer is None or not finished.calls or finished.reason in NOTED_REASONS:
            return finished
        answer.clock.stop()
        offer.fit(finished.stats.context_size)
        if not await answers.tools.run(session, message, finished.calls, offer, show):
            return Finished("tool_limit", finished.stats)


async def _receive(client: Client, request: ChatRequest, answer: Answer, watcher: AnswerWatcher) -> Finished:
    """Receive one part of an answer, to its end or to calls."""

    def show(activity: str) -> None:
        if answer.preparing != activity:
            answer.preparing = activity
            watcher.answer_progressed(answer, answer.activity, None)

    following = asyncio.create_task(follow_prompt(client, request, show)) if client.is_edgelm else None
    try:
        async for item in client.chat(request):
            if following is not None:
                following.cancel()
            if isinstance(item, Finished):
                answer.preparing = ""
                return item
            show(f"calling {item.calling}" if item.calling else "")
            if not item.calling:
                _append(answer, item, watcher)
    finally:
        if following is not None:
            following.cancel()
    raise AssertionError("an answer ends with Finished or an error")


def _append(answer: Answer, delta: Delta, watcher: AnswerWatcher) -> None:
    first, activity = answer.first_token is None, answer.activity
    if first:
        answer.first_token = time.monotonic()
    answer.clock.take(delta.reasoning, delta.text)
    if first or answer.activity != activity:
        watcher.answer_progressed(answer, answer.activity, None)
    answer.num_tokens += delta.tokens
    answer.num_thoughts += delta.tokens if delta.reasoning else 0
    if delta.drafted:
        answer.drafted.add(delta.drafted, len(answer.message.text))
    answer.session.append(answer.message, delta.text, delta.reasoning)
    watcher.answer_changed(answer)


async def _report_progress(link: Link, answer: Answer, watcher: AnswerWatcher) -> None:
    """Report what the answer waits for until its first token, then its speed."""
    while True:
        if answer.first_token is not None:
            await link.learn_gpu(answer.message.model)
            speed = None if answer.preparing or answer.message.calls else answer.tokens_per_second
            stats = AnswerStats(tokens_per_second=speed)
            watcher.answer_progressed(answer, answer.activity, stats)
            if answer.clock.running and not answer.preparing:  # its time goes on where no text comes
                watcher.answer_changed(answer)
        else:
            status, waited_s = answer.preparing or "waiting", time.monotonic() - answer.started
            if (client := link.connected) is None:
                status = "connecting"
            elif not answer.preparing:
                with suppress(EdgeLMError):
                    if (loading := await client.loading(answer.message.model)) is not None:
                        share = f" {100 * loading.progress:.0f} %" if loading.progress is not None else ""
                        status = loading.doing or f"loading the model{share}"
            if answer.first_token is None:  # it may have come during the request
                seconds = f", {waited_s:.0f} s" if waited_s >= 2 and not answer.preparing else ""
                answer.status = f"{status}{seconds}"
                watcher.answer_progressed(answer, status, None)
                watcher.answer_changed(answer)
        await asyncio.sleep(POLL_S)
