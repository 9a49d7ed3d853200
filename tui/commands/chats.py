"""The commands about chats: new ones, their titles and files, and what is done with those of the list.

Owns what is asked and told. The keys of the list act on any chat, the commands on the open one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from edgelm.base.errors import RequestError
from edgelm.chats.exports import export_chat, file_name, split_export
from edgelm.chats.history import Chat, Tree
from edgelm.chats.store import TRASH_DAYS
from edgelm.tui.chat_list import short_date
from edgelm.tui.commands.face import Face, numbered
from edgelm.tui.commands.messages import save_text
from edgelm.tui.dialogs.basic import Choice, PickScreen
from edgelm.tui.dialogs.stats_text import NO_ANSWERS, day_table, model_table, summary_lines
from edgelm.tui.dialogs.tags import TagScreen
from edgelm.tui.lines import clean
from edgelm.tui.screen_face import ScreenFace
from edgelm.tui.tags import changed_tags, known_tags, with_marks
from edgelm.tui.transcript.passages import one_line

WIDTH = 80  # cells of a table in lines


async def new(face: Face, _argument: str) -> None:
    """Open an empty chat."""
    face.workspace.new_chat()
    face.show("opened chat")
    face.mention("new chat")


async def reload(face: Face, _argument: str) -> None:
    """Show the open chat as another window has left it."""
    face.workspace.require_no_answer()
    chat = _open_chat(face)
    if not await face.workspace.open_chat(chat.id):
        raise RequestError("this chat is gone")
    face.show("opened chat")
    face.mention(f"read again, messages: {len(face.workspace.session.tree.path())}")


async def search(face: ScreenFace, argument: str) -> None:
    """Put the cursor into the search, with these words if there are any."""
    face.view.search(argument)


async def title(face: Face, argument: str) -> None:
    """Rename the open chat."""
    session = face.workspace.session
    text = argument or await face.line("Title of the chat", session.chat.title, "title: ")
    if text:
        session.rename(" ".join(text.split()))
        face.show("branch")
    face.mention(f"title: {session.chat.title}")


async def export(face: Face, argument: str) -> None:
    """Write the open chat to a file."""
    session = face.workspace.session
    form, name = split_export(argument)
    if not session.tree.messages:
        raise RequestError("there is nothing to export yet", "write a message")
    tree = Tree(session.tree.messages.values(), session.tree.leaf)  # an answer may be written meanwhile
    text = await asyncio.to_thread(export_chat, form, session.chat, tree)
    await save_text(face, "Export to", name, text, file_name(session.chat, form))


async def leave(face: Face, _argument: str) -> None:
    """End the chat."""
    await face.leave()


# The list of chats


async def pin(face: Face, _argument: str) -> None:
    """Pin the open chat at the top of the list, or unpin it."""
    await _pin(face, _open_chat(face))


async def tag(face: Face, argument: str) -> None:
    """Change the tags of the open chat."""
    await _tag(face, _open_chat(face), argument)


async def archive(face: Face, _argument: str) -> None:
    """Put the open chat into the archive, or take it out."""
    await _archive(face, _open_chat(face))


async def delete(face: Face, _argument: str) -> None:
    """Put the open chat into the trash."""
    await _delete(face, _open_chat(face))


def _open_chat(face: Face) -> Chat:
    chat = face.workspace.session.chat
    if chat.id not in face.workspace.chats:
        raise RequestError("this chat is empty", "write a message")
    return chat


async def act(face: ScreenFace, action: str, chat_id: int) -> None:
    """Do what a key of the list means for a chat. Raises EdgeLMError."""
    chat = face.workspace.chats.get(chat_id)
    if chat is None:
        raise RequestError("another window has made this chat", "open it first")
    if action == "menu":
        await _menu(face, chat)
    else:
        await _BY_KEY[action](face, chat)


async def _menu(face: ScreenFace, chat: Chat) -> None:
    """Ask what to do with a chat."""
    choices = [
        Choice("title", "Rename"),
        Choice("pin", "Unpin" if chat.pinned else "Pin", "at the top of the list"),
        Choice("tag", "Tag", with_marks(chat.tags)),
        Choice("archive", "Take out of the archive" if chat.archived else "Put into the archive"),
        Choice("delete", "Delete", "it can be brought back"),
        *(Choice(f"#{tag}", f"Show all with #{tag}") for tag in chat.tags),
    ]
    chosen = await face.app.push_screen_wait(PickScreen(clean(chat.title), choices))
    if chosen is not None and chosen.startswith("#"):
        face.view.search(chosen)
    elif chosen is not None:
        await _BY_KEY[chosen](face, chat)


async def _rename(face: Face, chat: Chat) -> None:
    text = await face.line("Title of the chat", chat.title, "title: ")
    if text:
        face.workspace.change_chat(chat.id, title=" ".join(text.split()), renamed=True)
        face.show("branch" if chat.id == face.workspace.session.chat.id else "chats")


async def _pin(face: Face, chat: Chat) -> None:
    face.workspace.change_chat(chat.id, pinned=not chat.pinned)
    face.show("chats")
    face.mention("pinned: it is listed first" if chat.pinned else "not pinned any more")


async def _archive(face: Face, chat: Chat) -> None:
    face.workspace.change_chat(chat.id, archived=not chat.archived)
    face.show("chats")
    put = face.either("put into the archive, at the end of the list", "put into the archive")
    face.tell(put if chat.archived else "taken out of the archive")


async def _tag(face: Face, chat: Chat, text: str = "") -> None:
    async def told() -> None:
        face.tell(_words(chat.tags))

    known = known_tags(face.workspace.chats.values())
    tags = changed_tags(chat.tags, text) if text else await face.ask(lambda: TagScreen(chat.tags, known), told)
    if tags is not None:
        face.workspace.change_chat(chat.id, tags=tags)
        face.show("chats")
        face.tell(_words(tags))


def _words(tags: tuple[str, ...]) -> str:
    return f"tags: {with_marks(tags)}" if tags else "no tags"


async def _delete(face: Face, chat: Chat) -> None:
    workspace = face.workspace
    await workspace.delete_chat(chat.id)
    if chat.id == workspace.session.chat.id:
        workspace.new_chat()
        face.show("next chat")
    else:
        face.show("chats")
    face.tell_deleted(chat.title)


_BY_KEY: dict[str, Callable[[Face, Chat], Awaitable[None]]] = {
    "title": _rename,
    "pin": _pin,
    "tag": _tag,
    "archive": _archive,
    "delete": _delete,
}


# The trash


async def undo(face: Face, _argument: str) -> None:
    """Bring back the chat that was deleted last in this run."""
    if not face.workspace.deleted:
        others = face.either(f"/trash has those of the last {TRASH_DAYS} days", "/trash lists those of earlier runs")
        raise RequestError("no chat was deleted in this run", others)
    await _restore(face, face.workspace.deleted[-1])


async def trash(face: Face, argument: str) -> None:
    """Bring back a deleted chat: one that is chosen, or the one of the told list that a number names."""
    if argument:
        trashed = face.listed.get("trash", [])
        await _restore(face, int(numbered(trashed, argument, "deleted chat", "/trash lists them")))
        return
    chats = await face.workspace.trash()
    if not chats:
        face.tell(f"no chat was deleted in the last {TRASH_DAYS} days")
        return

    async def told() -> None:
        face.listed["trash"] = [str(chat.id) for chat in chats]
        for number, chat in enumerate(chats, 1):
            date = time.strftime("%Y-%m-%d %H:%M", time.localtime(chat.deleted))
            face.tell(f"{number}. {one_line(chat.title)}, deleted {date}")
        face.tell("/trash NUMBER brings one back")

    choices = [Choice(str(chat.id), clean(chat.title), short_date(chat.deleted or 0.0)) for chat in chats]
    chosen = await face.ask(lambda: PickScreen("Bring back a deleted chat", choices), told)
    if chosen is not None:
        await _restore(face, int(chosen))


async def _restore(face: Face, chat_id: int) -> None:
    if not await face.workspace.restore_chat(chat_id):
        raise RequestError("this chat is gone", f"after {TRASH_DAYS} days in the trash a chat is deleted for good")
    face.show("next chat")
    face.tell(f"brought back: {one_line(face.workspace.session.chat.title)}")


async def stats(face: Face, _argument: str) -> None:
    """Show the statistics of all chats."""
    statistics = await face.workspace.statistics()
    num_chats = len(face.workspace.chats)
    if not statistics.total.answers:
        face.tell(NO_ANSWERS)
        return

    async def told() -> None:
        for line in (*summary_lines(statistics, num_chats), *model_table(statistics, WIDTH), *day_table(statistics)):
            face.tell(line)

    from edgelm.tui.dialogs.statistics import StatsScreen  # imports plotext

    await face.ask(lambda: StatsScreen(statistics, num_chats), told)
