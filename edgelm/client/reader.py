"""Reading before an answer: the passages of the chat's knowledge that fit a question.

Owns the thread of the index, who is asked before passages leave the machine, and what is read again for each answer:
files that changed, and the passages. Knows nothing of widgets.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from textual import log

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.base.passages import Passage
from edgelm.chats.history import Message
from edgelm.chats.knowledge import GUIDE
from edgelm.chats.knowledge.quote import share_of_context
from edgelm.chats.reading import Reading
from edgelm.client.endpoint import Client, ModelEntry
from edgelm.client.failures import UnreachableError
from edgelm.client.link import Link
from edgelm.client.session import HISTORY, Session
from edgelm.library.names import STARTER
from edgelm.library.suggestion import suggested_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgelm.chats.knowledge.index import Knowledge, Refreshed

DEFAULT_CONTEXT = 4096  # tokens, where the endpoint does not tell
TICK_S = 0.5  # between two reports of progress
CLOSE_S = 1.0

T = TypeVar("T")
Show = Callable[[str], None]


class KnowledgeThread:
    """The thread that owns the index of all chats: indexing a folder takes seconds, and the screen never waits for it.

    It is a daemon: an indexing that is not complete does not keep the process alive.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._work: SimpleQueue[tuple[Callable[[Knowledge], Any], Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[[Knowledge], T], show: Show, activity: str) -> T:
        """Do work with the index; `show` is called with the activity and the time that it takes. Raises EdgeLMError."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="knowledge", daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._work.put((work, future))
        waiting = asyncio.wrap_future(future)
        seconds = 0.0
        try:
            while not waiting.done():
                show(f"{activity}, {seconds:.0f} s" if seconds >= 2 else activity)
                await asyncio.wait((waiting,), timeout=TICK_S)
                seconds += TICK_S
            return waiting.result()
        finally:
            waiting.cancel()

    def close(self) -> None:
        """Close the index, unless it is being written."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(CLOSE_S)

    def _loop(self) -> None:
        from edgelm.chats.knowledge.index import Knowledge  # here: the chat starts without SQLite's search

        knowledge: Knowledge | None = None
        while (item := self._work.get()) is not None:
            work, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                knowledge = knowledge or Knowledge(self._file)
                result = work(knowledge)
            except BaseException as error:  # noqa: BLE001 - `run` raises it
                future.set_exception(error)
            else:
                future.set_result(result)
        if knowledge is not None:
            knowledge.close()


@dataclass
class EndpointEmbed:
    """The vectors of an embedding model of the endpoint, for the thread of the index. Raises EdgeLMError."""

    client: Client
    model: str
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _stopped: bool = False
    _request: Future[list[list[float]]] | None = None

    def __call__(self, texts: Sequence[str], /) -> NDArray[np.float32]:
        import numpy as np

        self._request = asyncio.run_coroutine_threadsafe(self.client.embed(self.model, texts), self._loop)
        if self._stopped:  # perhaps just now, before there was a request to cancel
            self._request.cancel()
        try:
            vectors = self._request.result()
        except CancelledError:
            raise EdgeLMError("the answer was stopped") from None
        array: NDArray[np.float32] = np.asarray(vectors, np.float32)  # [texts, width]
        array /= np.maximum(np.linalg.norm(array, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return array

    def stop(self) -> None:
        """End the request: its vectors are no longer needed, and others wait for the thread of the index."""
        self._stopped = True
        if self._request is not None:
            self._request.cancel()


@dataclass(frozen=True, slots=True)
class SendQuestion:
    """What the user is asked before something goes to an endpoint that is not on this machine.

    It is passages of files, or the messages of a chat that was not written there.
    """

    title: str  # of the chat, which need not be on the screen
    host: str
    roots: tuple[str, ...] = ()
    passages: tuple[Passage, ...] = ()  # for this question
    num_messages: int = 0


class Reader:
    """Finds the passages for questions. `ask` returns whether they, or a chat, may be sent."""

    def __init__(self, file: Path, link: Link, ask: Callable[[SendQuestion], Awaitable[bool]]) -> None:
        self.thread = KnowledgeThread(file)
        self._link = link
        self._ask = ask

    async def require_consent(self, session: Session, model: str) -> None:
        """Ask once whether a chat that was written elsewhere may be sent to where a model runs. Raises RequestError."""
        if not (endpoint := await self._link.destination(model)):
            return
        key = f"{HISTORY} {endpoint}"
        if session.chat.consents.get(key):
            return
        question = SendQuestion(session.chat.title, host_of(endpoint), num_messages=len(session.tree.messages))
        if session.was_saved and not await self._ask(question):
            raise RequestError(f"this chat is not sent to {question.host}", "/new begins one there")
        session.set_consent(key, True)

    async def read(self, session: Session, question: Message, client: Client, model: str, show: Show) -> None:
        """Read what fits a question, before each answer to it; it is kept with the question. A question is sent
        without passages where they cannot be read. Raises UnreachableError.
        """
        roots = guide_roots(question) or session.chat.knowledge
        reading: Reading | None = None
        for_starter = model == STARTER and set(roots) <= {GUIDE} and await self._link.is_own()
        if roots or for_starter:
            try:
                if for_starter:
                    reading = await self._find_for_starter(question.text, roots, client, show)
                else:
                    reading = await self._find(session, question.text, roots, client, model, show)
            except UnreachableError:
                raise  # the caller connects again
            except EdgeLMError as error:
                reading = Reading(roots, note=str(error))
        session.set_reading(question, reading)

    async def _find(
        self, session: Session, text: str, roots: tuple[str, ...], client: Client, model: str, show: Show
    ) -> Reading:
        remote = "" if set(roots) <= {GUIDE} else await self._link.destination(model)
        may_send = session.chat.consents.get(remote) if remote else True
        if may_send is False:
            return Reading(roots, note=refusal(remote))
        activity = f"reading {names_of(roots)}"
        await self.thread.run(lambda knowledge: knowledge.refresh(roots), show, activity)
        models = await self._link.models()
        max_chars = share_of_context(await _context(client, model, models))

        async def search(embed: EndpointEmbed | None) -> tuple[Passage, ...]:
            passages = await self.thread.run(
                lambda knowledge: knowledge.search(roots, text, max_chars=max_chars, embed=embed), show, activity
            )
            return tuple(map(_encodable, passages))

        passages = await search(None) if may_send is None else ()
        if passages:
            may_send = await self._ask(SendQuestion(session.chat.title, host_of(remote), roots, passages))
            session.set_consent(remote, may_send)
            if not may_send:
                return Reading(roots, note=refusal(remote))
        if may_send:
            passages = await self._search_with_vectors(search, client) or await search(None)
        return Reading(roots, passages, "" if passages else "no passage fits the question")

    async def _find_for_starter(self, text: str, roots: tuple[str, ...], client: Client, show: Show) -> Reading:
        """Read the guide for a question to the starter, also where the user did not ask for that."""
        context = await _context(client, STARTER, await self._link.models())
        larger = await asyncio.to_thread(suggested_model)

        def find(knowledge: Knowledge) -> list[Passage]:
            from edgelm.chats.knowledge.starter import starter_passages

            return starter_passages(knowledge, text, larger, context)

        return Reading(roots, tuple(await self.thread.run(find, show, "reading the guide")))

    async def _search_with_vectors(
        self, search: Callable[[EndpointEmbed | None], Awaitable[tuple[Passage, ...]]], client: Client
    ) -> tuple[Passage, ...]:
        """Search with the vectors of a loaded embedding model; return nothing without one or where it fails."""
        with suppress(EdgeLMError):
            models = await self._link.models(again=True)  # the list says which are loaded now
            model = next((model.id for model in models if model.kind == "embedding" and model.loaded), None)
            if model is not None:
                embed = EndpointEmbed(client, model)
                try:
                    return await search(embed)
                except EdgeLMError as error:
                    log.warning(f"knowledge is searched without {model}: {error}")
                finally:
                    embed.stop()
        return ()

    def choices(self, question: Message, model: str) -> tuple[str, ...]:
        """Return all answers that a model may give to a question; empty: any. The starter quotes what it has read."""
        reading = question.reading
        if model != STARTER or reading is None or not reading.passages or not set(reading.roots) <= {GUIDE}:
            return ()
        from edgelm.chats.knowledge.starter import starter_answers

        return tuple(starter_answers(reading.passages, question.text))

    def drop_half(self, session: Session, question: Message) -> bool:
        """Drop the worse half of the passages, for which the context has no room; return whether there were any."""
        reading = question.reading
        if reading is None or not reading.passages:
            return False
        kept = reading.passages[: len(reading.passages) // 2]
        session.set_reading(question, replace(reading, passages=kept, note="" if kept else "the context has no room"))
        return True


def guide_roots(question: Message) -> tuple[str, ...]:
    """Return the guide as the roots of a question that was asked with /help; none for another."""
    return (GUIDE,) if question.reading is not None and question.reading.roots == (GUIDE,) else ()


def names_of(roots: Sequence[str]) -> str:
    """Return the short name of one root, or the number of several."""
    if len(roots) != 1:
        return f"{len(roots)} files and folders"
    return "the guide" if roots[0] == GUIDE else Path(roots[0]).name or roots[0]


def size_words(refreshed: Refreshed) -> str:
    """Return the number of files and passages."""
    files = "1 file" if refreshed.num_files == 1 else f"{refreshed.num_files:,} files"
    passages = "1 passage" if refreshed.num_passages == 1 else f"{refreshed.num_passages:,} passages"
    return f"{files}, {passages}"


def host_of(address: str) -> str:
    """Return the host and port of an address."""
    return urlsplit(address).netloc.rpartition("@")[2] or address


def refusal(address: str) -> str:
    """Return why a question went without passages."""
    return f"you said that nothing goes to {host_of(address)}; /know PATH asks again"


async def _context(client: Client, model: str, models: Sequence[ModelEntry]) -> int:
    """Return the context size of a model: of its engine if it is loaded, else the largest that it can have."""
    served = await client.context(model)
    listed = next((entry.context for entry in models if entry.id == model), None)
    return served or listed or DEFAULT_CONTEXT


def _encodable(passage: Passage) -> Passage:
    """Return a passage whose file name, which may hold any bytes, can be sent as UTF-8."""
    texts = (passage.source, passage.heading, passage.text)
    return Passage(*(text.encode("utf-8", "replace").decode() for text in texts))
