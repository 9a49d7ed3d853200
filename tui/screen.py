"""The chat screen: what happens when something is typed, chosen or comes in.

Owns the open chat and the answers being written. What stands where is in `layout`, the commands are in `actions`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rich.text import Text
from textual import on, work
from textual.timer import Timer
from textual.widgets import Input, Static

from edgelm.chats.keeper import Keeper
from edgelm.chats.model import Chat, Message
from edgelm.chats.store import ChatsError, Store
from edgelm.client.endpoint import AnswerStats, stats_from_json
from edgelm.errors import EdgeLMError, RequestError
from edgelm.tui import collector
from edgelm.tui.answering import Answer, Watcher, choose_model
from edgelm.tui.answers import Answers
from edgelm.tui.commands import find_command, parse_call
from edgelm.tui.completion import Completion
from edgelm.tui.layout import ChatLayout
from edgelm.tui.lines import clean
from edgelm.tui.link import Link
from edgelm.tui.prompt import Prompt
from edgelm.tui.session import Session
from edgelm.tui.sidebar import Sidebar
from edgelm.tui.transcript import Transcript
from edgelm.tui.views import MessageView

HISTORY_LEN = 500
TWICE_S = 2.0  # for the second Ctrl+C
REST_S = 1.0  # after the last answer
DRAFT_S = 0.5  # between two saves of what is being written

T = TypeVar("T")


@dataclass(frozen=True)
class Wishes:
    """What the command line and the settings ask for."""

    model: str = ""
    options: dict[str, float | int] | None = None  # sampling that the user has set


class ChatScreen(ChatLayout):
    """The layout with chats in it."""

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
        self._thoughts = False
        self._stats: AnswerStats | None = None
        self._interrupted = -TWICE_S
        self._draft: str | None = None  # until something was typed
        self._draft_timer: Timer | None = None

    @property
    def answer(self) -> Answer | None:
        """Return the answer that is being written in the open chat."""
        return self.answers.of_chat(self.session.chat.id)

    def on_mount(self) -> None:
        self.adapt(self.app.size.width)
        self.prompt.focus()
        self.status.change(endpoint=self.link.remote or "")
        self.show_session()
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        """Start what takes time, now that the first picture is there."""
        self.store_problem(self.keeper.problem)
        self._load_chats()
        self.connect()

    # The store

    async def read(self, read: Callable[[Store], T]) -> T:
        """Return what the store says. Raises ChatsError."""
        return await asyncio.wrap_future(self.keeper.read(read))

    @work(group="load")
    async def _load_chats(self) -> None:
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

    # The endpoint

    @work(group="connect", exclusive=True)
    async def connect(self) -> None:
        """Connect, so that the first answer need not wait for it."""
        self.status.change(activity="connecting")
        try:
            models = await self.link.models()
        except EdgeLMError as error:
            self.status.change(activity="not connected")
            self.transcript.set_notice(str(error))
            if self.session.tree.messages:
                self.complain(error)
            return
        self.transcript.set_notice("")
        self.status.change(activity="ready")
        collector.take_over()
        try:
            self.last_model = choose_model([self.wishes.model, self.last_model], models)
        except EdgeLMError as error:
            self.transcript.set_notice(str(error))
        self._show_model()

    def wanted_models(self) -> list[str]:
        """Return the models to use for the open chat, the most wanted first."""
        return [self.session.chat.model, self.wishes.model, self.last_model]

    def _show_model(self) -> None:
        self.status.change(model=next(filter(None, self.wanted_models()), ""))

    # What is shown

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
        views = []
        for message in tree.path():
            versions = tree.siblings(message.id)
            if live is not None and live.message is message:
                live.view.set_versions(versions.index(message.id) + 1, len(versions))
                views.append(live.view)
                continue
            views.append(
                MessageView(
                    message, version=versions.index(message.id) + 1, versions=len(versions), thoughts=self._thoughts
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

    def remember(self, name: str, value: str) -> None:
        """Keep a choice for the next start."""
        self.keeper.write(lambda store: store.put_setting(name, value))

    # Saying something

    @on(Prompt.Sent)
    def _sent(self, event: Prompt.Sent) -> None:
        text = event.text
        call = parse_call(text)
        completion = self.query_one(Completion)
        completion.update(text)  # keys may be faster than the list
        if call is not None:
            command = completion.chosen if completion.chosen and not call[1] else find_command(call[0])
            if command is None:
                self.notify(f"there is no command /{call[0]}; / shows all", severity="warning", markup=False)
                return
            self.prompt.put("")
            completion.close()
            self.prompt.sent.add(text)
            self.run_command(command.name, call[1])
        elif text.strip():
            try:
                self.say(text.removeprefix("/") if text.startswith("//") else text)
            except RequestError as error:
                self.complain(error)

    def say(self, text: str) -> None:
        """Send a message, beside the one that is being edited if there is one. Raises RequestError."""
        self.require_no_answer()
        session = self.session
        parent = session.tree.leaf
        if self.editing is not None:
            parent = session.tree.messages[self.editing].parent
        self.editing = None
        self.leave_edit()
        self.prompt.put("")
        self.prompt.sent.add(text)
        self.chats[session.chat.id] = session.chat
        message = session.say(text, parent)
        self.begin_answer(message.id)

    def begin_answer(self, parent: int) -> None:
        """Have a message answered."""
        session = self.session
        model = next(filter(None, self.wanted_models()), "")
        message = session.begin_answer(parent, model)
        answer = Answer(session, message, MessageView(message, live=True, thoughts=self._thoughts), self._options())
        self.answers.start(answer, self.wanted_models())
        self.show_session()

    def _answer_ended(self, answer: Answer) -> None:
        self.chats[answer.session.chat.id] = answer.session.chat
        if answer.session is self.session:
            self._show_around()
        else:
            self.show_chats()
        self.set_timer(REST_S, self._rest)

    def _rest(self) -> None:
        if not self.answers:
            collector.collect_all()

    def _options(self) -> dict[str, float | int]:
        return {**(self.wishes.options or {}), **self.session.chat.sampling}

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

    # Keys and events

    def action_run(self, name: str) -> None:
        self.run_command(name, "")

    @work(group="command")
    async def run_command(self, name: str, argument: str) -> None:
        """Do what a command says."""
        try:
            from edgelm.tui.actions import ACTIONS  # after the first picture

            await ACTIONS[name](self, argument)
        except EdgeLMError as error:
            self.complain(error)

    def action_stop(self) -> None:
        """Leave the innermost thing that is open."""
        if self.query_one(Completion).close():
            self.prompt.completing = False
            return
        if self.focused is not self.prompt:
            self.prompt.focus()
        elif not self.answers.stop(self.session.chat.id) and self.editing is not None:
            self.leave_edit()

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

    def action_interrupt(self) -> None:
        """Copy, stop, or quit at the second time: what Ctrl+C means depends on what there is."""
        selected = self.get_selected_text()
        if isinstance(self.focused, Prompt | Input) and not selected:
            selected = self.focused.selected_text
        if selected:
            self.copy(selected)
        elif not self.answers.stop(self.session.chat.id):
            now = time.monotonic()
            if now - self._interrupted < TWICE_S:
                self.run_command("quit", "")
            else:
                self.notify("Ctrl+C once more quits")
            self._interrupted = now

    def action_toggle_thoughts(self) -> None:
        self._thoughts = not self._thoughts
        for view in self.transcript.views:
            view.show_thoughts(self._thoughts)
        self.transcript.changed()

    @on(Prompt.Typed)
    def _typed(self, event: Prompt.Typed) -> None:
        completion = self.query_one(Completion)
        completion.update(event.text)
        self.prompt.completing = completion.chosen is not None
        self._draft_changed(event.text)

    @on(Sidebar.Opened)
    def _chat_chosen(self, event: Sidebar.Opened) -> None:
        self.leave_sidebar()
        self.open_chat(event.chat_id, event.message_id)

    @on(Sidebar.Searched)
    def _searched(self, event: Sidebar.Searched) -> None:
        self._search(event.words)

    @work(group="search", exclusive=True)
    async def _search(self, words: str) -> None:
        try:
            hits = await self.read(lambda store: store.search(words))
        except ChatsError as error:
            self.complain(error)
        else:
            self.sidebar.show_hits(words, hits)

    @on(Sidebar.Deleted)
    def _delete_asked(self, event: Sidebar.Deleted) -> None:
        self.run_command("delete", str(event.chat_id))

    @on(Transcript.Act)
    def _act(self, event: Transcript.Act) -> None:
        message_id = event.message_id
        if event.action in ("previous", "next"):
            self._turn(message_id, -1 if event.action == "previous" else 1)
        else:
            self.run_command(event.action, f"#{message_id}")

    def _turn(self, message_id: int, by: int) -> None:
        if self.answer is not None:
            self.notify("an answer is being written; Esc stops it", severity="warning")
            return
        if self.session.turn(message_id, by):
            versions = self.session.tree.siblings(message_id)
            shown = {message.id for message in self.session.tree.path()}
            self.exchange(next(each for each in versions if each in shown))
