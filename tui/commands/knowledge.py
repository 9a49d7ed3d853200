"""The commands about knowledge: what a chat reads for its questions, and questions about edgelm itself.

Owns what is asked and told. How passages are found for a question is in client/reader.py.
"""

from __future__ import annotations

import asyncio

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.chats.knowledge import GUIDE
from edgelm.chats.knowledge.index import Refreshed
from edgelm.client.reader import names_of, size_words
from edgelm.client.session import Session
from edgelm.tui.commands.face import Face
from edgelm.tui.commands.table import PLAIN_COMMANDS, PLAIN_NOTES, HelpScreen
from edgelm.tui.dialogs.knowledge import Entry, KnowledgeScreen
from edgelm.tui.prompt.paths import absolute_path
from edgelm.tui.transcript.passages import one_line


async def help_page(face: Face, argument: str) -> None:
    """Ask about edgelm, with the guide as the knowledge of this question; without one, show keys and commands."""

    async def told() -> None:
        for command in PLAIN_COMMANDS:
            face.tell(f"{command.usage}: {command.help}")
        for note in PLAIN_NOTES:
            face.tell(note)

    if argument:
        await face.send(argument, (GUIDE,))
    else:
        await face.ask(lambda: HelpScreen(face.keymap.groups), told)


async def know(face: Face, argument: str) -> None:
    """List, add or remove what this chat reads."""
    verb, _, path = argument.partition(" ")
    if not argument:
        await _list(face)
    elif verb == "off":
        await _remove(face, path.strip())
    else:
        await _add(face, argument)


async def _add(face: Face, argument: str) -> None:
    """Index a file or folder, and read it for the questions of this chat from now on."""
    session = face.workspace.session
    root = argument if argument == GUIDE else await asyncio.to_thread(absolute_path, argument)
    refreshed = await _refresh(face, root)
    if not refreshed.num_passages:
        reason = refreshed.left_out[0].reason if refreshed.left_out else "it is empty"
        raise RequestError(f"there is nothing to read in {root}: {reason}", "give text, Markdown or code")
    _now(face, session).add_knowledge(root)
    count = f"{len(refreshed.left_out):,}"
    left_out = face.either(f"; {count} left out: /know shows why", f", {count} files left out")
    face.tell(f"{names_of((root,))}: {size_words(refreshed)}{left_out if refreshed.left_out else ''}")


async def _remove(face: Face, path: str) -> None:
    session = face.workspace.session
    known = session.chat.knowledge
    if not known:
        raise RequestError("this chat has no knowledge", "/know PATH adds a file or folder")
    root = path if path in known else await asyncio.to_thread(absolute_path, path) if path else ""
    if root and root not in known:
        raise RequestError(f"{root} is no knowledge of this chat", "/know shows what is")
    _forget(face, session, (root,) if root else known)


def _forget(face: Face, session: Session, roots: tuple[str, ...]) -> None:
    session.remove_knowledge(roots)
    face.tell(f"{names_of(roots)} will not be read any more")


def _now(face: Face, session: Session) -> Session:
    """Return the session of the same chat: while files were read, the user may have opened it again."""
    opened = face.workspace.session
    return opened if opened.chat.id == session.chat.id else session


async def _list(face: Face) -> None:
    session = face.workspace.session
    if not session.chat.knowledge:
        raise RequestError("this chat has no knowledge", "/know PATH adds a file or folder")
    entries = [await _look(face, root) for root in session.chat.knowledge]

    async def told() -> None:
        for entry in entries:
            if entry.refreshed is None:
                face.complain(EdgeLMError(entry.error))
            else:
                count = len(entry.refreshed.left_out)
                left_out = f", {count:,} files left out" if count else ""
                face.tell(f"{entry.root}: {names_of((entry.root,))}: {size_words(entry.refreshed)}{left_out}")

    removed = await face.ask(lambda: KnowledgeScreen(entries), told)
    if removed is not None:
        _forget(face, _now(face, session), (removed,))


async def _look(face: Face, root: str) -> Entry:
    try:
        return Entry(root, await _refresh(face, root))
    except EdgeLMError as error:
        return Entry(root, error=str(error))


async def _refresh(face: Face, root: str) -> Refreshed:
    """Index what is new and changed in a file or folder, with its progress told."""
    activity = f"reading {one_line(names_of((root,)))}"
    work = face.reader.thread.run(lambda knowledge: knowledge.refresh((root,)), face.show_activity, activity)
    return await face.wait(activity, work)
