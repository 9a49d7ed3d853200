"""The full screen as the face of commands: dialogs, notifications, and what is shown again.

Owns how each is done with Textual. Knows nothing of single commands.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from textual.app import App
from textual.markup import escape
from textual.screen import ModalScreen

from edgelm.base.errors import EdgeLMError
from edgelm.chats.attachments import Attachment
from edgelm.chats.history import Message
from edgelm.client.reader import Reader
from edgelm.tui.commands.face import Part
from edgelm.tui.commands.keymap import KeyMap, keymap_of
from edgelm.tui.commands.table import as_typed
from edgelm.tui.dialogs.basic import ConfirmScreen, LineScreen
from edgelm.tui.inspector.panel import InspectorPanel
from edgelm.tui.lines import clean
from edgelm.tui.pulls import Pulls
from edgelm.tui.screen_view import ScreenView
from edgelm.tui.workspace import Workspace

UNDO_S = 7.0  # for the notice with the way back

T = TypeVar("T")


class Send(Protocol):
    """Sends a message in the open chat; `roots` are read for it instead of the chat's knowledge."""

    def __call__(self, text: str, roots: tuple[str, ...] = ()) -> None: ...


class ScreenFace:
    """Commands on the full screen. Those that are of the screen only use the app, its view and the panel."""

    def __init__(
        self,
        app: App[Any],
        workspace: Workspace,
        pulls: Pulls,
        reader: Reader,
        view: ScreenView,
        panel: InspectorPanel,
        send: Send,
    ) -> None:
        self.app = app
        self.workspace = workspace
        self.pulls = pulls
        self.reader = reader
        self.view = view
        self.panel = panel
        self.listed: dict[str, list[str]] = {}
        self.is_editing = False  # in the user's editor
        self._send = send
        self._parts: dict[Part, Callable[[], None]] = {
            "chat": view.show_chat,
            "branch": view.update_chat,
            "opened chat": view.show_new_chat,
            "next chat": lambda: view.show_new_chat(stay=True),
            "around": view.show_around,
            "chats": view.show_chats,
            "model": view.show_model,
            "prompt": view.focus_prompt,
        }

    @property
    def keymap(self) -> KeyMap:
        return keymap_of(self.app)

    def either(self, on_screen: T, in_lines: T) -> T:
        return on_screen

    def tell(self, text: str) -> None:
        self.app.notify(clean(text), markup=False)

    def mention(self, text: str) -> None:
        pass

    def tell_deleted(self, title: str) -> None:
        way = "[bold underline @click=screen.run('undo')]/undo[/] or Ctrl+Z brings it back"
        self.app.notify(f"deleted: {escape(clean(title))}\n{way}", timeout=UNDO_S)

    def complain(self, error: EdgeLMError) -> None:
        self.view.complain(error)

    def show(self, *parts: Part) -> None:
        for part in parts:
            self._parts[part]()

    def show_activity(self, activity: str) -> None:
        self.view.show_reading(activity)

    async def connect(self, work: Coroutine[Any, Any, T]) -> T:
        return await work

    async def wait(self, activity: str, work: Coroutine[Any, Any, T]) -> T:
        try:
            self.view.show_reading(activity)
            return await work
        finally:
            self.view.show_reading("")

    async def ask(self, dialog: Callable[[], ModalScreen[T]], in_lines: Callable[[], Awaitable[T]]) -> T:
        return await self.app.push_screen_wait(dialog())

    async def line(self, title: str, text: str, prompt: str = "") -> str | None:
        return await self.app.push_screen_wait(LineScreen(title, text))

    async def confirm(self, in_line: str, question: str = "", yes: str = "Yes") -> bool:
        return await self.app.push_screen_wait(ConfirmScreen(question or in_line, yes))

    async def send(self, text: str, roots: tuple[str, ...] = ()) -> None:
        self._send(text, roots)

    async def edit(self, message: Message) -> None:
        self.view.begin_edit(message)

    async def attach(self, path: str) -> None:
        self.view.attach(path)

    async def add(self, attachment: Attachment) -> None:
        self.view.add(attachment)

    async def propose(self, text: str) -> None:
        if self.view.propose(as_typed(text)):
            self.tell("it is in the prompt when the edit ends")

    async def copy(self, text: str) -> None:
        self.view.copy(text)

    async def attach_clipboard(self) -> None:
        await self.view.attach_clipboard()

    async def leave(self) -> None:
        workspace = self.workspace
        if names := ", ".join(pull.model for pull in self.pulls.running):
            question = f"Quitting stops the pull of {names}. Its partial files are kept; a new pull continues there."
            if not await self.confirm(question, yes="Quit"):
                return
        await workspace.answers.end()
        await self.pulls.end()
        problem, num_unsaved = workspace.store.problem, workspace.store.num_unsaved
        if problem and num_unsaved:
            question = f"{problem.message}. The last {num_unsaved:,} changes are not saved."
            if not await self.confirm(question, yes="Quit and lose them"):
                return
        self.app.exit()
