"""The chat that `edgelm run --continue` goes on with: what was said before, and the new question and answer in it.

Owns when these are saved: nothing before the model has begun, so that a model that cannot be loaded leaves no question
behind. Knows nothing of the output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from edgelm.base.config import SETTINGS, Config, Settings
from edgelm.base.errors import EdgeLMError, ModelError, RequestError
from edgelm.base.passages import Passage
from edgelm.base.workers.messages import EFFORTS, Said, Text, Thinking, Thought
from edgelm.chats.attachments import Attachment
from edgelm.chats.handles import find_chat, handle
from edgelm.chats.history import Chat, Message, State
from edgelm.chats.knowledge import GUIDE
from edgelm.chats.reading import Reading
from edgelm.chats.store import ChatsError, Store
from edgelm.chats.store_thread import StoreThread, Write
from edgelm.client.answer_stream import AnswerStats
from edgelm.client.session import Session
from edgelm.commands.running import model_or_served
from edgelm.library.names import shown
from edgelm.library.scan import LocalModel

SAVE_S = 10.0  # for the last writes, where another program has locked the file
LOOK_S = 0.1  # between two looks at problems of the file
NOTED_REASONS = ("length", "context")


class _HeldWrites:
    """Writes that wait until the model has begun."""

    def __init__(self, thread: StoreThread) -> None:
        self._thread = thread
        self._held: list[Write] | None = []

    def write(self, *writes: Write) -> None:
        """Keep writes, or queue them once the model has begun."""
        if self._held is None:
            self._thread.write(*writes)
        else:
            self._held += writes

    def append(self, message_id: int, text: str, reasoning: str) -> None:
        """Keep streamed text, or queue it once the model has begun."""
        if self._held is None:
            self._thread.append(message_id, text, reasoning)
        else:
            self._held.append(lambda store: store.append(message_id, text, reasoning))

    def release(self) -> None:
        """Queue what was kept."""
        held, self._held = self._held, None
        if held:
            self._thread.write(*held)


@contextmanager
def open_saved_chat(config: Config, name: str | None) -> Iterator[SavedChat]:
    """Open the chat that a name means, or a new one, and save what has come at the end, however the block ends."""
    chat = SavedChat(config, name)
    try:
        yield chat
    except BaseException as error:
        try:
            chat.close(error)
        except EdgeLMError as lost:
            print(f"note: {lost}", file=sys.stderr)
        raise
    chat.close()


class SavedChat:
    """A chat of the history, or a new one, that a question and its answer are added to."""

    def __init__(self, config: Config, name: str | None) -> None:
        """Open the chat that a name means; None: a new one. Raises EdgeLMError."""
        self._problem: ChatsError | None = None
        self._thread = StoreThread(config.places.data / "chats.db", self._report)
        self._writes = _HeldWrites(self._thread)
        try:
            chats = self._saved_chats()
            if self._thread.in_memory and self._problem is not None:
                raise self._problem
            chat = Chat() if name is None else find_chat(name, chats)
            messages = self._thread.read(lambda store: store.messages(chat.id)).result()
            self._last_model = self._thread.read(Store.settings).result().get("model", "")
        except BaseException:
            self._thread.close(0)
            raise
        self.session = Session(self._writes, chat, messages)
        self._answer: Message | None = None

    def _saved_chats(self) -> list[Chat]:
        """Wait for the chats where the file is locked. Raises ChatsError where the disk is full."""
        reading = self._thread.read(Store.chats)
        while True:
            try:
                return reading.result(LOOK_S)
            except TimeoutError:
                problem = self._thread.problem
                if problem is not None and problem.is_full and not self._thread.is_open:
                    raise problem from None

    @property
    def handle(self) -> str:
        """Return the name of the chat on the command line."""
        return handle(self.session.chat.id)

    def choose_model(self, config: Config) -> LocalModel:
        """Return the chat's model, or the one of its last answer, or the last chat's. Raises EdgeLMError."""
        answers = [message.model for message in reversed(self.session.tree.path()) if message.role == "assistant"]
        names = dict.fromkeys(filter(None, [self.session.chat.model, *answers[:1], self._last_model]))
        missing = ""
        for name in names:
            try:
                local = model_or_served(name, config)
            except ModelError:
                missing = missing or name
                continue
            if missing:
                print(f"note: {missing} is not on this machine: {local.name} answers", file=sys.stderr)
            return local
        reason = f"the chat's model {missing} is not on this machine" if missing else "the chat has no model"
        raise RequestError(reason, "name one: edgelm run -c MODEL PROMPT")

    def settings(self, settings: Settings, flags: Mapping[str, object]) -> Settings:
        """Return settings with the chat's own sampling; flags win."""
        own: dict[str, Any] = {}
        for name, value in self.session.chat.sampling.items():
            setting = SETTINGS.get(name)
            if setting is not None and setting.sampling and flags.get(name) is None:
                try:
                    own[name] = setting.parse(value)
                except ValueError:
                    continue  # of an imported chat, or of another version
        return replace(settings, **own)

    def thinking(self, think: Thinking) -> Thinking:
        """Return how long to reason: the chat's choice where the flag says nothing."""
        return EFFORTS.get(self.session.chat.sampling.get("reasoning_effort"), "auto") if think == "auto" else think

    @property
    def knowledge(self) -> tuple[str, ...]:
        """Return the files and folders that the chat searches."""
        return tuple(root for root in self.session.chat.knowledge if root != GUIDE)

    def ask(
        self,
        text: str,
        local: LocalModel,
        roots: tuple[str, ...],
        passages: tuple[Passage, ...] | None,
        pictures: tuple[Attachment, ...] = (),
        *,
        sees: bool,
    ) -> tuple[tuple[Said, ...], str, tuple[str, ...]]:
        """Add a question; return what is sent before it, and its text and pictures for the model.

        They begin with those of earlier questions that have no answer. `passages` were found in `roots` for it. A model
        that does not see gets the names of earlier pictures.
        """
        session = self.session
        model = str(local.path) if local.place == "given" else local.name  # as the chat on the screen names it
        if not session.tree.messages:
            session.chat.model = model
        question = session.add_question(text, session.tree.leaf, attachments=pictures)
        self._answer = session.begin_answer(question.id, model)
        earlier = [file.name for said in session.tree.path()[:-2] for file in said.attachments if file.kind == "image"]
        if earlier and not sees:
            names = ", ".join(dict.fromkeys(map(shown, earlier)))
            print(f"note: left out for {local.name}, which reads no pictures: {names}", file=sys.stderr)
        _, turns = session.turns(self._answer, pictures=sees)
        if passages is not None:
            session.set_reading(question, Reading(roots, passages))
        before: list[Said] = []
        for turn in turns[:-1]:
            if turn.role == "tool" or not (turn.text.strip() or turn.images):
                continue  # there are no tools here
            if before and before[-1].role == turn.role == "assistant":
                before[-1] = replace(before[-1], text=f"{before[-1].text}\n\n{turn.text}")
            else:
                before.append(Said(turn.role, turn.text, turn.reasoning, turn.images))
        return tuple(before), turns[-1].text, turns[-1].images

    def append(self, piece: Text | Thought) -> None:
        """Add to the answer, and save what has come so far."""
        assert self._answer is not None
        self._writes.release()
        text, reasoning = (piece.text, "") if isinstance(piece, Text) else ("", piece.text)
        self.session.append(self._answer, text, reasoning)

    def finish(self, document: Mapping[str, Any]) -> None:
        """End the answer with the document of the job."""
        usage, timings, drafts = document["usage"], document["timings"], document["speculation"]
        stats = AnswerStats(
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["cached_tokens"],
            completion_tokens=usage["completion_tokens"],
            first_token_ms=timings["first_token_ms"],
            tokens_per_second=timings["decode_tokens_per_second"],
            drafted=drafts["drafted"],
            accepted=drafts["accepted"],
        )
        reason = document["finish_reason"]
        self._end("done", reason if reason in NOTED_REASONS else "", stats)

    def close(self, error: BaseException | None = None) -> None:
        """Save what has come; `error` is why the answer ended before its end. Raises EdgeLMError if it is lost."""
        if self._answer is not None and self._answer.state == "streaming" and self._has_begun:
            failed = isinstance(error, EdgeLMError)
            self._end("failed" if failed else "stopped", str(error) if failed else "")
        if num_lost := self._thread.close(SAVE_S):
            reason = str(self._problem) if self._problem else "the disk is too slow"
            raise EdgeLMError(f"{num_lost:,} changes of the chat are not saved: {reason}")

    @property
    def _has_begun(self) -> bool:
        return self._answer is not None and bool(self._answer.text or self._answer.reasoning)

    def _end(self, state: State, note: str = "", stats: AnswerStats | None = None) -> None:
        assert self._answer is not None
        self._writes.release()
        self.session.finish(self._answer, state, note, stats)

    def _report(self, problem: ChatsError | None) -> None:
        self._problem = problem
