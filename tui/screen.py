"""The chat screen: composes the widgets and connects their keys and messages to the workspace.

Owns the layout, and what each key and message does. The state of the chats is in `workspace`, how it is shown in
`screen_view`, the open chat's widgets are in `pane`, the functions of commands in `commands`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from textual import events, on, work
from textual._compositor import ChopsUpdate, Compositor
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.timer import Timer
from textual.widgets import Input
from textual.worker import Worker

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.base.places import own_environment
from edgelm.chats.attachments import Attachment
from edgelm.chats.history import Message
from edgelm.chats.store import ChatsError
from edgelm.chats.store_thread import StoreThread
from edgelm.chats.tools.toolbox import Toolbox
from edgelm.client.answer_stream import AnswerStats, stats_from_json
from edgelm.client.link import Link
from edgelm.client.reader import Reader
from edgelm.client.session import Session
from edgelm.client.tool_runner import ToolRunner
from edgelm.tui.answers import Answer, Answers
from edgelm.tui.commands.keymap import keyless_bindings
from edgelm.tui.commands.table import GLOBAL_KEYS, Command, Suggestion, as_typed, find_command, parse_call, parse_offer
from edgelm.tui.dialogs.stats_text import figure_lines
from edgelm.tui.inspector.panel import InspectorPanel
from edgelm.tui.lines import clean, short_name
from edgelm.tui.outbox import Outbox
from edgelm.tui.pane import ChatPane
from edgelm.tui.prompt.attaching import Attaching
from edgelm.tui.prompt.box import Prompt
from edgelm.tui.prompt.outgoing import Item, Outgoing
from edgelm.tui.prompt.paths import suggest_paths
from edgelm.tui.pulls import Pull, Pulls
from edgelm.tui.screen_view import ScreenView
from edgelm.tui.sidebar import Sidebar
from edgelm.tui.status import PullBar, StatusLine
from edgelm.tui.tags import known_tags, suggest_tags
from edgelm.tui.titles import Titles
from edgelm.tui.transcript.sixel import SixelStrip
from edgelm.tui.transcript.widget import Transcript
from edgelm.tui.workspace import ChatDefaults, Workspace

if TYPE_CHECKING:
    from edgelm.tui.screen_face import ScreenFace

TWICE_S = 2.0  # for the second Ctrl+C
COLLECT_AFTER_S = 1.0  # from the end of the last answer to a full garbage collection
LOOK_S = 3.0  # between two looks whether another window has changed the open chat
UNSENT_S = 0.5  # between two saves of the text in the prompt
NEVER = 1_000_000_000  # as a threshold of the garbage collector


class NarrowCompositor(Compositor):
    """Textual's compositor, which draws only the widgets that a change touches.

    Its own draws all of a screen, by their clips, for each new line of an answer.
    """

    def _get_renders(self, crop: Region | None = None) -> Iterable[tuple[Region, Region, list[Strip]]]:
        every = self.visible_widgets
        touched = every if crop is None else {widget: at for widget, at in every.items() if crop.overlaps(at[0])}
        self._visible_widgets = touched
        try:
            yield from super()._get_renders(crop)
        finally:
            if self._visible_widgets is touched:
                self._visible_widgets = every

    def render_partial_update(self) -> ChopsUpdate | None:
        """Draw pictures of sixels as a whole: a strip that is cut inside one has half blocks there."""
        update = super().render_partial_update()
        if update is None:
            return None
        for place, (y, start, end) in enumerate(update.spans):
            strips = zip(update.chop_ends[y], update.chops[y].items(), strict=True)
            drawn = [last for last, (x, strip) in strips if isinstance(strip, SixelStrip) and x < end and last > start]
            update.spans[place] = y, start, max([end, *drawn])
        return update


class ChatScreen(Screen[None]):
    """List of chats, open chat, running pulls and status line."""

    BINDINGS: ClassVar[list[BindingType]] = [*(key.binding for key in GLOBAL_KEYS), *keyless_bindings()]
    DEFAULT_CSS = "ChatScreen { layers: base above; }"

    def __init__(
        self,
        store: StoreThread,
        link: Link,
        reader: Reader,
        defaults: ChatDefaults,
        pull_command: Sequence[str],
        bandwidth: Callable[[], float],
        tools: ToolRunner,
        suggested_model: Callable[[], str | None],
    ) -> None:
        """`bandwidth` measures this machine's memory, in bytes per second."""
        super().__init__()
        self._compositor = NarrowCompositor()
        self._suggested_model = suggested_model
        self._reader = reader
        answers = Answers(link, reader, lambda coroutine: self.run_worker(coroutine, group="answers"), self, tools)
        self.workspace = Workspace(store, link, defaults, answers)
        self.pulls = Pulls(
            lambda coroutine: self.run_worker(coroutine, group="pulls"),
            self._show_pulls,
            self._pull_ended,
            pull_command,
        )
        self.files = Attaching(
            self.workspace,
            lambda coroutine: self.run_worker(coroutine, group="files"),
            lambda text: self.notify(clean(text), markup=False),
            self._complain,
        )
        self.sidebar, self.pane, self.status = Sidebar(), ChatPane(self.files, self._sent), StatusLine()
        self.pane.suggest = self._suggest
        self.pane.list_also(self._offer_commands)
        self.inspector = InspectorPanel(link, bandwidth)
        self.view = ScreenView(self, self.workspace, self.pane, self.sidebar, self.status, self.inspector)
        self._outbox = Outbox(
            self._check_and_send,
            self._give_back,
            self._complain,
            lambda coroutine: self.run_worker(coroutine, group="send"),
        )
        self._titles = Titles(
            self.workspace, lambda coroutine: self.run_worker(coroutine, group="titles"), self.view.show_title
        )
        self._interrupted = -TWICE_S  # when Ctrl+C was pressed
        self._has_typed = False  # or else there is no text to save
        self._is_loaded = False  # the state of the last run
        self._draft = ""  # what that left in the prompt, until it is there again
        self._unsent_timer: Timer | None = None
        self._shell: Worker[None] | None = None  # the command that was run last
        self.begun: Worker[None] | None = None  # a command of a key, before the next key

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield self.sidebar
            yield self.pane
        yield self.inspector
        yield PullBar()
        yield self.status

    # Start

    def on_mount(self) -> None:
        self.sidebar.fit(self.app.size.width)
        self.view.focus_prompt()
        self.status.change(endpoint=self.workspace.link.remote or "")
        self.view.show_chat()
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        """Start slow work after the first paint."""
        self.view.show_store_problem(self.workspace.store.problem)
        if self.workspace.defaults.note:
            self.notify(clean(self.workspace.defaults.note), severity="warning", timeout=10, markup=False)
        self._load_chats()
        self._connect()

    @work(group="load")
    async def _load_chats(self) -> None:
        """Show the chats and restore the last run's state."""
        try:
            last_run = await self.workspace.load()
        except ChatsError as error:
            self.view.complain(error)
            return
        if not self.view.is_composed:  # the chat was closed meanwhile
            return
        settings = last_run.settings
        prompt = self.pane.prompt
        prompt.sent.load(last_run.sent)
        # A terminal of 16 colours keeps its own theme unless the user chooses another now.
        if (theme := settings.get("theme")) and theme not in self.app.available_themes:
            self.notify(f"the theme {clean(theme)} is gone; /theme chooses another", markup=False)
        elif theme and not self.app.current_theme.ansi:
            self.app.theme = theme
        if settings.get("drafts"):
            self.view.show_drafts(True)
        self._draft = last_run.unsent
        self._put_draft()
        self._is_loaded = True
        self.view.show_chats()
        self.view.show_model()
        self.set_interval(LOOK_S, self.look_elsewhere)

    @work(group="connect", exclusive=True)
    async def _connect(self) -> None:
        """Connect now, so that the first answer need not wait for it."""
        transcript = self.pane.transcript
        self.status.change(activity="connecting")
        try:
            await self.workspace.link.models()
        except EdgeLMError as error:
            self.status.change(activity="not connected")
            transcript.set_notice(str(error))
            if self.workspace.session.tree.messages:  # they hide the notice
                self.view.complain(error)
            return
        transcript.set_notice("")
        self.status.change(activity="ready")
        _delay_full_collections()
        if self.workspace.link.remote is None:
            better: str | None = await asyncio.to_thread(self._suggested_model)
            self.view.better_model = better or ""
        try:
            if note := await self.workspace.choose_default():
                self.notify(clean(note), severity="warning", timeout=10, markup=False)
        except EdgeLMError as error:
            transcript.set_notice(str(error))
        self.view.show_model()

    # Chats

    @work(group="open", exclusive=True)
    async def open_chat(self, chat_id: int, message_id: int | None = None) -> None:
        """Show a chat, at a message if one is given."""
        try:
            if not await self.workspace.open_chat(chat_id, message_id):
                return
        except ChatsError as error:
            self.view.complain(error)
            return
        self.pane.leave_edit()
        self.view.show_chat()
        if message_id is not None:
            self.pane.transcript.reveal(message_id)
        else:
            self.view.focus_prompt()

    @on(Sidebar.Opened)
    def _chat_chosen(self, event: Sidebar.Opened) -> None:
        self._leave_sidebar()
        self.open_chat(event.chat_id, event.message_id)

    @on(Sidebar.Searched)
    def _search_typed(self, event: Sidebar.Searched) -> None:
        self._search(event.text)

    @work(group="search", exclusive=True)
    async def _search(self, text: str) -> None:
        try:
            hits = await self.workspace.search(text)
        except ChatsError as error:
            self.view.complain(error)
        else:
            self.sidebar.show_hits(text, hits)

    @on(Sidebar.Acted)
    @work(group="command")
    async def _act_on_chat(self, event: Sidebar.Acted) -> None:
        from edgelm.tui.commands.chats import act

        try:
            await act(self._face, event.action, event.chat_id)
        except EdgeLMError as error:
            self.view.complain(error)

    @on(Prompt.Undone)
    def action_suspend(self) -> None:
        """Bring back a chat, or do what Ctrl+Z does in other programs: go to the shell, until `fg`."""
        if self.workspace.deleted:
            self.run_command("undo", "")
        elif _has_shell():
            self.app.action_suspend_process()
        else:
            self.notify("no shell would bring the chat back: it stays")

    @on(Sidebar.Closed)
    def _leave_sidebar(self) -> None:
        self.sidebar.leave()
        self.view.focus_prompt()

    def action_toggle_sidebar(self) -> None:
        self.sidebar.toggle()

    def on_resize(self, event: events.Resize) -> None:
        self.sidebar.fit(event.size.width)

    def _suggest(self, text: str) -> list[Suggestion]:
        """Return what Tab may complete in a command. Called on a thread."""
        return suggest_tags(text, known_tags(list(self.workspace.chats.values()))) or suggest_paths(text)

    # Messages and answers

    def _sent(self, typed: str, chosen: Command | None) -> None:
        """Run the command that a text means, chosen in the list for it or written, or send it as a message."""
        pane = self.pane
        text = typed or pane.chosen_offer
        call = parse_call(text) or (("", "") if chosen is not None else None)
        offer = parse_offer(text, self._toolbox.servers)
        if chosen is not None and ":" in chosen.name:
            offer = (chosen.name, offer[1] if offer is not None else "")  # the list knows the whole name
        if offer is not None:
            pane.prompt.sent.add(text)
            pane.close_commands()
            self._take_offer(*offer)
        elif call is not None:
            command = chosen or find_command(call[0])
            if command is None:
                self.notify(f"there is no command /{call[0]}; / shows all", severity="warning", markup=False)
                pane.prompt.give_back(typed)
                return
            pane.prompt.sent.add(text)
            pane.close_commands()
            self.run_command(command.name, call[1])
        elif self.files.items or text.strip():
            session = self.workspace.session
            message = Outgoing(text, self.files.take(), session, session.tree.leaf, pane.editing)
            must_wait = self._outbox.has_messages(session) or self.files.must_check or "://" in text
            pane.leave_edit(is_sent=True)  # what is typed next is no part of it
            if must_wait or self.workspace.answer is not None:  # or comes back, with those behind it
                self._outbox.add(message)
                return
            try:
                self._send(message)
            except RequestError as error:
                self._give_back((message,))
                self.view.complain(error)
        else:
            pane.prompt.give_back(text)

    @work(group="command")
    async def _take_offer(self, name: str, argument: str) -> None:
        from edgelm.tui.commands.tools import take_offer

        try:
            await take_offer(self._face, name, argument)
        except EdgeLMError as error:
            self.view.complain(error)

    @property
    def _toolbox(self) -> Toolbox:
        return self.workspace.answers.tools.toolbox

    def _offer_commands(self) -> list[Command]:
        """Return the prompts and resources of the servers that this chat uses."""
        from edgelm.tui.commands.tools import offer_commands  # delays its imports

        tools = self.workspace.session.chat.tools
        return offer_commands(self._toolbox, tools) if tools else []

    @work(group="offers", exclusive=True)
    async def _list_offers(self) -> None:
        """Ask the servers that this chat uses for their prompts and resources, each once."""
        for name in self.workspace.session.chat.tools:
            with suppress(EdgeLMError):  # it is told when a message is sent
                connection = self._toolbox.connection(name)
                if connection.offers is None and connection.state != "failed":
                    await connection.list_offers()
                    self.pane.renew_commands()

    @on(Prompt.Ran)
    def _ran(self, event: Prompt.Ran) -> None:
        if self._shell is not None and self._shell.is_running:
            self.notify("a command is running; Esc stops it", severity="warning")
            self.pane.prompt.give_back_command(event.command)
        elif event.command.strip():
            self.pane.prompt.ran.add(event.command)
            self._shell = self._run_shell(event.command)

    @work(group="shell")
    async def _run_shell(self, command: str) -> None:
        """Run a command in the user's shell, and attach its output."""
        from edgelm.tui.prompt.shell import run_shell

        activity, chat = f"running {' '.join(command.split())[:20]}; Esc stops it", self.workspace.session.chat
        try:
            output = await self._face.wait(activity, run_shell(command, own_environment()))
        except EdgeLMError as error:
            self.view.complain(error)
        else:
            self.view.add_output(output, chat)

    async def _check_and_send(self, message: Outgoing) -> bool:
        """Send a message when its files are checked; return False where it comes back.

        Raises EdgeLMError, also where another chat or branch was opened meanwhile.
        """
        from edgelm.tui.commands.messages import offer_pages  # after the first paint

        self.workspace.require_no_answer(message.session)

        async def add(page: Attachment) -> None:
            item = self.files.add(page)
            item.is_taken = True
            message.files.append(item)

        if not await offer_pages(self._face, message.text, add) or not await self.files.check(message):
            return False
        message.require_place(self.workspace.session)
        if message.text.strip() or self.files.attachments_of(message.files):  # or else they were taken off
            self._send(message)
            self._save_soon()  # its text was saved while it waited
        return True

    def send(self, text: str, roots: tuple[str, ...] = ()) -> None:
        """Send a message without files, as a new version of the one being edited if there is one.

        Raises RequestError.
        """
        editing = self.pane.editing
        self.workspace.send(text, editing, roots)
        files = self.files.items if editing is not None else ()
        self.pane.leave_edit(is_sent=True)
        self._note_sent(text, files)

    def _give_back(self, messages: Sequence[Outgoing]) -> None:
        self.pane.give_back(messages, self.workspace.session)

    def _send(self, message: Outgoing) -> None:
        """Send a message that may be sent. Raises RequestError."""
        attachments = self.files.attachments_of(message.files)
        self.workspace.send(message.text, message.edited, attachments=attachments)
        self._note_sent(message.text, message.files)

    def _note_sent(self, text: str, files: Sequence[Item]) -> None:
        """Show a message that was sent; its files, and those of its old version, leave the bar."""
        pane = self.pane
        self.files.drop(files)
        pane.prompt.sent.add(as_typed(text))
        self.view.show_chat()
        self._show_others(self.workspace.session)

    @work(group="others")
    async def _show_others(self, session: Session) -> None:
        """Show that a chat is written in another window, too: its branches would part silently."""
        with suppress(ChatsError):
            note = await self.workspace.adopt(session)
            if note and self.view.is_composed:
                self.notify(note, severity="warning", timeout=10)
                if session is self.workspace.session:
                    self.view.update_chat()

    @work(group="elsewhere", exclusive=True)
    async def look_elsewhere(self) -> None:
        """Show whether another window has changed the open chat."""
        was_outdated = self.workspace.is_outdated
        with suppress(ChatsError):
            await self.workspace.look_elsewhere()
        if self.workspace.is_outdated != was_outdated and self.view.is_composed:
            self.view.show_state()

    def _complain(self, error: EdgeLMError) -> None:
        self.view.complain(error)

    def answer_changed(self, answer: Answer) -> None:
        if answer.session is self.workspace.session and self.view.is_composed:
            self.pane.answer_changed(answer)

    def answer_progressed(self, answer: Answer, activity: str, stats: AnswerStats | None) -> None:
        if answer.session is not self.workspace.session:
            return
        if answer.message.model != self.status.status.model:
            self.status.change(model=answer.message.model)
        self.status.change(activity=activity)
        self.view.show_state()
        if stats is not None:
            self.status.change(stats=stats)

    def answer_noted(self, answer: Answer, note: str) -> None:
        if self.view.is_composed:
            self.notify(clean(note), timeout=10, markup=False)

    def answer_ended(self, answer: Answer) -> None:
        self.workspace.chats[answer.session.chat.id] = answer.session.chat
        if not self.view.is_composed:
            return
        self._titles.answer_ended(answer.session)
        if answer.session is self.workspace.session:
            self.view.show_around()
        else:
            self.view.show_chats()
        self.set_timer(COLLECT_AFTER_S, self._collect_garbage)

    def _collect_garbage(self) -> None:
        if not self.workspace.answers:
            gc.collect()  # nothing is moving on the screen

    @on(Transcript.Act)
    def _act(self, event: Transcript.Act) -> None:
        message_id = event.message_id
        if event.action in ("previous", "next"):
            self._turn(message_id, -1 if event.action == "previous" else 1)
        elif event.action == "figures":
            self._show_figures(self.workspace.session.tree.messages[message_id])
        elif event.action == "links":
            self._choose_link(self.workspace.session.tree.messages[message_id])
        elif event.action in ("collapse", "collapse-all"):
            self.pane.collapse(message_id if event.action == "collapse" else None)
        elif event.action.startswith("code "):  # the number of a block whose head was clicked
            self.run_command("code", f"#{message_id} {event.action.removeprefix('code ')}")
        else:
            self.run_command(event.action, f"#{message_id}")

    @on(Transcript.Linked)
    def _link_clicked(self, event: Transcript.Linked) -> None:
        self._copy_address(event.address)

    def _copy_address(self, address: str) -> None:
        self.app.copy_to_clipboard(address)
        self.notify(f"copied {clean(address)}", markup=False)

    @work(group="command")
    async def _choose_link(self, message: Message) -> None:
        from edgelm.tui.dialogs.basic import Choice, PickScreen  # after the first paint
        from edgelm.tui.transcript.markdown import addresses

        choices = [Choice(address, clean(address)) for address in addresses(message.text)]
        if not choices:
            self.notify("there is no link in this message")
        elif (address := await self.app.push_screen_wait(PickScreen("Copy an address", choices))) is not None:
            self._copy_address(address)

    def _turn(self, message_id: int, by: int) -> None:
        """Show the previous (-1) or next (1) version of a message."""
        if self.workspace.answer is not None:
            self.notify("an answer is being written; Esc stops it", severity="warning")
            return
        session = self.workspace.session
        if session.turn(message_id, by):
            on_branch = {message.id for message in session.tree.path()}
            self.view.update_chat(
                next(version for version in session.tree.siblings(message_id) if version in on_branch)
            )

    @on(Prompt.Typed)
    def _typed(self, event: Prompt.Typed) -> None:
        if len(event.text) == 1:
            self.files.look(self.workspace.session)
        if event.text == "/":
            self._list_offers()
        self._has_typed = True
        self._put_draft()
        self._save_soon()

    def _put_draft(self) -> None:
        """Put the draft of the last run above what is typed by now; where that is a command, behind its Enter."""
        prompt = self.pane.prompt
        if self._draft and not prompt.is_shell and not prompt.text.startswith("/"):
            draft, self._draft = self._draft, ""
            self.pane.put_before(draft)

    def _save_soon(self) -> None:
        if self._unsent_timer is None:
            self._unsent_timer = self.set_timer(UNSENT_S, self._save_in_time)

    def _save_in_time(self) -> None:
        self._unsent_timer = None
        self.save_unsent()

    def save_unsent(self) -> None:
        """Save the texts that are not sent for the next run: of the messages that wait, and of the prompt."""
        if self._has_typed and self._is_loaded:
            texts = [*self._outbox.texts, self._draft, self.pane.unsent]
            self.workspace.remember_unsent("\n".join(filter(None, texts)))

    # Pulls

    def _show_pulls(self) -> None:
        if self.view.is_composed:
            self.query_one(PullBar).show_pulls(self.pulls.running)

    def _pull_ended(self, pull: Pull) -> None:
        if self.view.is_composed:
            self._show_end(pull)

    @work(group="pulled")
    async def _show_end(self, pull: Pull) -> None:
        from edgelm.tui.commands.models import tell_end

        try:
            await tell_end(self._face, pull)
        except EdgeLMError as error:
            self.view.complain(error)

    # Keys and commands

    @cached_property
    def _face(self) -> ScreenFace:
        from edgelm.tui.screen_face import ScreenFace  # delays the dialogs' imports until after the first paint

        return ScreenFace(self.app, self.workspace, self.pulls, self._reader, self.view, self.inspector, self.send)

    def action_run(self, name: str) -> None:
        self.begun = self.run_command(name, "")

    @work(group="command")
    async def run_command(self, name: str, argument: str) -> None:
        """Run a command."""
        try:
            command = find_command(name)
            assert command is not None, name
            await command.run(self._face, argument)
        except EdgeLMError as error:
            self.view.complain(error)
        if self.view.is_composed:
            self.view.show_state()

    def action_stop(self) -> None:
        """Close or stop the innermost thing that is open."""
        if self.pane.close_commands():
            return
        if self.pane.close_find():
            self.view.focus_prompt()
        elif self._shell is not None and self._shell.is_running:
            self._shell.cancel()
        elif self.pane.prompt.leave_shell():
            pass
        elif self.focused is not self.pane.prompt:
            self.view.focus_prompt()
        elif not self.workspace.answers.stop(self.workspace.session.chat.id):
            self.pane.leave_edit()

    def action_interrupt(self) -> None:
        """Copy the selection, else stop the answer, else quit at the second Ctrl+C."""
        selected = self.get_selected_text()
        if isinstance(self.focused, Prompt | Input) and not selected:
            selected = self.focused.selected_text
        if selected:
            self.view.copy(selected)
        elif not self.workspace.answers.stop(self.workspace.session.chat.id):
            now = time.monotonic()
            if now - self._interrupted < TWICE_S:
                self.run_command("quit", "")
            else:
                self.notify("Ctrl+C once more quits")
            self._interrupted = now

    def action_figures(self) -> None:
        """Show all figures of the last answer."""
        measured = [message for message in self.workspace.session.tree.path() if message.stats]
        if measured:
            self._show_figures(measured[-1])

    def _show_figures(self, message: Message) -> None:
        if (stats := stats_from_json(message.stats)) is not None:
            self.notify(
                "\n".join(figure_lines(stats)), title=clean(short_name(message.model)), timeout=10, markup=False
            )

    def action_toggle_reasoning(self) -> None:
        self.pane.toggle_reasoning()


def _has_shell() -> bool:
    """Return whether a shell with job control runs us: stopped without one, the chat could not be woken."""
    parent = os.getppid()
    try:
        return os.getsid(parent) == os.getsid(0) and os.getpgid(parent) != os.getpgrp()
    except OSError:
        return False


def _delay_full_collections() -> None:
    """Let the collector collect only young objects; `gc.collect` at a quiet moment collects the others.

    With a long chat open, a full collection holds the event loop for 50 ms and more, and comes at any moment.
    """
    gc.freeze()  # all present objects stay: never look at them again
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
