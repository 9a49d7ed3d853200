"""The view of the chat screen: the open chat, the list of chats, the status line and notifications.

Owns the update of each widget when the state behind it has changed. Knows nothing of keys and commands, and changes no
chat.
"""

from __future__ import annotations

from textual.screen import Screen

from edgelm.base.errors import EdgeLMError
from edgelm.chats.attachments import Attachment
from edgelm.chats.history import Chat, Message
from edgelm.chats.store import ChatsError
from edgelm.client.answer_stream import stats_from_json
from edgelm.tui.commands.table import Suggestion
from edgelm.tui.inspector.panel import InspectorPanel
from edgelm.tui.lines import clean
from edgelm.tui.pane import ChatPane
from edgelm.tui.prompt.offers import about_model, offers
from edgelm.tui.sidebar import Sidebar
from edgelm.tui.state_row import state_parts
from edgelm.tui.status import StatusLine
from edgelm.tui.workspace import Workspace

GPU_S = 15.0  # that the line about an unused GPU is shown as a whole


class ScreenView:
    """Shows the workspace in the widgets of the chat screen."""

    def __init__(
        self,
        screen: Screen[None],
        workspace: Workspace,
        pane: ChatPane,
        sidebar: Sidebar,
        status: StatusLine,
        inspector: InspectorPanel,
    ) -> None:
        self._screen = screen
        self._workspace = workspace
        self._pane = pane
        self._sidebar = sidebar
        self._status = status
        self._inspector = inspector
        self._told = {""}  # lines about the GPU
        self._outputs: dict[int, list[Attachment]] = {}  # of commands, by the chat that they began in
        self.shows_drafts = False
        self.better_model = ""  # that suits this machine; empty: not known

    @property
    def is_composed(self) -> bool:
        """Tell whether the widgets exist: workers outlive them for a moment when the app ends."""
        return self._status.is_attached

    # The open chat

    def show_chat(self) -> None:
        """Show the open chat from its end."""
        workspace = self._workspace
        self._pane.show(workspace.session, workspace.answer, workspace.drafted)
        self.show_around()
        for output in self._outputs.pop(workspace.session.chat.id, ()):
            self._pane.add_output(output)

    def update_chat(self, selected: int | None = None) -> None:
        """Show the open chat's branch in its present state without scrolling; select a message if one is given."""
        workspace = self._workspace
        self._pane.update(workspace.session, workspace.answer, workspace.drafted, selected)
        self.show_around()

    def show_new_chat(self, *, stay: bool = False) -> None:
        """Show the chat that was opened, with the cursor in the prompt; `stay`: unless it is in the list of chats."""
        self._pane.leave_edit()
        self.show_chat()
        if not (stay and self._sidebar.has_focus_within):
            self.focus_prompt()

    def show_around(self) -> None:
        """Show the open chat outside its pane: title, figures, model and place in the list."""
        workspace = self._workspace
        self._screen.app.sub_title = workspace.session.chat.title
        path = workspace.session.tree.path()
        measured = [message for message in path if message.stats and message.state == "done"]
        if measured and measured[-1].model != workspace.model:
            measured = []  # the figures of another model
        if workspace.answer:
            activity = workspace.answer.activity
        else:
            activity = "ready" if workspace.link.is_ready else self._status.status.activity
        self._status.change(stats=stats_from_json(measured[-1].stats) if measured else None, activity=activity)
        self.show_model()
        self.show_chats()

    def show_drafts(self, shown: bool) -> None:
        """Tint the drafted words of answers, or stop it."""
        self.shows_drafts = shown
        self._pane.transcript.show_drafts(shown)

    def begin_edit(self, message: Message) -> None:
        self._pane.begin_edit(message)

    def attach(self, path: str) -> None:
        """Attach a file or folder to the message being written; list files if there is no path."""
        self._pane.attach(path)

    def add(self, attachment: Attachment) -> None:
        """Attach a text to the message being written."""
        self._pane.files.add(attachment)

    def add_output(self, output: Attachment, chat: Chat) -> None:
        """Attach the output of a command in the chat that it began in, now or when that is opened again."""
        if chat.id == self._workspace.session.chat.id or chat.id not in self._workspace.chats:  # no chat yet
            self._pane.add_output(output)
        else:
            self._outputs.setdefault(chat.id, []).append(output)
            words = f"{output.name} has ended: its output waits in {chat.title}"
            self._screen.notify(clean(words), markup=False)

    async def attach_clipboard(self) -> None:
        """Attach the picture on the clipboard. Raises EdgeLMError."""
        await self._pane.files.add_clipboard()

    def focus_prompt(self) -> None:
        self._pane.prompt.focus()

    @property
    def prompt_text(self) -> str:
        return self._pane.prompt.text

    def begin_shell(self) -> bool:
        """Let what is typed be a command for the shell; return False where a message is in the prompt."""
        has_begun = self._pane.prompt.begin_shell()
        self.focus_prompt()
        return has_begun

    def propose(self, text: str) -> bool:
        """Put a text above what is typed of the new message by now; return whether an edit hides it."""
        self._pane.put_before(text)
        self.focus_prompt()
        return self._pane.editing is not None

    def put_prompt(self, text: str) -> None:
        """Replace the text in the prompt."""
        self._pane.prompt.put(text)
        self.focus_prompt()

    # Around it

    def show_chats(self) -> None:
        """Show the list of chats."""
        workspace = self._workspace
        chats = list(workspace.chats.values())
        self._sidebar.show_chats(chats, workspace.session.chat.id, can_undo=bool(workspace.deleted))

    def show_title(self, chat_id: int) -> None:
        """Show that the title of a chat has changed."""
        session = self._workspace.session
        if session.chat.id == chat_id:
            self._screen.app.sub_title = session.chat.title
            self._pane.show_title(session)
        self.show_chats()

    def search(self, words: str) -> None:
        """Put the cursor into the search over all chats, with these words if there are any."""
        self._sidebar.search(words)

    def find(self, words: str) -> None:
        """Put the cursor into the bar that finds words in the open chat, with these words if there are any."""
        self._pane.find(words)

    def show_model(self) -> None:
        """Show the model of the open chat, and the offers for an empty prompt."""
        workspace = self._workspace
        self._status.change(model=workspace.model)
        self.show_state()
        self._inspector.follow(workspace.model)
        client = workspace.link.connected
        self._pane.transcript.can_explore = client is None or client.is_edgelm
        session, model, link = workspace.session, workspace.model, workspace.link
        is_first = not any(chat is not session.chat for chat in workspace.chats.values())
        offered: list[Suggestion] = []
        if link.is_ready and workspace.answer is None:
            offered = offers(
                session,
                model,
                link.listed,
                is_first=is_first,
                better=self.better_model,
                is_remote=link.remote is not None,
            )
        self._pane.offer(offered)
        others = [name for name in link.listed if name != model] if link.remote is not None else []
        self._pane.transcript.set_about(about_model(model, link.entry(model), link.remote, others) if model else ())

    def show_state(self) -> None:
        """Show what is set for the open chat."""
        connections = self._workspace.answers.tools.toolbox.connections

        def num_tools(name: str) -> int | None:
            listing = connections[name].listing if name in connections else None
            return len(listing.tools) if listing is not None else None

        workspace = self._workspace
        unused_gpu = workspace.link.unused_gpu.get(workspace.model, "")
        chat = workspace.session.chat
        entry = workspace.link.entry(workspace.model)
        runs_at = entry.remote if entry is not None else ""
        parts = state_parts(chat, num_tools, unused_gpu=unused_gpu, runs_at=runs_at, is_outdated=workspace.is_outdated)
        self._pane.state.show(parts)
        if unused_gpu not in self._told:  # once as a whole: the row may have no room for its end
            self._told.add(unused_gpu)
            self._screen.notify(clean(unused_gpu), timeout=GPU_S, markup=False)

    def show_reading(self, activity: str) -> None:
        """Show that files are indexed; empty: no longer."""
        if self.is_composed:
            self._status.change(reading=activity)

    # Notifications

    def show_store_problem(self, problem: ChatsError | None) -> None:
        """Show why the chats are not saved; None: they are saved again."""
        if problem is None or problem.temporary or self._workspace.store.in_memory:
            self._status.change(unsaved=str(problem) if problem else "")
        else:
            self.complain(problem)

    def complain(self, error: EdgeLMError) -> None:
        """Show an error that belongs to no message."""
        self._screen.notify(clean(str(error)), severity="error", timeout=10, markup=False)

    def copy(self, text: str) -> None:
        """Put a text on the clipboard of the person at the terminal."""
        self._screen.app.copy_to_clipboard(text)
        num_lines = text.count("\n") + 1
        self._screen.notify(f"copied {num_lines:,} lines" if num_lines > 1 else f"copied {len(text):,} characters")
