"""The chat that is open: what of it is shown, and how another one is opened.

Owns the session, the list of chats, the answers being written, and what is kept between two starts. Knows nothing of
typing, commands and keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rich.text import Text
from textual import work
from textual.timer import Timer
from textual.widgets import Static

from edgelm.chats.keeper import Keeper
from edgelm.chats.model import Chat, Message, split_sent
from edgelm.chats.store import ChatsError, Store
from edgelm.client.endpoint import AnswerStats, stats_from_json
from edgelm.errors import RequestError
from edgelm.tui import collector
from edgelm.tui.answering import Answer, Watcher
from edgelm.tui.answers import Answers
from edgelm.tui.layout import ChatLayout
from edgelm.tui.lines import clean
from edgelm.tui.link import Link
from edgelm.tui.session import Session
from edgelm.tui.spans import Spans
from edgelm.tui.views import MessageView

HISTORY_LEN = 500
REST_S = 1.0  # after the last answer
DRAFT_S = 0.5  # between two saves of what is being written

T = TypeVar("T")


@dataclass(frozen=True)
class Wishes:
    """What the command line and the settings ask for."""

    model: str = ""
    options: dict[str, float | int] | None = None  # sampling that the user has set


class OpenChat(ChatLayout):
    """The layout with a chat in it."""

    def __init__(self, keeper: Keeper, link: Link, wishes: Wishes) -> None:
        super().__init__()
        self.keeper = keeper
        self.link = link
        self.wishes = wishes
        self.session = Session(keeper, Chat(), [])
        self.chats: dict[int, Chat] = {}
        self.last_model = ""
        self.editing: int | None = None
        self.answers = Answers(
            link,
            lambda coroutine: self.run_worker(coroutine, group="answers"),
            Watcher(self._answer_changed, self._answer_progress),
            self._answer_ended,
        )
        self.drafted: dict[int, Spans] = {}  # of the answers since the start, by message
        self.shows_drafts = False
        self._thoughts = False
        self._stats: AnswerStats | None = None
        self._draft: str | None = None  # until something was typed
        self._draft_timer: Timer | None = None

    @property
    def answer(self) -> Answer | None:
        """Return the answer that is being written in the open chat."""
        return self.answers.of_chat(self.session.chat.id)

    # The store

    async def read(self, read: Callable[[Store], T]) -> T:
        """Return what the store says. Raises ChatsError."""
        return await asyncio.wrap_future(self.keeper.read(read))

    @work(group="load")
    async def load_chats(self) -> None:
        """Show what is kept since the last start."""
        try:
            chats = await self.read(Store.chats)
            prompts = await self.read(lambda store: store.prompts(HISTORY_LEN))
            settings = await self.read(Store.settings)
        except ChatsError as error:
            self.complain(error)
            return
        self.chats = {chat.id: chat for chat in chats} | self.chats
        self.prompt.sent.load(prompts)
        # Where there are 16 colours, the theme for them stays unless the user chooses another now.
        if (theme := settings.get("theme")) in self.app.available_themes and not self.app.current_theme.ansi:
            self.app.theme = theme
        if settings.get("drafts"):
            self.shows_drafts = True
            self.transcript.show_drafts(True)
        self.last_model = self.last_model or settings.get("model", "")
        if not self.prompt.text and settings.get("draft"):
            self.prompt.put(settings["draft"])
        self.show_chats()
        self._show_model()

    def store_problem(self, problem: ChatsError | None) -> None:
        """Show that what is said is not saved, or is again."""
        if problem is None or problem.passing or self.keeper.in_memory:
            self.status.change(unsaved=str(problem) if problem else "")
        else:
            self.complain(problem)

    def remember(self, name: str, value: str) -> None:
        """Keep a choice for the next start."""
        self.keeper.write(lambda store: store.put_setting(name, value))

    def _draft_changed(self, text: str) -> None:
        self._draft = "" if self.editing is not None else text
        if self._draft_timer is None:
            self._draft_timer = self.set_timer(DRAFT_S, self._write_draft)

    def _write_draft(self) -> None:
        self._draft_timer = None
        self.save_draft()

    def save_draft(self) -> None:
        """Keep what is being written for the next start."""
        if self._draft is not None:
            self.remember("draft", self._draft)

    # What is shown

    def show_drafts(self, shown: bool) -> None:
        """Tint what was drafted in the answers, or no more; the next start does the same."""
        self.shows_drafts = shown
        self.transcript.show_drafts(shown)
        self.remember("drafts", "shown" if shown else "")

    def show_session(self) -> None:
        """Show the open chat from its end."""
        self._stats = None
        self.transcript.show(self._views())
        self._show_around()

    def exchange(self, keep: int | None = None) -> None:
        """Show the open chat's branch as it is now, without moving."""
        self.transcript.exchange(self._views(), keep)
        self._show_around()

    def _views(self) -> list[MessageView]:
        tree = self.session.tree
        live = self.answer
        path = tree.path()
        left_out, sent = split_sent(path)
        views = []
        for message in path:
            versions = tree.siblings(message.id)
            if live is not None and live.message is message:
                live.view.set_versions(versions.index(message.id) + 1, len(versions))
                views.append(live.view)
                continue
            views.append(
                MessageView(
                    message,
                    version=versions.index(message.id) + 1,
                    versions=len(versions),
                    thoughts=self._thoughts,
                    left_out=len(left_out) if message is sent[0] else 0,
                    drafted=self.drafted.get(message.id),
                )
            )
        return views

    def _show_around(self) -> None:
        chat = self.session.chat
        self.query_one("#title", Static).update(Text(clean(chat.title), no_wrap=True, overflow="ellipsis"))
        self.app.sub_title = chat.title
        answers = [each for each in self.session.tree.path() if each.stats]
        self.status.change(
            stats=self._stats or (stats_from_json(answers[-1].stats) if answers else None),
            activity="writing" if self.answer else ("ready" if self.link.connected else self.status.status.activity),
        )
        self._show_model()
        self.show_chats()

    def show_chats(self) -> None:
        """Show the list of chats, newest first."""
        chats = sorted(self.chats.values(), key=lambda chat: (chat.changed, chat.id), reverse=True)
        self.sidebar.show_chats(chats, self.session.chat.id)

    def wanted_models(self) -> list[str]:
        """Return the models to use for the open chat, the most wanted first."""
        return [self.session.chat.model, self.wishes.model, self.last_model]

    def _show_model(self) -> None:
        self.status.change(model=next(filter(None, self.wanted_models()), ""))

    # Chats

    @work(group="open", exclusive=True)
    async def open_chat(self, chat_id: int, message_id: int | None = None) -> None:
        """Show a chat, at a message that was searched."""
        self.leave_edit()
        live = self.answers.of_chat(chat_id)
        if live is not None:
            self.session = live.session
        else:
            try:
                chat = await self.read(lambda store: store.chat(chat_id)) or self.chats.get(chat_id)
                messages = await self.read(lambda store: store.messages(chat_id))
            except ChatsError as error:
                self.complain(error)
                return
            if chat is None:
                return
            self.session = Session(self.keeper, chat, messages)
            self.chats[chat_id] = chat
        if message_id is not None:
            self.session.show(message_id)
        self.show_session()
        if message_id is not None:
            self.transcript.reveal(message_id)
        else:
            self.prompt.focus()

    def new_chat(self) -> None:
        """Show an empty chat with the settings of the one before that make sense for it."""
        self.leave_edit()
        before = self.session.chat
        self.session = Session(self.keeper, Chat(model=before.model, sampling=before.sampling), [])
        self.show_session()
        self.prompt.focus()

    def require_no_answer(self) -> None:
        """Raise RequestError while an answer is written in the open chat."""
        if self.answer is not None:
            raise RequestError("an answer is being written", "Esc stops it")

    def set_model(self, model: str) -> None:
        """Answer this chat, and new ones, with a model."""
        self.session.set_model(model)
        self.last_model = model
        self.remember("model", model)
        self._stats = None
        self._show_model()

    def leave_edit(self) -> None:
        """Write a new message again."""
        if self.editing is not None:
            self.editing = None
            self.prompt.put("")
        self.prompt.remove_class("-editing")
        self.prompt.border_title = ""

    def begin_edit(self, message: Message) -> None:
        """Write a message anew; sending it makes a branch beside the old one."""
        self.editing = message.id
        self.prompt.put(message.text)
        self.prompt.add_class("-editing")
        self.prompt.border_title = "Edit: Enter sends it as a new branch, Esc leaves"
        self.prompt.focus()

    # Answers

    def _answer_changed(self, answer: Answer) -> None:
        if answer.session is self.session:
            self.transcript.changed()

    def _answer_progress(self, answer: Answer, activity: str, stats: AnswerStats | None) -> None:
        if answer.session is not self.session:
            return
        if answer.message.model != self.status.status.model:
            self.status.change(model=answer.message.model)
        self.status.change(activity=activity)
        if stats is not None:
            self.status.change(stats=stats)

    def _answer_ended(self, answer: Answer) -> None:
        self.chats[answer.session.chat.id] = answer.session.chat
        if not self.is_laid_out:
            return
        if answer.session is self.session:
            self._show_around()
        else:
            self.show_chats()
        self.set_timer(REST_S, self._rest)

    def _rest(self) -> None:
        if not self.answers:
            collector.collect_all()
