"""The commands of the plain chat about the list of chats: pin, tag, archive, delete and bring back, statistics.

Owns what each tells, in lines. Knows nothing of how chats are stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from edgelm.base.errors import RequestError
from edgelm.chats.history import Chat
from edgelm.chats.store import Store
from edgelm.tui.dialogs.stats_text import NO_ANSWERS, day_table, model_table, summary_lines
from edgelm.tui.tags import changed_tags, with_marks
from edgelm.tui.transcript.passages import one_line
from edgelm.tui.workspace import TRASH_DAYS

if TYPE_CHECKING:
    from edgelm.tui.plain.chat import PlainChat

WIDTH = 80  # cells of a table


class PlainChats:
    """Runs commands about chats. Each takes its argument, which may be empty, and may raise EdgeLMError."""

    def __init__(self, chat: PlainChat) -> None:
        self._chat = chat
        self._workspace = chat.workspace
        self._tell = chat.writer.line
        self._trashed: list[int] = []  # chats of the last list
        self.by_name: dict[str, Callable[[str], None]] = {
            "pin": self._pin,
            "tag": self._tag,
            "archive": self._archive,
            "delete": self._delete,
            "undo": self._undo,
            "trash": self._trash,
            "stats": self._statistics,
        }

    @property
    def _open_chat(self) -> Chat:
        chat = self._workspace.session.chat
        if chat.id not in self._workspace.chats:
            raise RequestError("this chat is empty", "write a message")
        return chat

    def _pin(self, _argument: str) -> None:
        chat = self._open_chat
        self._workspace.change_chat(chat.id, pinned=not chat.pinned)
        self._tell("pinned: it is listed first" if chat.pinned else "not pinned any more")

    def _archive(self, _argument: str) -> None:
        chat = self._open_chat
        self._workspace.change_chat(chat.id, archived=not chat.archived)
        self._tell("put into the archive" if chat.archived else "taken out of the archive")

    def _tag(self, argument: str) -> None:
        chat = self._open_chat
        if argument:
            self._workspace.change_chat(chat.id, tags=changed_tags(chat.tags, argument))
        self._tell(f"tags: {with_marks(chat.tags)}" if chat.tags else "no tags")

    def _delete(self, _argument: str) -> None:
        self._chat.wait(self._workspace.delete_chat(self._open_chat.id))
        self._workspace.new_chat()
        self._tell("deleted, /undo brings it back; this is a new chat")

    def _undo(self, _argument: str) -> None:
        """Bring back the chat that was deleted last in this run."""
        deleted = self._workspace.deleted
        if not deleted:
            raise RequestError("no chat was deleted in this run", "/trash lists those of earlier runs")
        self._restore(deleted[-1])

    def _trash(self, argument: str) -> None:
        """List the deleted chats, or bring back one of the list by its number."""
        if argument:
            if not argument.isdecimal() or not 1 <= int(argument) <= len(self._trashed):
                raise RequestError(f"there is no deleted chat {argument}", "/trash lists them")
            self._restore(self._trashed[int(argument) - 1])
            return
        chats = self._chat.wait(self._workspace.read(Store.deleted_chats))
        self._trashed = [chat.id for chat in chats]
        for number, chat in enumerate(chats, 1):
            date = time.strftime("%Y-%m-%d %H:%M", time.localtime(chat.deleted))
            self._tell(f"{number}. {one_line(chat.title)}, deleted {date}")
        self._tell("/trash NUMBER brings one back" if chats else f"no chat was deleted in the last {TRASH_DAYS} days")

    def _restore(self, chat_id: int) -> None:
        if not self._chat.wait(self._workspace.restore_chat(chat_id)):
            raise RequestError("this chat is gone", f"after {TRASH_DAYS} days in the trash a chat is deleted for good")
        self._tell(f"brought back: {one_line(self._workspace.session.chat.title)}")

    def _statistics(self, _argument: str) -> None:
        statistics = self._chat.wait(self._workspace.statistics())
        if not statistics.total.answers:
            self._tell(NO_ANSWERS)
            return
        lines = summary_lines(statistics, len(self._workspace.chats)) + model_table(statistics, WIDTH)
        for line in lines + day_table(statistics):
            self._tell(line)
