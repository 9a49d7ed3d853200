"""The commands about the chats of the list: pin, tag, archive, delete and bring back, and the statistics of all.

Owns what is asked and reported. The keys of the list act on any chat, the commands on the open one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from textual.app import App
from textual.markup import escape

from edgelm.base.errors import RequestError
from edgelm.chats.history import Chat
from edgelm.chats.store import Store
from edgelm.tui.chat_list import short_date
from edgelm.tui.dialogs.basic import Choice, PickScreen
from edgelm.tui.dialogs.stats_text import NO_ANSWERS
from edgelm.tui.dialogs.tags import TagScreen
from edgelm.tui.lines import clean
from edgelm.tui.screen_view import ScreenView
from edgelm.tui.tags import changed_tags, known_tags, with_marks
from edgelm.tui.workspace import TRASH_DAYS, Workspace

UNDO_S = 7.0  # for the notice with the way back


class ChatActions:
    """Runs the commands about chats of the list. Each may raise EdgeLMError."""

    def __init__(self, app: App[Any], workspace: Workspace, view: ScreenView) -> None:
        self._app = app
        self._workspace = workspace
        self._view = view
        self.by_name: dict[str, Callable[[str], Awaitable[None]]] = {
            "pin": lambda _: self._pin(self._open_chat()),
            "tag": lambda argument: self._tag(self._open_chat(), argument),
            "archive": lambda _: self._archive(self._open_chat()),
            "delete": lambda _: self._delete(self._open_chat()),
            "undo": self._undo,
            "trash": self._trash,
            "stats": self._statistics,
        }
        self._by_key: dict[str, Callable[[Chat], Awaitable[None]]] = {
            "pin": self._pin,
            "tag": self._tag,
            "archive": self._archive,
            "delete": self._delete,
            "menu": self._menu,
        }

    async def act(self, action: str, chat_id: int) -> None:
        """Do what a key of the list means for a chat. Raises EdgeLMError."""
        chat = self._workspace.chats.get(chat_id)
        if chat is None:
            raise RequestError("another window has made this chat", "open it first")
        await self._by_key[action](chat)

    def _open_chat(self) -> Chat:
        chat = self._workspace.session.chat
        if chat.id not in self._workspace.chats:
            raise RequestError("this chat is empty", "write a message")
        return chat

    async def _menu(self, chat: Chat) -> None:
        """Ask what to do with a chat."""
        choices = [
            Choice("pin", "Unpin" if chat.pinned else "Pin", "at the top of the list"),
            Choice("tag", "Tag", with_marks(chat.tags)),
            Choice("archive", "Take out of the archive" if chat.archived else "Put into the archive"),
            Choice("delete", "Delete", "it can be brought back"),
            *(Choice(f"#{tag}", f"Show all with #{tag}") for tag in chat.tags),
        ]
        chosen = await self._app.push_screen_wait(PickScreen(clean(chat.title), choices))
        if chosen is not None and chosen.startswith("#"):
            self._view.search(chosen)
        elif chosen is not None:
            await self._by_key[chosen](chat)

    async def _pin(self, chat: Chat) -> None:
        self._workspace.change_chat(chat.id, pinned=not chat.pinned)
        self._view.show_chats()

    async def _archive(self, chat: Chat) -> None:
        self._workspace.change_chat(chat.id, archived=not chat.archived)
        self._view.show_chats()
        self._notify("put into the archive, at the end of the list" if chat.archived else "taken out of the archive")

    async def _tag(self, chat: Chat, text: str = "") -> None:
        known = known_tags(self._workspace.chats.values())
        tags: tuple[str, ...] | None = changed_tags(chat.tags, text)
        if not text:
            tags = await self._app.push_screen_wait(TagScreen(chat.tags, known))
        if tags is not None:
            self._workspace.change_chat(chat.id, tags=tags)
            self._view.show_chats()
            self._notify(f"tags: {with_marks(tags)}" if tags else "no tags")

    async def _delete(self, chat: Chat) -> None:
        workspace = self._workspace
        await workspace.delete_chat(chat.id)
        if chat.id == workspace.session.chat.id:
            workspace.new_chat()
            self._view.show_new_chat(stay=True)
        else:
            self._view.show_chats()
        title = escape(clean(chat.title))
        way = "[bold underline @click=screen.run('undo')]/undo[/] or Ctrl+Z brings it back"
        self._app.notify(f"deleted: {title}\n{way}", timeout=UNDO_S)

    async def _undo(self, _argument: str) -> None:
        if not self._workspace.deleted:
            raise RequestError("no chat was deleted in this run", f"/trash has those of the last {TRASH_DAYS} days")
        await self._restore(self._workspace.deleted[-1])

    async def _trash(self, _argument: str) -> None:
        chats = await self._workspace.read(Store.deleted_chats)
        if not chats:
            raise RequestError(f"no chat was deleted in the last {TRASH_DAYS} days")
        choices = [Choice(str(chat.id), clean(chat.title), short_date(chat.deleted or 0.0)) for chat in chats]
        chosen = await self._app.push_screen_wait(PickScreen("Bring back a deleted chat", choices))
        if chosen is not None:
            await self._restore(int(chosen))

    async def _restore(self, chat_id: int) -> None:
        if not await self._workspace.restore_chat(chat_id):
            raise RequestError("this chat is gone", f"after {TRASH_DAYS} days in the trash a chat is deleted for good")
        self._view.show_new_chat(stay=True)
        self._notify(f"brought back: {clean(self._workspace.session.chat.title)}")

    async def _statistics(self, _argument: str) -> None:
        statistics = await self._workspace.statistics()
        if not statistics.total.answers:
            self._notify(NO_ANSWERS)
            return
        from edgelm.tui.dialogs.statistics import StatsScreen  # imports plotext

        await self._app.push_screen_wait(StatsScreen(statistics, len(self._workspace.chats)))

    def _notify(self, text: str) -> None:
        self._app.notify(text, markup=False)
