"""The chat screen: what happens when something is typed, chosen or comes in.

Owns the way from keys and events to what they do. What of a chat is shown is in `open_chat`, what stands where in
`layout`, the commands are in `actions`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from textual import on, work
from textual.widgets import Input

from edgelm.chats.keeper import Keeper
from edgelm.chats.store import ChatsError
from edgelm.errors import EdgeLMError, RequestError
from edgelm.tui import collector
from edgelm.tui.answering import Answer, choose_model
from edgelm.tui.commands import find_command, parse_call
from edgelm.tui.completion import Completion
from edgelm.tui.link import Link
from edgelm.tui.open_chat import OpenChat, Wishes
from edgelm.tui.prompt import Prompt
from edgelm.tui.pulls import COMMAND, Pull, Pulls
from edgelm.tui.sidebar import Sidebar
from edgelm.tui.transcript import Transcript
from edgelm.tui.views import MessageView

TWICE_S = 2.0  # for the second Ctrl+C


class ChatScreen(OpenChat):
    """The open chat, and what the user does with it."""

    def __init__(self, keeper: Keeper, link: Link, wishes: Wishes, pulling: Sequence[str] = COMMAND) -> None:
        super().__init__(keeper, link, wishes)
        self._interrupted = -TWICE_S
        self.pulls = Pulls(
            lambda coroutine: self.run_worker(coroutine, group="pulls"),
            self._show_pulls,
            self._pull_ended,
            pulling,
        )

    def on_mount(self) -> None:
        self.adapt(self.app.size.width)
        self.prompt.focus()
        self.status.change(endpoint=self.link.remote or "")
        self.show_session()
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        """Start what takes time, now that the first picture is there."""
        self.store_problem(self.keeper.problem)
        self.load_chats()
        self.connect()

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

    def _show_pulls(self) -> None:
        if self.is_laid_out:
            self.pull_bar.show_pulls(self.pulls.running)

    def _pull_ended(self, pull: Pull) -> None:
        if self.is_laid_out:
            self._show_end(pull)

    @work(group="pulled")
    async def _show_end(self, pull: Pull) -> None:
        from edgelm.tui.model_actions import pull_ended

        try:
            await pull_ended(self, pull)
        except EdgeLMError as error:
            self.complain(error)

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

    def begin_answer(self, parent: int, sent_from: int | None = None) -> None:
        """Have a message answered; `sent_from` shortens the conversation from here on."""
        session = self.session
        model = next(filter(None, self.wanted_models()), "")
        message = session.begin_answer(parent, model, sent_from)
        answer = Answer(session, message, MessageView(message, live=True, thoughts=self._thoughts), self._options())
        self.drafted[message.id] = answer.drafted
        self.answers.start(answer, self.wanted_models())
        self.show_session()

    def _options(self) -> dict[str, float | int]:
        return {**(self.wishes.options or {}), **self.session.chat.sampling}

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
