"""The face of the chat that a command runs on: the full screen, or plain lines.

Owns the form of what a command asks, tells and shows. A command is one function over it; one that makes sense on one
face only says so in the table.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.chats.attachments import Attachment
from edgelm.chats.history import Message
from edgelm.client.reader import Reader
from edgelm.tui.commands.keymap import KeyMap
from edgelm.tui.pulls import Pulls
from edgelm.tui.workspace import Workspace

if TYPE_CHECKING:
    from textual.screen import ModalScreen

T = TypeVar("T")

# The open chat from its end; its branch, without scrolling; a chat that was just opened, in the second case without
# taking the keys from the list of chats; all around the chat; the list of chats; the model; the cursor in the prompt.
Part = Literal["chat", "branch", "opened chat", "next chat", "around", "chats", "model", "prompt"]


class Face(Protocol):
    """What a command needs. Each method may raise EdgeLMError."""

    workspace: Workspace
    reader: Reader
    pulls: Pulls
    listed: dict[str, list[str]]  # the lists that were told last: the next command takes their numbers

    @property
    def keymap(self) -> KeyMap: ...

    def either(self, on_screen: T, in_lines: T) -> T:
        """Return the one for this face."""

    def tell(self, text: str) -> None:
        """Tell what was done."""

    def mention(self, text: str) -> None:
        """Tell what the full screen shows by itself."""

    def tell_deleted(self, title: str) -> None:
        """Tell that a chat was deleted, and what brings it back."""

    def complain(self, error: EdgeLMError) -> None:
        """Tell an error, after which the command goes on."""

    def show(self, *parts: Part) -> None:
        """Show these parts in their present state."""

    def show_activity(self, activity: str) -> None:
        """Show the progress of what is waited for."""

    async def connect(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the endpoint."""

    async def wait(self, activity: str, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work that may take long, with its activity shown."""

    async def ask(self, dialog: Callable[[], ModalScreen[T]], in_lines: Callable[[], Awaitable[T]]) -> T:
        """Return what the user chooses in a dialog, or in lines; None where it is cancelled, or where lines tell what
        can be chosen by the command's argument.
        """

    async def line(self, title: str, text: str, prompt: str = "") -> str | None:
        """Return a line that the user edits; None where it is cancelled. Lines without a `prompt` keep it."""

    async def confirm(self, in_line: str, question: str = "", yes: str = "Yes") -> bool:
        """Ask for yes or no: in a line, or by a dialog with a `question` and the label of its yes."""

    async def send(self, text: str, roots: tuple[str, ...] = ()) -> None:
        """Send a message in the open chat; `roots` are read for it instead of the chat's knowledge."""

    async def edit(self, message: Message) -> None:
        """Let the user write a new version of a message."""

    async def attach(self, path: str) -> None:
        """Attach a file or folder to the next message; without a path, show what can be or is attached."""

    async def add(self, attachment: Attachment) -> None:
        """Attach a text to the next message."""

    async def propose(self, text: str) -> None:
        """Let the user send a text of somebody else, or not: it never runs a command."""

    async def copy(self, text: str) -> None:
        """Put a text on the user's clipboard."""

    async def attach_clipboard(self) -> None:
        """Attach the picture on the clipboard to the next message."""

    async def leave(self) -> None:
        """End the chat."""


def numbered(items: list[str], argument: str, noun: str, hint: str) -> str:
    """Return the item of a told list that a number names. Raises RequestError."""
    if not argument.isdecimal() or not 1 <= int(argument) <= len(items):
        raise RequestError(f"there is no {noun} {argument}".rstrip(), hint)
    return items[int(argument) - 1]
