"""The commands of plain lines only: lists whose numbers the next command takes, and what the screen always shows.

Owns what each tells, in lines. Those that both faces have are in tui/commands.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from edgelm.base.errors import RequestError
from edgelm.base.places import own_environment
from edgelm.chats.history import Chat, Message
from edgelm.chats.store import Store
from edgelm.client.answer_stream import stats_from_json
from edgelm.library.catalog import hub_reference
from edgelm.tui.commands.face import numbered
from edgelm.tui.commands.models import no_pull_reason, tell_end
from edgelm.tui.lines import short_name
from edgelm.tui.plain.answer import figures, note_of
from edgelm.tui.plain.face import PlainFace
from edgelm.tui.prompt.editor import edit_text, editor_command
from edgelm.tui.tags import with_marks
from edgelm.tui.transcript.finding import Finding

MAX_LISTED = 20  # chats
SNIPPET = 60  # characters before and after what was found


async def search(face: PlainFace, argument: str) -> None:
    """List the chats that have these words."""
    if not argument:
        raise RequestError("there is nothing to search for", "write /search WORDS")
    hits = await face.workspace.search(argument)
    if not hits:
        face.tell(f"no chat has {argument}")
    _keep_list(face, [(hit.chat, hit.message) for hit in hits[:MAX_LISTED]])
    for number, hit in enumerate(hits[:MAX_LISTED], 1):
        snippet = " ".join(re.sub("[\x02\x03]", "", hit.snippet).split())
        text = "" if hit.message is None else f": {snippet}"
        face.tell(f"{number}. {hit.chat.title}{text}")
    if len(hits) > MAX_LISTED:
        face.tell(f"and {len(hits) - MAX_LISTED:,} more; add a word")


async def chats(face: PlainFace, _argument: str) -> None:
    """List the newest chats."""
    saved = await face.workspace.read(Store.chats)
    listed = sorted((chat for chat in saved if not chat.archived), key=lambda chat: not chat.pinned)
    if not listed:
        face.tell("there are no chats yet")
    _keep_list(face, [(chat, None) for chat in listed[:MAX_LISTED]])
    for number, chat in enumerate(listed[:MAX_LISTED], 1):
        marks = ["pinned" if chat.pinned else "", "open" if chat.id == face.workspace.session.chat.id else ""]
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(chat.changed))
        face.tell(f"{number}. {', '.join(filter(None, [chat.title, date, with_marks(chat.tags), *marks]))}")
    if len(listed) > MAX_LISTED:
        face.tell(f"and {len(listed) - MAX_LISTED:,} more; /search WORDS finds them")
    if len(listed) < len(saved):
        face.tell(f"and {len(saved) - len(listed):,} in the archive; /search finds them")


def _keep_list(face: PlainFace, entries: Sequence[tuple[Chat, int | None]]) -> None:
    face.listed["chats"] = [str(chat.id) for chat, _ in entries]
    face.messages = [message for _, message in entries]


async def open_chat(face: PlainFace, argument: str) -> None:
    """Open a chat of the last list."""
    chat_id = numbered(face.listed.get("chats", []), argument, "chat", "/chats or /search WORDS lists them")
    message_id = face.messages[int(argument) - 1]
    if not await face.workspace.open_chat(int(chat_id), message_id):
        raise RequestError("this chat is gone")
    session = face.workspace.session
    path = session.tree.path()
    face.tell(f"{session.chat.title}, messages: {len(path)}")
    place = next((i for i, message in enumerate(path) if message.id == message_id), len(path) - 1)
    _read_messages(face, path[max(place - (path[place].role == "assistant"), 0) : place + 1] if path else [])


async def find(face: PlainFace, argument: str) -> None:
    """Tell the messages of the open chat that have these words."""
    if not argument:
        raise RequestError("there is nothing to find", "write /find WORDS")
    finding, path = Finding(argument), face.workspace.session.tree.path()
    found = [number for number, message in enumerate(path, 1) if finding.may_be_in(message.text)]
    for number in found:
        message = path[number - 1]
        face.tell(f"message {number} of {len(path)}, {_author(message)}: {finding.snippet(message.text, SNIPPET)}")
    if not found:
        face.tell(f"no message of this chat has {argument}")


async def read(face: PlainFace, argument: str) -> None:
    """Tell the last messages again."""
    count = int(argument) if argument.isdecimal() else 1
    path = face.workspace.session.tree.path()
    if not path:
        raise RequestError("there is nothing to read yet", "write a message")
    _read_messages(face, path[-count:] if count else [])


def _read_messages(face: PlainFace, messages: Sequence[Message]) -> None:
    for message in messages:
        face.tell(f"{_author(message)}: {message.text.strip()}")
        face.files.tell(message.attachments)
        if message.role == "assistant" and (note := note_of(message)):
            face.tell(note)


def _author(message: Message) -> str:
    return "you" if message.role == "user" else short_name(message.model) or "assistant"


async def pull(face: PlainFace, model: str) -> None:
    """Pull a model, which then answers the open chat."""
    if reason := no_pull_reason(face):
        raise RequestError(reason)
    if not model or model == "stop":
        raise RequestError("a pull needs a name", "write /pull NAME; Ctrl+C stops it")
    hub_reference(model)  # raises at once where the name is misspelt
    face.tell(f"pulling {model}")
    await tell_end(face, await face.pull(model))


async def reasoning(face: PlainFace, _argument: str) -> None:
    """Read the model's reasoning, or stop that."""
    face.reads_reasoning = not face.reads_reasoning
    face.tell("reasoning is read" if face.reads_reasoning else "reasoning is not read")


async def status(face: PlainFace, _argument: str) -> None:
    """Tell the model, the endpoint, and the figures of the last answer."""
    workspace = face.workspace
    face.tell(f"model: {short_name(workspace.model) or 'none'}")
    face.tell(f"endpoint: {workspace.link.remote or 'this machine'}")
    measured = [message.stats for message in workspace.session.tree.path() if message.stats]
    stats = stats_from_json(measured[-1]) if measured else None
    for figure in figures(stats) if stats is not None else ():
        face.tell(figure)
    if problem := workspace.store.problem:
        face.writer.error(f"not saved: {problem}")


async def editor(face: PlainFace, _argument: str) -> None:
    """Let the user write a message in their editor, and send it if they say so."""
    if not face.lines.is_terminal:
        raise RequestError("an editor needs a terminal", "write the message here")
    text = await edit_text("", editor_command(own_environment()))
    if not text.strip():
        face.tell("the message is empty")
        return
    face.tell(f"your message: {text}")
    if await face.confirm("send it?"):
        await face.send(text)
