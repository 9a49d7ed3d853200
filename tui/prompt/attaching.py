"""The files of the message being written: read, counted, shown on the bar, and checked before they are sent.

Owns the list of attachments, the notices about files that changed since they were sent, and the order of reading and
sending. Knows nothing of keys and of how a file is chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.base.workers.parent import in_daemon_thread
from edgelm.chats.attached_files import Read, State, pasted, read_attachment, state_of
from edgelm.chats.attachments import Attachment
from edgelm.chats.clipboard import clipboard_picture
from edgelm.chats.history import Message
from edgelm.client.session import Session, on_disk
from edgelm.library.progress import size_text
from edgelm.tui.prompt.files_bar import Chip, FilesBar, Use
from edgelm.tui.prompt.outgoing import Item, Outgoing
from edgelm.tui.prompt.room import Room, context_size, counted, require_sight, room
from edgelm.tui.transcript.attachment_rows import tokens_words
from edgelm.tui.transcript.passages import one_line
from edgelm.tui.workspace import Workspace

LOOK_WAIT_S = 2.0  # for the files of the branch on screen, before a message is sent without a look at them

Run = Callable[[Coroutine[Any, Any, None]], object]


@dataclass(frozen=True, slots=True)
class Notice:
    """A file that was sent with a message of the branch, and is not as it was."""

    attachment: Attachment
    state: State

    @property
    def words(self) -> str:
        return "has changed" if self.state == "changed" else "is gone"


class Attaching:
    """The attachments of the message being written. `run` starts a worker; `tell` and `complain` show a line."""

    def __init__(
        self, workspace: Workspace, run: Run, tell: Callable[[str], None], complain: Callable[[EdgeLMError], None]
    ) -> None:
        self.bar = FilesBar()
        self._workspace = workspace
        self._run = run
        self._tell = tell
        self._complain = complain
        self._items: list[Item] = []
        self._notices: list[Notice] = []
        self._passed: set[tuple[str, str, State]] = set()  # notices that the user has seen: path, digest, state
        self._size: int | None = None  # of the context
        self._session: Session | None = None  # whose files were looked at
        self._edited: Message | None = None  # the message whose new version is written
        self._confirmed: tuple[object, ...] = ()  # a message that is too long, and that the user sends again

    @property
    def items(self) -> tuple[Item, ...]:
        """Return the files of the message being written."""
        return tuple(item for item in self._items if not item.is_taken)

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        return self.attachments_of(self.items)

    def attachments_of(self, items: Iterable[Item]) -> tuple[Attachment, ...]:
        """Return what was read of these; of those that were taken off meanwhile, nothing."""
        return tuple(item.attachment for item in items if item.attachment is not None and item in self._items)

    # What is attached

    def set(self, items: Iterable[Item], edited: Message | None = None, *, keep: bool = False) -> None:
        """Replace the files of the message being written; `keep` puts these before them.

        Those that were read meanwhile are counted, and those that could not be read are left out.
        """
        taken = [item for item in self._items if item.is_taken]
        others = self.items if keep else ()
        self._items = [*taken, *(item for item in items if not item.failed), *others]
        self._edited = edited
        self._show()
        if self._items:
            self._run(self._measure(self.items))

    def add_path(self, path: str) -> None:
        """Attach the file or folder at an absolute path; one that is attached already is read again."""
        item = next((item for item in self.items if item.path == path), None)
        if item is None:
            item = Item(path)
            self._items.append(item)
        item.attachment = None
        item.read.clear()
        self._show()
        self._run(self._read(item))

    def add_text(self, text: str) -> None:
        """Attach a pasted text."""
        self.add(pasted(text, self._next_number()))

    def add(self, attachment: Attachment) -> Item:
        """Attach a text that has no file."""
        item = Item("", attachment)
        self._items.append(item)
        self._show()
        self._run(self._measure((item,)))
        return item

    async def add_clipboard(self) -> None:
        """Attach the picture on the clipboard. Raises EdgeLMError."""
        number, item = self._next_number(), Item("")
        self._items.append(item)
        self._show()
        await self._fill(item, lambda: Read(clipboard_picture(number)))

    def _next_number(self) -> int:
        """Return the number of the next attachment that has no file."""
        return 1 + sum(not file.path for file in (*self._sent(), *(item.attachment or item for item in self._items)))

    def _sent(self) -> list[Attachment]:
        """Return the attachments of the branch on screen."""
        return [attachment for message in self._workspace.session.tree.path() for attachment in message.attachments]

    def remove(self, index: int) -> None:
        """Take a chip off the bar: an attachment, or a notice."""
        if index < len(self._items):
            self._items.pop(index).read.set()
        elif index - len(self._items) < len(self._notices):
            self._pass(self._notices.pop(index - len(self._items)))
        self._show()

    def remove_last(self) -> None:
        """Take off the last file of the message being written, if there is one."""
        if self.items:
            self.remove(self._items.index(self.items[-1]))

    def use(self, index: int) -> str:
        """Attach the new version of a changed file, or take a pasted text off and return it for the prompt."""
        if index < len(self._items):
            attachment = self._items[index].attachment
            self.remove(index)
            return attachment.text if attachment is not None else ""
        notice = self._notices[index - len(self._items)]
        self.remove(index)
        self.add_path(notice.attachment.path)
        return ""

    async def _read(self, item: Item) -> None:
        try:
            await self._fill(item, lambda: read_attachment(item.path))
        except EdgeLMError as error:
            self._complain(error)

    async def _fill(self, item: Item, read: Callable[[], Read]) -> None:
        """Read what an item stands for, and count it. Raises EdgeLMError, and takes it off, where that fails."""
        try:
            content: Read = await in_daemon_thread(read)
            await require_sight(self._workspace.link, self._workspace.model, (content.attachment,))
        except EdgeLMError:
            item.failed = True
            self.drop((item,))
            item.read.set()
            raise
        item.attachment = content.attachment
        if content.note:
            self._tell(f"{one_line(content.attachment.name)}: {content.note}")
        item.read.set()
        self._show()
        await self._measure((item,))

    async def _measure(self, items: Sequence[Item]) -> None:
        """Count the tokens of attachments, and what is left of the context."""
        workspace = self._workspace
        if self._size is None:  # counting may start the model's engine first
            self._size = await context_size(workspace.link, workspace.session, workspace.model)
            self._show()
        for item in items:
            if (before := item.attachment) is not None and not before.tokens and item in self._items:
                after = await counted(workspace.link, workspace.model, before)
                if item.attachment is before:
                    item.attachment = after
        self._size = await context_size(workspace.link, workspace.session, workspace.model)
        self._show()

    # The bar

    def _room(self, session: Session, parent: int | None, items: Iterable[Item], text: str = "") -> Room | None:
        """Return the tokens of the context that a message leaves free; None if its size is not known."""
        if self._size is None:
            return None
        return room(self._size, session, parent, self.attachments_of(items), text)

    def _show(self) -> None:
        session = self._workspace.session
        parent = session.tree.leaf if self._edited is None else self._edited.parent
        left = self._room(session, parent, self._items) if self._items else None
        chips = [*map(_chip, self._items), *map(_notice_chip, self._notices)]
        self.bar.show(chips, left.words if left else "", too_long=left is not None and left.left < 0)

    # Files that changed

    def look(self, session: Session) -> None:
        """Look for files of the branch on screen that changed since they were sent."""
        if session is not self._session:
            self._session, self._notices = session, []
            self._show()
        if on_disk(session):
            self._run(self._look_quietly(session))

    async def _look_quietly(self, session: Session) -> None:
        await self._look(session)

    async def _look(self, session: Session) -> bool:
        """Update the notices; return whether there is a new one. Files on a disk that hangs count as before."""
        files = on_disk(session)
        try:
            looked = in_daemon_thread(lambda: [state_of(attachment) for attachment in files])
            states = await asyncio.wait_for(looked, LOOK_WAIT_S)
        except TimeoutError:
            return False
        if session is not self._workspace.session:
            return False
        attached = {item.path: item.attachment for item in self._items}
        before = {_key(notice) for notice in self._notices}
        notices = [Notice(file, state) for file, state in zip(files, states, strict=True) if state != "same"]
        self._notices = [
            notice
            for notice in notices
            if attached.get(notice.attachment.path, notice.attachment) is notice.attachment  # or else a newer version
            and _key(notice) not in self._passed
        ]
        self._show()
        return any(_key(notice) not in before for notice in self._notices)

    def _pass(self, notice: Notice) -> None:
        self._passed.add(_key(notice))

    # Before a message is sent

    @property
    def must_check(self) -> bool:
        """Tell whether a message has to wait for `check`."""
        return bool(self._items) or bool(on_disk(self._workspace.session))

    def take(self) -> list[Item]:
        """Return the files of the message being written, which is sent, and keep them for it."""
        items = list(self.items)
        for item in items:
            item.is_taken = True
        return items

    def give_back(self, items: Iterable[Item]) -> None:
        """Let files be those of the message being written: theirs is not sent."""
        for item in items:
            item.is_taken = False

    def put_aside(self, items: Iterable[Item]) -> list[Item]:
        """Take files off the bar until `set` puts them back; return those that were on it."""
        aside = [item for item in items if item in self._items]
        self.drop(aside)
        return aside

    def drop(self, items: Iterable[Item]) -> None:
        """Take the files of a message that was sent off the bar."""
        self._items = [item for item in self._items if item not in items]
        self._show()

    async def check(self, message: Outgoing) -> bool:
        """Wait until the files of a message are read; return False where one cannot be read, which is told.

        Raises RequestError where the user should see something before sending, or where it would go elsewhere.
        """
        self._workspace.require_no_answer(message.session)
        items = message.files
        for item in items:
            if item.attachment is None:
                await item.read.wait()
        if any(item.failed for item in items):
            return False
        message.require_place(self._workspace.session)
        await require_sight(self._workspace.link, self._workspace.model, self.attachments_of(items))
        if await self._look(message.session):
            names = ", ".join(f"{one_line(notice.attachment.name)} {notice.words}" for notice in self._notices)
            raise RequestError(names, "Enter sends all the same; Shift+Tab and Enter attach a changed file again")
        left = self._room(message.session, message.parent, items, message.text) if items else None
        seen = (message.text, *map(id, self.attachments_of(items)))
        if left is not None and left.left < 0 and self._confirmed != seen:
            self._confirmed = seen
            raise RequestError(f"the message is {left.words}", "take a file off, or press Enter again to send it")
        return True


def _chip(item: Item) -> Chip:
    attachment = item.attachment
    if attachment is None:
        return Chip(item.path.rpartition("/")[2] or "picture", "is read …")
    name = one_line(attachment.name)
    if attachment.kind == "image":
        return Chip(name, f"picture, {size_text(attachment.size)}, {tokens_words(attachment)}")
    return Chip(name, tokens_words(attachment), "" if attachment.path else "as text")


def _notice_chip(notice: Notice) -> Chip:
    use: Use = "attach again" if notice.state == "changed" else ""
    return Chip(one_line(notice.attachment.name), notice.words, use, is_notice=True)


def _key(notice: Notice) -> tuple[str, str, State]:
    return notice.attachment.path, notice.attachment.digest, notice.state
