"""The state behind the chat screen: the open chat, the list of chats, the answers being written, and the model.

Owns which chat is open and which model answers it. Knows nothing of widgets: the caller that changes this
state tells the screen to show it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.chats.attachments import Attachment
from edgelm.chats.history import Chat, Hit, Message
from edgelm.chats.preset_file import set_folder
from edgelm.chats.presets import Preset, Presets, apply_preset
from edgelm.chats.statistics import Statistics, summarize
from edgelm.chats.store import ChatsError, Store
from edgelm.chats.store_thread import StoreThread
from edgelm.client.link import Link
from edgelm.client.reader import guide_roots
from edgelm.client.session import Session
from edgelm.library.names import STARTER
from edgelm.tui.answers import Answer, Answers, offered_model
from edgelm.tui.commands.table import as_typed
from edgelm.tui.lines import short_name
from edgelm.tui.model_names import find_model, is_path
from edgelm.tui.tags import split_query
from edgelm.tui.transcript.drafted import Spans
from edgelm.tui.transcript.passages import one_line

NUM_SENT = 500  # earlier messages for the Up key
NUM_HITS = (100, 400, 1600)  # limits of a search; the next one is tried where a tag leaves fewer than ENOUGH_HITS
ENOUGH_HITS = 30
MAX_RECENT = 5  # paths of models
COMPARED = ("title", "system", "model", "sampling", "knowledge", "preset", "tools", "deleted")  # with a chat as saved

T = TypeVar("T")


@dataclass(frozen=True)
class ChatDefaults:
    """The model, the sampling and the presets that the command line and the settings name.

    `preset` is the one that new chats begin with, without what flags say. `resolve` returns the endpoint's name of a
    model, and may read the disk and raise EdgeLMError.
    """

    model: str = ""
    sampling: Mapping[str, float | int | str] = field(default_factory=dict)
    presets: Presets = field(default_factory=Presets)
    preset: Preset | None = None
    is_preset_given: bool = False  # by a flag; else it is the folder's
    resolve: Callable[[str], str] = str
    note: str = ""  # for the user, at the start


class LastRun(NamedTuple):
    """The state of earlier runs that the chat screen restores."""

    sent: list[str]  # messages of the user as they are typed, oldest first
    settings: dict[str, str]
    unsent: str  # what was written and not sent


class Workspace:
    """The chats of this process."""

    def __init__(self, store: StoreThread, link: Link, defaults: ChatDefaults, answers: Answers) -> None:
        self.store = store
        self.link = link
        self.defaults = defaults
        self.answers = answers
        self.preset = defaults.preset  # that new chats begin with
        self.session = Session(store, self._first_chat(), [])
        self.chats: dict[int, Chat] = {}
        self.answer_started: Callable[[], None] = lambda: None  # called before each answer
        self.deleted: list[int] = []  # chats that were deleted in this run and can be brought back, the last one last
        self.drafted: dict[int, Spans] = {}  # by message, of the answers since the start
        self.asked_pages: set[str] = set()  # addresses that were offered to be fetched
        self.offers_pages = True
        self._last_model = ""
        self._has_set_model = False
        self._compared: tuple[Session, int] | None = None  # with the saved chat, at a version of the file
        self._outdated: Session | None = None  # another window has changed its chat

    # Saved state

    async def read(self, read: Callable[[Store], T]) -> T:
        """Read from the store. Raises ChatsError, also where its file could not be opened yet."""
        if self.store.problem is not None and not self.store.is_open:
            raise self.store.problem
        return await asyncio.wrap_future(self.store.read(read))

    def remember(self, name: str, value: str) -> None:
        """Save a setting for the next run."""
        self.store.write(lambda store: store.put_setting(name, value))

    def remember_unsent(self, text: str) -> None:
        """Save what is not sent for the next run."""
        self.store.write(lambda store: store.put_unsent(text))

    async def load(self) -> LastRun:
        """Load the list of chats and return the rest of the last run's state; empty the trash of what is old.

        It waits until the file can be opened. Raises ChatsError.
        """
        self.store.write(Store.empty_trash)
        chats, sent, settings = await asyncio.wrap_future(
            self.store.read(lambda store: (store.chats(), store.prompts(NUM_SENT), store.settings()))
        )
        self.chats = {chat.id: chat for chat in chats} | self.chats
        if not self._has_set_model:  # it may be an offered one by now, chosen while the file was locked
            self._last_model = settings.get("model", "") or self._last_model
        return LastRun([as_typed(text) for text in sent], settings, await self._adopt_unsent())

    async def _adopt_unsent(self) -> str:
        def adopt(store: Store) -> str:
            with store.transaction():
                return store.adopt_unsent()

        try:
            return await self.read(adopt)
        except ChatsError as error:
            if not error.temporary:
                raise
        self.store.write(lambda store: store.adopt_unsent())  # as soon as the file can be written
        return await self.read(lambda store: store.unsent())

    # The open chat

    async def open_chat(self, chat_id: int, message_id: int | None = None) -> bool:
        """Open a chat, on the branch of a message if one is given; return False if it is gone. Raises ChatsError."""
        answer = self.answers.of_chat(chat_id)
        if answer is not None:
            self.session = answer.session
        else:
            chat = await self.read(lambda store: store.chat(chat_id)) or self.chats.get(chat_id)
            messages = await self.read(lambda store: store.messages(chat_id))
            if chat is None:
                return False
            chat.deleted = None  # another window deleted it: to write in it brings it back
            self.session = Session(self.store, chat, messages)
            if not chat.model:  # of a version that did not keep it
                turns = pairwise(self.session.tree.path())
                models = [
                    answer.model for asked, answer in turns if answer.role == "assistant" and not guide_roots(asked)
                ]
                chat.model = next(filter(None, reversed(models)), "")
            self.chats[chat_id] = chat
        if message_id is not None:
            self.session.show(message_id)
        return True

    async def adopt(self, session: Session) -> str:
        """Add what another window has written in a chat since; return a line about it. Raises ChatsError."""
        known, chat_id = len(session.tree.messages), session.chat.id
        messages = await self.read(lambda store: store.messages(chat_id) if store.num_messages(chat_id) > known else [])
        self._outdated = None
        if not session.tree.adopt(messages):
            return ""
        return "another window has written in this chat: your message is a version beside it, and both are kept"

    @property
    def is_outdated(self) -> bool:
        """Tell whether another window has changed the open chat, as far as `look_elsewhere` has seen."""
        return self._outdated is self.session

    async def look_elsewhere(self) -> None:
        """Compare the open chat with the saved one, if another program has written since. Raises ChatsError."""
        session, before = self.session, replace(self.session.chat)
        if self.answer is not None or self.store.problem is not None or not session.tree.messages:
            return
        version = await self.read(Store.version)
        if self._compared == (session, version):
            return
        chat, count = await self.read(lambda store: (store.chat(before.id), store.num_messages(before.id)))
        if chat is None or session is not self.session or session.chat != before or self.answer is not None:
            return  # it is compared again at the next look
        self._compared = session, version
        chat.model = chat.model or before.model  # of a version that did not keep it
        is_longer = count > len(session.tree.messages) or chat.changed > before.changed
        if is_longer or any(getattr(chat, name) != getattr(before, name) for name in COMPARED):
            self._outdated = session

    def new_chat(self) -> None:
        """Open an empty chat with the model, sampling and preset of the one before, or the preset for new chats."""
        before = self.session.chat
        chat = Chat(model=before.model, sampling=before.sampling)
        old = self.defaults.presets.by_name.get(before.preset)
        if self.preset is not None:
            apply_preset(chat, self.preset, old)
        elif old is not None:
            apply_preset(chat, old.without(("model",)))  # its model is the chat's own, by the endpoint's name
        self.session = Session(self.store, chat, [])

    def _first_chat(self) -> Chat:
        chat = Chat()
        if self.preset is not None:
            apply_preset(chat, self.preset)
        return chat

    # Presets

    @property
    def presets(self) -> Presets:
        return self.defaults.presets

    async def choose_preset(self, preset: Preset | None) -> EdgeLMError | None:
        """Put a preset into the open chat; None takes away the chat's own. Return why its model cannot be used."""
        session, problem = self.session, None
        if preset is not None and preset.model:
            try:
                preset = replace(preset, model=await self.offered(preset.model))
            except EdgeLMError as error:
                preset, problem = replace(preset, model=""), error
        apply_preset(session.chat, preset, self.presets.by_name.get(session.chat.preset))
        session.save()
        return problem

    def set_folder_preset(self, folder: Path, name: str) -> str:
        """Let new chats in a folder begin with a preset, by its name; empty: with none. Return what is so now.

        It writes the user's settings. Raises EdgeLMError.
        """
        preset = self.presets.find(name) if name else None
        set_folder(self.presets, folder, name)
        if not self.defaults.is_preset_given:
            self.preset = preset or self.presets.of_folder(folder)
        if preset is None and self.preset is not None and not self.defaults.is_preset_given:
            return f"a folder above has the preset {self.preset.name}: new chats begin with it"
        return (
            f"new chats in {folder} begin with the preset {name}" if name else f"new chats in {folder} have no preset"
        )

    async def offered(self, model: str) -> str:
        """Return the endpoint's name of a model. Raises EdgeLMError if it has none."""
        models = await self.link.models(again=True)
        if any(model == entry.id for entry in models):
            return model
        if self.link.remote is not None:
            client = await self.link.client()
            if is_path(model) and not client.is_edgelm:
                raise RequestError("this endpoint takes no path of a model", "/model shows what it offers")
            if await client.knows(model):
                return model
            if is_path(model):
                raise RequestError(
                    f"{self.link.remote} offers no model at {model}",
                    "a path is one of that machine; /model shows what it offers",
                )
        resolved = await asyncio.to_thread(self.defaults.resolve, model)
        return resolved if is_path(resolved) else find_model(models, resolved, can_pull=self.link.remote is None)

    # The list of chats

    async def search(self, text: str) -> list[Hit]:
        """Return the chats that a search finds: `#TAG` chooses among the newest with the words. Raises ChatsError."""
        query = split_query(text)
        if not query.words:
            chats = sorted(
                filter(query.fits, self.chats.values()), key=lambda chat: (chat.changed, chat.id), reverse=True
            )
            return [Hit(chat, None, "") for chat in chats]
        for limit in NUM_HITS:
            hits = await self.read(partial(Store.search, query=query.words, limit=limit))
            fitting = [hit for hit in hits if query.fits(hit.chat)]
            if not query.tags or len(hits) < limit or len(fitting) >= ENOUGH_HITS:
                break
        return fitting

    async def statistics(self) -> Statistics:
        """Return the statistics of all chats; the sums are made on a thread. Raises ChatsError."""
        rows = await self.read(Store.figures)
        today = datetime.now().astimezone().date()
        return await asyncio.to_thread(summarize, rows, today)

    def change_chat(self, chat_id: int, **changes: Any) -> None:
        """Change fields of a chat, also of one that is not open. Other fields stay as another window wrote them."""
        if (chat := self.chats.get(chat_id)) is not None:
            for name, value in changes.items():
                setattr(chat, name, value)

        def write(store: Store) -> None:
            if (saved := store.chat(chat_id)) is not None:
                store.put_chat(replace(saved, **changes))

        self.store.write(write)

    async def delete_chat(self, chat_id: int) -> None:
        """Stop the answer of a chat and put the chat into the trash."""
        await self.answers.end(chat_id)
        self.change_chat(chat_id, deleted=time.time())
        self.store.write(Store.empty_trash)
        self.chats.pop(chat_id, None)
        self.deleted.append(chat_id)

    async def trash(self) -> list[Chat]:
        """Return the chats in the trash; remove those that are too old. Raises ChatsError."""
        self.store.write(Store.empty_trash)
        return await self.read(Store.deleted_chats)

    async def restore_chat(self, chat_id: int) -> bool:
        """Take a chat out of the trash and open it; return False if it is gone. Raises EdgeLMError."""
        chat = await self.read(lambda store: store.chat(chat_id))
        self.deleted = [deleted for deleted in self.deleted if deleted != chat_id]
        if chat is not None and chat.deleted is None:
            raise RequestError(f"{one_line(chat.title)} is not in the trash any more", "/trash lists what is")
        self.change_chat(chat_id, deleted=None)
        return await self.open_chat(chat_id)

    # Models

    @property
    def named_model(self) -> str:
        """Return the model of the open chat, or that of the command line; no other may answer. Empty: none is named."""
        return self.session.chat.model or self.defaults.model

    @property
    def model(self) -> str:
        """Return the model for the open chat; empty while none is known."""
        return self.named_model or self._last_model

    @property
    def recent_paths(self) -> list[str]:
        """Return the models outside of the library that chats were answered by, the newest chat's first."""
        chats = sorted(self.chats.values(), key=lambda chat: chat.changed, reverse=True)
        return list(dict.fromkeys(chat.model for chat in chats if is_path(chat.model)))[:MAX_RECENT]

    def set_model(self, model: str) -> None:
        """Answer this chat, and new ones, with a model."""
        self.session.set_model(model)
        self._last_model, self._has_set_model = model, True
        self.remember("model", model)

    async def choose_default(self) -> str:
        """Answer chats without a model of their own with an offered one; return a line if it is not the last run's.

        Raises RequestError if there is none, or not the named one.
        """
        last = "" if self.defaults.model else self._last_model
        self._last_model = await offered_model(self.link, await self.link.client(), (self.defaults.model, last))
        if not last or self._last_model == last:
            return ""
        return f"{short_name(last)} is not offered here: {short_name(self._last_model)} answers new chats"

    # Answers

    @property
    def answer(self) -> Answer | None:
        """Return the answer that is being written in the open chat."""
        return self.answers.of_chat(self.session.chat.id)

    def require_open(self, session: Session) -> None:
        """Raise RequestError where what comes now is for another chat than the open one."""
        if session.chat.id != self.session.chat.id:
            raise RequestError("another chat was opened meanwhile: nothing is put into it", "ask for it again")

    def require_no_answer(self, session: Session | None = None) -> None:
        """Raise RequestError while an answer is written in a chat, or in the open one."""
        if self.answers.of_chat((session or self.session).chat.id) is not None:
            raise RequestError("an answer is being written", "Esc stops it")

    def send(
        self,
        text: str,
        edited: int | None = None,
        roots: tuple[str, ...] = (),
        attachments: tuple[Attachment, ...] = (),
    ) -> None:
        """Send a message at the end of the branch, or as a new version of an edited one; `roots` are searched for it
        instead of the chat's knowledge. Raises RequestError.
        """
        self.require_no_answer()
        session = self.session
        parent = session.tree.leaf
        if edited is not None:
            before = session.tree.messages[edited]
            parent, roots = before.parent, roots or guide_roots(before)
        self.chats[session.chat.id] = session.chat
        self.begin_answer(session.add_question(text, parent, roots, attachments).id)

    def begin_answer(self, parent: int, sent_from: int | None = None) -> None:
        """Answer a message; `sent_from` shortens the conversation from here on.

        A question asked with /help is answered by the starter, which quotes the guide, whatever the chat's model is.
        """
        asks_starter = (
            STARTER in self.link.listed
            and self.link.remote is None
            and bool(guide_roots(self.session.tree.messages[parent]))
        )
        named, model = (STARTER, STARTER) if asks_starter else (self.named_model, self.model)
        self._start(self.session.begin_answer(parent, model, sent_from), named, {})

    def go_on(self, answer: Message, begun: str) -> None:
        """Write another version of an answer, which begins with `begun`."""
        assert answer.parent is not None, "an answer has a question"
        message = self.session.begin_answer(answer.parent, answer.model, text=begun, reasoning=answer.reasoning)
        self._start(message, answer.model, {})

    def compare(self, answer: Message, model: str, sampling: Mapping[str, float | int | str]) -> Answer:
        """Write another version of an answer, with a model and with values that replace the chat's; return it."""
        assert answer.parent is not None, "an answer has a question"
        return self._start(self.session.begin_answer(answer.parent, model), model, sampling)

    def _start(self, message: Message, named: str, sampling: Mapping[str, float | int | str]) -> Answer:
        self.answer_started()
        answer = Answer(self.session, message, {**self.defaults.sampling, **self.session.chat.sampling, **sampling})
        self.drafted[message.id] = answer.drafted
        self.answers.start(answer, named, self._last_model)
        return answer
