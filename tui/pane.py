"""The open chat on the screen: its title, the conversation, the list of commands and the prompt.

Owns how a session becomes message views, which message is being edited, and the keys that move between its widgets.
Knows nothing of how chats are opened, saved and answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from textual import events, on, work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Static

from edgelm.base.workers.parent import in_daemon_thread
from edgelm.chats.attachments import Attachment
from edgelm.chats.history import Message, split_sent
from edgelm.client.session import Session
from edgelm.tui.answers import Answer
from edgelm.tui.commands.table import Command, Suggestion, as_typed, in_lines
from edgelm.tui.hints import link
from edgelm.tui.lines import COLUMN, clean, margin
from edgelm.tui.prompt.attaching import Attaching
from edgelm.tui.prompt.box import Completion, Prompt
from edgelm.tui.prompt.file_picker import FilePicker
from edgelm.tui.prompt.files_bar import FilesBar
from edgelm.tui.prompt.outgoing import Item, Outgoing
from edgelm.tui.prompt.pasted import existing_paths, is_long
from edgelm.tui.prompt.paths import common_start, suggest_paths
from edgelm.tui.state_row import StateRow
from edgelm.tui.transcript.drafted import Spans
from edgelm.tui.transcript.finding import FindBar
from edgelm.tui.transcript.views import MessageView
from edgelm.tui.transcript.widget import Transcript

PASTE_WAIT_S = 0.5  # for a disk that tells whether pasted paths are there; Esc and quitting wait behind it


class LiveView:
    """The view of an answer that is being written: it grows as the answer does."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        message = answer.message
        self.view = MessageView(message, live=True, drafted=answer.drafted)
        self._num_chars, self._model, self._status = len(message.text), message.model, ""
        self.grow()

    def grow(self) -> None:
        """Show what has come since the last call, or the end of the answer."""
        view, answer, message = self.view, self.answer, self.answer.message
        if not view.live:
            return
        if message.model != self._model:
            self._model = message.model
            view.set_model(message.model)
        if answer.status != self._status:
            self._status = answer.status
            view.set_status(answer.status)
        if message.reasoning:
            view.set_thought(answer.thought)
        begin, self._num_chars = self._num_chars, len(message.text)
        view.append(message.text[begin:], answer.drafted.within(begin, self._num_chars))
        if message.calls:
            view.show_calls()
        if message.state != "streaming":
            view.settle()


class ChatPane(Vertical):
    """The widgets of one chat. `editing` is the id of the message whose new version is in the prompt."""

    DEFAULT_CSS = """
    ChatPane { width: 1fr; height: 1fr; }
    ChatPane #head { height: 1; padding-right: 1; }
    ChatPane Transcript { margin-top: 1; }
    ChatPane #head Static { color: $text-muted; link-style: none; link-color: $text-muted; }
    ChatPane #list { width: 2; }
    ChatPane #title { width: 1fr; text-style: bold; text-wrap: nowrap; text-overflow: ellipsis; }
    ChatPane #new { width: auto; margin-left: 2; }
    """

    def __init__(self, files: Attaching, send: Callable[[str, Command | None], None]) -> None:
        """`send` gets each text that Enter took, and the command that is chosen in the list for it."""
        super().__init__(id="chat")
        self.files = files
        self._send = send
        self.state = StateRow()
        self.transcript = Transcript()
        self._find_bar = FindBar()
        self.prompt = Prompt()
        self.editing: int | None = None
        self._set_aside: tuple[str, tuple[Item, ...]] = ("", ())  # what was being written when the edit began
        self._title = Static(id="title")
        self._completion = Completion()
        self._picker = FilePicker(self.prompt, self._completion, files.add_path, self.run_worker)
        self.prompt.send = self._send_chosen
        self.prompt.move = self._move
        self.prompt.complete = self._complete
        self.prompt.remove_file = files.remove_last
        self.prompt.take_file = self._picker.take
        self.prompt.attach = self._attach_pasted
        self._show_reasoning = False
        self._live: LiveView | None = None
        self.suggest: Callable[[str], list[Suggestion]] = suggest_paths  # what Tab may complete; called on a thread
        self._collapsed: set[int] = set()  # messages of which one line is shown
        self._refolded: set[int] = set()  # messages whose folded text is shown unlike that of the others

    def compose(self) -> ComposeResult:
        with Horizontal(id="head"):
            yield Static(link("≡", "screen.toggle_sidebar"), id="list")
            yield self._title
            yield Static(link("+ new", "screen.run('new')"), id="new")
        yield self.state
        yield self.transcript
        yield self._find_bar
        yield self._completion
        yield self.files.bar
        yield self.prompt

    def on_resize(self, event: events.Resize) -> None:
        """Align all with the column of the conversation's text."""
        self.transcript.styles.width = event.size.width  # 1fr would be less by the margins of the others
        left = margin(event.size.width)
        width = min(event.size.width, COLUMN)
        for widget in (
            self.query_one("#head"),
            self.state,
            self._find_bar,
            self._completion,
            self.files.bar,
            self.prompt,
        ):
            widget.styles.margin = (0, 0, widget.styles.margin.bottom, left)
            widget.styles.width = width

    # The conversation

    def show(self, session: Session, answer: Answer | None, drafted: Mapping[int, Spans]) -> None:
        """Show a chat from its end; `answer` is the one being written, `drafted` has the spans of messages."""
        self.files.look(session)
        self._collapsed.clear()
        self._find_bar.close()
        self.transcript.show(self._views(session, answer, drafted))
        self.show_title(session)

    def update(
        self, session: Session, answer: Answer | None, drafted: Mapping[int, Spans], selected: int | None = None
    ) -> None:
        """Show a chat's branch in its present state without scrolling; `selected` becomes the selected message."""
        self.transcript.replace(self._views(session, answer, drafted), selected)
        self.show_title(session)

    def answer_changed(self, answer: Answer) -> None:
        """Draw the answer at the end, and what was read for its question."""

        def grow() -> None:
            if self._live is not None and self._live.answer is answer:
                self._live.grow()
            for view in self.transcript.views[-2:]:
                if view.message is answer.question:
                    view.show_reading()

        if answer.message.state != "streaming":  # another answer may follow before the next frame
            grow()
        self.transcript.changed(grow)

    def toggle_reasoning(self) -> None:
        """Show the model's reasoning and what was read in all messages, or hide both."""
        self._show_reasoning = not self._show_reasoning
        self._refolded.clear()
        self._refold()

    @on(Transcript.Folded)
    def _folded(self, event: Transcript.Folded) -> None:
        self._refolded ^= {event.message_id}
        self._refold()

    def collapse(self, message_id: int | None) -> None:
        """Show one line of a message, or all of it; None: of each long one, or all of all."""
        views = self.transcript.views
        long = {view.message.id for view in views if view.is_long}
        if message_id is not None:
            self._collapsed ^= {message_id}
        elif long <= self._collapsed:
            self._collapsed -= long
        else:
            self._collapsed |= long
        for view in views:
            view.fold(view.message.id in self._collapsed)
        self.transcript.refold()

    @on(Transcript.Unfolded)
    def _unfolded(self, event: Transcript.Unfolded) -> None:
        self._collapsed.discard(event.message_id)

    def find(self, words: str) -> None:
        """Let the user find words in the conversation, these if there are any."""
        self._find_bar.open(words)

    def close_find(self) -> bool:
        """Find nothing any more; return whether the bar was open."""
        self.transcript.find("")
        return self._find_bar.close()

    @on(FindBar.Typed)
    def _find_typed(self, event: FindBar.Typed) -> None:
        self._find_bar.show_count(self.transcript.find(event.words))

    @on(FindBar.Moved)
    def _find_moved(self, event: FindBar.Moved) -> None:
        self.transcript.action_find(event.by)

    @on(FindBar.Entered)
    def _find_entered(self) -> None:
        if self.transcript.views:
            self.transcript.focus_found()

    def _refold(self) -> None:
        for view in self.transcript.views:
            view.show_reasoning(self._shows_reasoning(view.message))
        self.transcript.refold()

    def _shows_reasoning(self, message: Message) -> bool:
        return self._show_reasoning != (message.id in self._refolded)

    def show_title(self, session: Session) -> None:
        """Show the title above the conversation."""
        self._title.update(link(clean(session.chat.title), "screen.run('title')"))

    def _views(self, session: Session, answer: Answer | None, drafted: Mapping[int, Spans]) -> list[MessageView]:
        path = session.tree.path()
        left_out, sent = split_sent(path)
        views = []
        for message in path:
            versions = session.tree.siblings(message.id)
            version, num_versions = versions.index(message.id) + 1, len(versions)
            if answer is not None and answer.message is message:
                live = self._live_view(answer)
                live.set_versions(version, num_versions)
                live.show_reasoning(self._shows_reasoning(message))
                views.append(live)
                continue
            views.append(
                MessageView(
                    message,
                    version=version,
                    num_versions=num_versions,
                    show_reasoning=self._shows_reasoning(message),
                    folded=message.id in self._collapsed,
                    num_left_out=len(left_out) if message is sent[0] else 0,
                    drafted=drafted.get(message.id),
                )
            )
        return views

    def _live_view(self, answer: Answer) -> MessageView:
        """Return the view of an answer that is being written, as far as it is."""
        if self._live is None or self._live.answer is not answer:
            self._live = LiveView(answer)
        else:
            self._live.grow()  # the chat was not on the screen
        return self._live.view

    @on(Transcript.Left)
    def _left_transcript(self) -> None:
        self.transcript.follow()
        self.prompt.focus()

    @on(Prompt.Paged)
    def _paged(self, event: Prompt.Paged) -> None:
        if event.by < 0:
            self.transcript.scroll_page_up(animate=False)
        else:
            self.transcript.scroll_page_down(animate=False)

    # The prompt

    @property
    def unsent(self) -> str:
        """Return the text of the new message, also while another one is edited."""
        if self.editing is not None:
            return self._set_aside[0]
        return "" if self.prompt.is_shell else self.prompt.written

    def begin_edit(self, message: Message) -> None:
        """Put a message into the prompt; sending it makes a new version beside the old one."""
        self._edit(message, as_typed(message.text), [Item(file.path, file) for file in message.attachments])
        self.prompt.focus()

    def _edit(self, message: Message, text: str, items: Sequence[Item]) -> None:
        if self.editing is None:
            self._leave_shell()
            self._set_aside = (self.prompt.written, self.files.items)
        self.prompt.sent.end()
        self.editing = message.id
        self.files.set(items, message)
        self.prompt.put(text)
        self.prompt.add_class("-editing")
        self.prompt.border_title = "Edit: Enter sends it as a new branch"
        self.prompt.refresh_bindings()  # the status line shows its hints

    def _leave_shell(self) -> None:
        """Let the prompt be a message again; Up in the shell has what was typed there."""
        if self.prompt.is_shell:
            if self.prompt.text:
                self.prompt.ran.add(self.prompt.text)
            self.prompt.put("")

    def leave_edit(self, *, is_sent: bool = False) -> None:
        """Return from editing a message to the new one that was being written before.

        Behind it comes what was typed and attached since the edited one was sent.
        """
        if self.editing is not None:
            self.editing = None
            text, items = self._set_aside
            self._set_aside = ("", ())
            self.files.set(items, keep=is_sent)
            self.prompt.put(in_lines((text, self.prompt.written)) if is_sent else text)
            self.prompt.sent.end()
        self.prompt.remove_class("-editing")
        self.prompt.border_title = ""
        self.prompt.refresh_bindings()

    def _send_chosen(self, text: str) -> None:
        """Send a text with the chosen command, before the list follows the prompt, which is empty by now."""
        chosen = None
        if text.startswith("/"):
            if text != "/":  # names no command: only a list that is open has one for it
                self._completion.update(text)  # keys may be faster than the list
            chosen = self._completion.chosen
        self._send(text, chosen.command if chosen is not None else None)

    def close_commands(self) -> bool:
        """Hide the list of commands; return whether it was open."""
        self._picker.leave()
        was_open = self._completion.close()
        if was_open:
            self._note_completion()
        return was_open

    @on(Prompt.Typed)
    def _typed(self, event: Prompt.Typed) -> None:
        if self.prompt.is_shell:
            self._picker.leave()
        elif self._picker.typed():
            return
        self._completion.update("!" if self.prompt.is_shell else event.text)
        self._note_completion()

    def _move(self, by: int) -> None:
        if not self.prompt.picking:
            self._completion.update(self.prompt.text)  # keys may be faster than the list
        self._completion.move(by)
        self._note_completion()

    def list_also(self, more: Callable[[], Sequence[Command]]) -> None:
        """List these behind the commands: the prompts and resources of servers."""
        self._completion.more = more

    def renew_commands(self) -> None:
        """Show commands that are known only now."""
        if self.prompt.text.startswith("/") and not self.prompt.is_shell and not self.prompt.picking:
            self._completion.update(self.prompt.text, again=True)
            self._note_completion()

    def _note_completion(self) -> None:
        self.prompt.completing = self._completion.chosen is not None
        self.prompt.offering = self._completion.is_offering
        self.prompt.offers_command = bool(self._completion.offered_command)

    def offer(self, offers: list[Suggestion]) -> None:
        """Offer texts while the prompt is empty."""
        self._completion.offer(offers, self.prompt.text)
        self._note_completion()

    @property
    def chosen_offer(self) -> str:
        """Return the text of the offer that is chosen; empty if there is none."""
        chosen = self._completion.chosen
        return chosen.text if chosen and self._completion.is_offering else ""

    @on(Completion.Clicked)
    def _suggestion_clicked(self, event: Completion.Clicked) -> None:
        self.prompt.focus()
        if self.prompt.picking:
            self._picker.click(event.suggestion)
        elif self._completion.is_offering:
            self._send_chosen(event.suggestion.text)
        else:
            self.prompt.put(event.suggestion.text)

    def _complete(self) -> None:
        self._completion.update(self.prompt.text)  # keys may be faster than the list
        if command := self._completion.offered_command:
            self._send_chosen(command)
        elif self._completion.chosen is not None:
            self.prompt.put(self._completion.chosen.text)
        else:
            self._complete_path(self.prompt.text)

    # Files

    def attach(self, path: str) -> None:
        """Attach the file or folder at an absolute path; list the files if there is no path."""
        if path:
            self.files.add_path(path)
        else:
            self.prompt.focus()
            self.prompt.action_list_files()

    def add_output(self, output: Attachment) -> None:
        """Attach the output of a command to the new message, also while another one is edited."""
        if self.editing is None:
            self.files.add(output)
        else:
            text, items = self._set_aside
            self._set_aside = (text, (*items, Item("", output)))

    def put_before(self, text: str) -> None:
        """Put a text above the new message, also while another one is edited."""
        if self.editing is not None:
            aside, items = self._set_aside
            self._set_aside = (in_lines((text, aside)), items)
        elif text:
            self._leave_shell()
            self.prompt.give_back(text)

    def give_back(self, messages: Sequence[Outgoing], session: Session) -> None:
        """Let messages that are not sent be the one that is written: set aside, if another one is edited by now.

        The new version of a message of `session`, which is on screen, is one again.
        """
        edited = [old for message in messages if (old := message.old_version(session)) is not None]
        if edited and self.editing is None:
            self._edit(edited[0], "", ())
        for message in messages:
            self.files.give_back(message.files)
        here = [message for message in messages if self.editing in (None, message.edited)]
        if here:
            self._leave_shell()
        self.prompt.give_back(in_lines(message.typed for message in here))
        text, items = self._set_aside
        for message in reversed(messages):
            if message not in here:
                text = in_lines((message.typed, text))
                items = (*self.files.put_aside(message.files), *items)
        self._set_aside = (text, items)

    async def _attach_pasted(self, text: str) -> bool:
        """Attach a long text, or the files whose paths were pasted; return whether it was one of these.

        The prompt reads its next key behind it: Enter may come in the same read.
        """
        if is_long(text):
            self.files.add_text(text)
            return True
        paths: list[str] = []
        with suppress(TimeoutError):
            paths = await asyncio.wait_for(in_daemon_thread(lambda: existing_paths(text)), PASTE_WAIT_S)
        for path in paths:
            self.files.add_path(path)
        return bool(paths)

    @on(FilesBar.Removed)
    def _file_removed(self, event: FilesBar.Removed) -> None:
        self.files.remove(event.index)

    @on(FilesBar.Used)
    def _file_used(self, event: FilesBar.Used) -> None:
        if text := self.files.use(event.index):
            self.prompt.insert(text)
        self.prompt.focus()

    @on(FilesBar.Left)
    def _files_left(self) -> None:
        self.prompt.focus()

    @work(group="paths", exclusive=True)
    async def _complete_path(self, text: str) -> None:
        """Complete the path or tag of a command as a shell does: as far as it is clear, then list what it may be."""
        suggestions = await in_daemon_thread(lambda: self.suggest(text))  # a folder of a disk that hangs
        if suggestions and self.prompt.text == text:
            common = common_start(suggestions)
            self._completion.show_for(common, suggestions if len(suggestions) > 1 else [])
            self.prompt.completing = len(suggestions) > 1
            self.prompt.put(common)
