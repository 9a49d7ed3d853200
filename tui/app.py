"""The terminal chat: the application around the chat screen.

Owns the theme, the command palette, the store of the chats and the link to the endpoint, and closes both. Knows
nothing of the content of chats.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual import _ansi_sequences, on
from textual.app import App
from textual.binding import Binding, BindingType
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.driver import Driver
from textual.events import Event, Key, Paste
from textual.keys import Keys
from textual.screen import Screen
from textual.theme import Theme

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.chats.store import ChatsError
from edgelm.chats.store_thread import StoreThread
from edgelm.chats.tools.consents import Consents
from edgelm.chats.tools.toolbox import Toolbox
from edgelm.client.link import Link
from edgelm.client.reader import Reader, SendQuestion
from edgelm.client.tool_runner import Asker, CallQuestion, LimitQuestion, Permit, ToolRunner
from edgelm.tui import terminal_input
from edgelm.tui.answers import failure_words
from edgelm.tui.commands.keymap import KeyMap, keymap_of
from edgelm.tui.commands.table import COMMANDS, Command
from edgelm.tui.lines import clean
from edgelm.tui.palette import readable_variables
from edgelm.tui.pulls import COMMAND
from edgelm.tui.screen import ChatScreen
from edgelm.tui.transcript import sixel
from edgelm.tui.transcript.kitty import QUESTION, KittyPictures, can_draw
from edgelm.tui.workspace import ChatDefaults

if TYPE_CHECKING:
    from edgelm.tui.dialogs.tools import AskScreen

CLOSE_S = 5.0
DIALOG_TURNS = 20  # of the event loop, from a key to the dialog of its command
FOCUS_WAITS = 100  # for the focus in a dialog: a machine that swaps loses seconds in one of them, not in all
FOCUS_WAIT_S = 0.02
SCREEN_CHARS = 500  # screen cuts a longer sequence
log = logging.getLogger(__name__)

# Some terminals send Alt+Enter as Escape and Return, or as xterm's "modified key". Textual reads both as Enter, which
# would send the message; they must break the line.
for _sequence in ("\x1b\r", "\x1b[27;3;13~", "\x1b[27;2;13~"):
    cast("dict[str, tuple[Keys, ...]]", _ansi_sequences.ANSI_SEQUENCES_KEYS).setdefault(_sequence, (Keys.ControlJ,))

terminal_input.install()


def passed_through(text: str, multiplexer: str) -> list[str]:
    """Return what lets tmux or screen pass a text on to the clipboard of their own terminal (OSC 52).

    tmux takes the bare sequence only with `set-clipboard on`, and this one with `allow-passthrough on`.
    """
    encoded = base64.b64encode(text.encode()).decode()
    if multiplexer == "tmux":
        return [f"\x1bPtmux;\x1b\x1b]52;c;{encoded}\x07\x1b\\"]
    if multiplexer == "screen":
        sequence = f"\x1b]52;c;{encoded}\x07"
        return [f"\x1bP{sequence[i : i + SCREEN_CHARS]}\x1b\\" for i in range(0, len(sequence), SCREEN_CHARS)]
    return []


class ChatCommands(Provider):
    """The commands of the prompt, for the palette; none of them while a dialog is open."""

    @property
    def _commands(self) -> Sequence[Command]:
        return COMMANDS if isinstance(self.screen, ChatScreen) else ()

    async def discover(self) -> Hits:
        for command in self._commands:
            shown = self._with_key(Content(f"/{command.name}"), command)
            yield DiscoveryHit(shown, partial(self._run, command.name), f"/{command.name}", command.help)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for command in self._commands:
            score = matcher.match(f"/{command.name} {command.help}")
            if score > 0:
                shown = self._with_key(matcher.highlight(f"/{command.name}"), command)
                yield Hit(score, shown, partial(self._run, command.name), f"/{command.name}", command.help)

    def _with_key(self, name: Content, command: Command) -> Content:
        key = keymap_of(self.app).key_of(command.name)
        return Content.assemble(name, (f"  {key}", "$text-muted")) if key else name

    def _run(self, name: str) -> None:
        assert isinstance(self.screen, ChatScreen)
        self.screen.run_command(name, "")


class ScreenAsker(Asker):
    """Asks in dialogs, whatever chat is on the screen: they name the chat."""

    def __init__(self, app: App[Any]) -> None:
        self._app = app

    async def may_call(self, question: CallQuestion) -> Permit:
        from edgelm.tui.dialogs.tools import CallScreen  # after the first paint

        return await self._ask(CallScreen(question))

    async def may_go_on(self, question: LimitQuestion) -> bool:
        from edgelm.tui.dialogs.tools import LimitScreen

        return await self._ask(LimitScreen(question)) == "once"

    def tell(self, error: EdgeLMError) -> None:
        self._app.notify(clean(str(error)), severity="error", timeout=10, markup=False)

    async def _ask(self, dialog: AskScreen) -> Permit:
        """Return the dialog's result. It is closed where nobody waits for that any more: the answer was stopped."""
        try:
            return await self._app.push_screen_wait(dialog)
        except asyncio.CancelledError:
            if dialog in self._app.screen_stack:
                dialog.abandon()
            raise


class ChatApp(App[None], inherit_bindings=False):
    """The terminal chat."""

    TITLE = "edgelm"
    # Textual's own, with the ids of our rows: the user's keys move both.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+p", "command_palette", show=False, priority=True, id="app.command_palette"),
        Binding("ctrl+q", "quit", show=False, priority=True, id="run('quit')"),
        Binding("ctrl+c", "help_quit", show=False, system=True, id="interrupt"),
    ]
    COMMANDS: ClassVar[Any] = {ChatCommands}
    NOTIFICATION_TIMEOUT = 4
    CSS = """
    ToastRack { dock: top; margin-top: 1; }  /* below the title and the row of what is set */
    Toast { max-width: 60; }
    """

    def __init__(
        self,
        chats: Path,
        link: Link,
        defaults: ChatDefaults,
        pull_command: Sequence[str] = COMMAND,
        *,
        knowledge: Path | None = None,
        bandwidth: Callable[[], float] = lambda: 0.0,
        themes: Sequence[Theme] = (),
        keymap: KeyMap | None = None,
        toolbox: Toolbox | None = None,
        multiplexer: str = "",
        suggested_model: Callable[[], str | None] = lambda: None,
        copy: Callable[[str], None] | None = None,
    ) -> None:
        """`knowledge` is the file of the index; it is made beside the chats where none is given.

        `themes` and `keymap` are the user's own. `multiplexer`: tmux or screen, where the chat runs in one.

        `bandwidth` measures this machine's memory, in bytes per second; 0: not known. `suggested_model` returns the
        model of the catalogue that suits it. `copy` puts a text on the clipboard of this machine, or raises
        RequestError; None: the terminal is on another machine.
        """
        super().__init__()
        for theme in themes:
            self.register_theme(theme)
        self.keymap = keymap or KeyMap()
        self.set_keymap(self.keymap.textual)
        self._link = link
        self._loop: asyncio.AbstractEventLoop | None = None
        self._store = StoreThread(chats, self._report_problem)
        self._reader = Reader(knowledge or chats.with_name("knowledge.db"), link, self._ask_to_send)
        self._toolbox = toolbox or Toolbox(Consents(chats.with_name("tool_consents.json")))
        tools = ToolRunner(self._toolbox, ScreenAsker(self))
        self._chat = ChatScreen(
            self._store, link, self._reader, defaults, pull_command, bandwidth, tools, suggested_model
        )
        self._multiplexer = multiplexer
        self._pictures: KittyPictures | sixel.SixelPictures | None = None  # of a terminal that draws them
        self._terminal = sixel.SixelTerminal()
        self._copy = copy
        self._copying = asyncio.Lock()  # a text is not replaced by one that was copied before it
        self.num_lost = 0  # changes that were not saved when the app ended
        self.failure = ""  # the exception that ended the app, on one line

    def get_css_variables(self) -> dict[str, str]:
        self.theme_variables = readable_variables(self.current_theme, super().get_css_variables())
        return self.theme_variables

    def get_default_screen(self) -> Screen[None]:
        return self._chat

    async def on_event(self, event: Event) -> None:
        if isinstance(event, Key | Paste) and not event.is_forwarded:
            await self._dialog_opens()
        await super().on_event(event)

    async def _dialog_opens(self) -> None:
        """Wait for the dialog of a command that the last key began: what is typed next is not for the prompt."""
        command, self._chat.begun = self._chat.begun, None
        if command is None:
            return
        for _ in range(DIALOG_TURNS):
            if command.is_finished or self.screen is not self._chat:
                break
            await asyncio.sleep(0)
        if self.screen is not self._chat:
            has_focus = asyncio.Event()
            self.screen.call_later(has_focus.set)  # behind the event that gives the focus
            for _ in range(FOCUS_WAITS):
                with suppress(TimeoutError):
                    await asyncio.wait_for(has_focus.wait(), FOCUS_WAIT_S)
                    break

    def on_mount(self) -> None:
        self._loop = asyncio.get_running_loop()
        # A terminal of 16 colours shows a theme of 16 million badly.
        if not self.is_headless and self.console.color_system in (None, "standard"):
            self.theme = "ansi-dark"
        # The answers come as messages, or never.
        if not self.is_headless and self.console.color_system in ("truecolor", "256") and not self.no_color:
            self._write(QUESTION + sixel.QUESTION)

    def _write(self, sequence: str) -> None:
        if self._driver is not None:
            self._driver.write(sequence)

    @on(terminal_input.TerminalAnswer)
    def _know_terminal(self, message: terminal_input.TerminalAnswer) -> None:
        if isinstance(self._pictures, KittyPictures):
            return
        pictures: KittyPictures | sixel.SixelPictures | None = None
        for answer in ("" if self.is_headless else sixel.known_size(), message.answer):
            pictures = self._terminal.take(answer, *self.size) or pictures
        # Only a cell's colour of 24 bits can name a picture.
        if can_draw(message.answer) and self.console.color_system != "256":
            pictures = KittyPictures(self._write)
        if pictures is not None:
            self._pictures = pictures
            self._chat.pane.transcript.draw_pictures(pictures)

    def on_resize(self) -> None:
        """Ask again how large a cell is: a larger font is also a smaller screen."""
        if isinstance(self._pictures, sixel.SixelPictures):
            self._write(sixel.CELL_QUESTION)

    @on(Driver.SignalResume)
    def _draw_again(self) -> None:
        """Draw all after `fg`: the screen is empty then, and Textual would draw only what changes."""
        if isinstance(self._pictures, KittyPictures):
            self._pictures.forget()
            self._chat.pane.transcript.draw_pictures(self._pictures)
        self.refresh(layout=True)

    def _fatal_error(self) -> None:
        """Log the exception. Textual's own method prints it with the values of all variables: texts of the chats."""
        error = sys.exc_info()[1] or self._exception
        log.critical("the chat ended", exc_info=error)
        self.failure = self.failure or failure_words(error)
        self._close_messages_no_wait()

    async def action_quit(self) -> None:
        self._chat.run_command("quit", "")

    def copy_to_clipboard(self, text: str) -> None:
        """Put a text on the clipboard of the person at the terminal, also through tmux and screen.

        A terminal may take none, such as GNOME's: on this machine, a program of the desktop gets the text, too.
        """
        super().copy_to_clipboard(text)
        for sequence in passed_through(text, self._multiplexer):
            self._write(sequence)
        if self._copy is not None:
            self.run_worker(self._copy_here(self._copy), group="copying")

    async def _copy_here(self, copy: Callable[[str], None]) -> None:
        async with self._copying:
            with suppress(RequestError):  # no program copies: the terminal may have
                await asyncio.to_thread(copy, self.clipboard)

    async def _ask_to_send(self, question: SendQuestion) -> bool:
        from edgelm.tui.dialogs.knowledge import SendScreen  # after the first paint

        return await self.push_screen_wait(SendScreen(question))

    def _report_problem(self, problem: ChatsError | None) -> None:
        """Pass on a report of the store's thread, which may come before the screen exists and after it is gone."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._show_problem, problem)

    def _show_problem(self, problem: ChatsError | None) -> None:
        if self._chat.is_mounted:
            self._chat.view.show_store_problem(problem)

    async def on_unmount(self) -> None:
        self._chat.save_unsent()
        self.num_lost = await asyncio.to_thread(self._store.close, CLOSE_S)
        await asyncio.to_thread(self._reader.thread.close)
        await self._toolbox.close()
        await self._link.close()
