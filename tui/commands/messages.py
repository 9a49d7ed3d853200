"""The commands about messages: answer again, edit, copy, attach, and which part of the conversation is sent.

Owns which message is meant, what is asked and told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.chats.attached_files import full_path
from edgelm.chats.attachments import Attachment
from edgelm.chats.history import Message
from edgelm.chats.web_page import fetched, host_of, is_url, urls_in
from edgelm.tui.commands.face import Face
from edgelm.tui.dialogs.basic import Choice, PickScreen
from edgelm.tui.prompt.paths import file_to_write, unquoted
from edgelm.tui.prompt.shortening import ShortenScreen, plan_shortening
from edgelm.tui.screen_face import ScreenFace
from edgelm.tui.transcript.markdown import code_blocks


async def attach(face: Face, argument: str) -> None:
    """Attach a file, a folder or a page of the web to the next message."""
    if is_url(argument):
        question = f"{host_of(argument)} is asked for this page, from this machine."
        if await face.confirm(f"fetch this page from {host_of(argument)}?", question, "Fetch it"):
            await face.add(await _fetched(face, argument))
    else:
        await face.attach(full_path(unquoted(argument)) if argument else "")


async def offer_pages(face: Face, text: str, add: Callable[[Attachment], Awaitable[None]]) -> bool:
    """Offer to attach the pages that a message names; return whether it is to be sent. Raises EdgeLMError."""
    workspace = face.workspace
    urls = [url for url in urls_in(text) if url not in workspace.asked_pages] if workspace.offers_pages else []
    if not urls:
        return True
    hosts = ", ".join(dict.fromkeys(map(host_of, urls)))
    pages = "its page" if len(urls) == 1 else f"{len(urls)} pages"

    async def told() -> str | None:
        return "fetch" if await face.confirm(f"fetch {pages} from {hosts} and attach the text?") else "send"

    choices = [
        Choice("send", "Send the message as it is"),
        Choice("fetch", f"Fetch {pages} from {hosts}", "attached as text"),
        Choice("never", "Send, and do not ask again until edgelm is closed"),
    ]
    chosen = await face.ask(lambda: PickScreen("The model cannot open addresses", choices), told)
    if chosen is not None:
        workspace.asked_pages.update(urls)
    workspace.offers_pages = chosen != "never"
    for url in urls if chosen == "fetch" else ():
        await add(await _fetched(face, url))
    return chosen is not None


async def _fetched(face: Face, url: str) -> Attachment:
    session = face.workspace.session
    page = await face.wait(f"fetching {host_of(url)}", fetched(url))
    face.workspace.require_open(session)
    return page


async def shell(face: ScreenFace, _argument: str) -> None:
    """Let the user write a command for the shell; an argument is none, as it may come from a paste."""
    if not face.view.begin_shell():
        raise RequestError("there is a message in the prompt", "send it first, or leave it by Esc")


async def paste(face: Face, _argument: str) -> None:
    """Attach the picture on the clipboard to the next message."""
    await face.attach_clipboard()


async def regenerate(face: Face, argument: str) -> None:
    """Answer a message again: the last one, or the one of a key."""
    face.workspace.require_no_answer()
    message = message_of(face, argument) or next(reversed(face.workspace.session.tree.path()), None)
    if message is None:
        raise RequestError("there is nothing to answer yet", "write a message")
    _begin_answer(face, _question_of(message))
    face.show("prompt")


async def edit(face: Face, argument: str) -> None:
    """Edit a message of the user: the last one, or that of a key."""
    face.workspace.require_no_answer()
    message = message_of(face, argument) or last_message(face, "user")
    if message is None:
        raise RequestError("there is nothing to edit yet", "write a message")
    await face.edit(face.workspace.session.tree.messages[_question_of(message)])


async def find(face: ScreenFace, argument: str) -> None:
    """Find words in the open chat."""
    face.view.find(argument)


async def copy(face: Face, argument: str) -> None:
    """Copy a message: the last answer, or the one of a key."""
    message = message_of(face, argument) or last_message(face, "assistant")
    if message is None or not message.text:
        raise RequestError("there is no answer to copy yet")
    await face.copy(message.text)


async def code(face: Face, argument: str) -> None:
    """Copy a block of code, or save it to a file."""
    of, _, argument = argument.partition(" ") if argument.startswith("#") else ("", "", argument)
    number, _, name = argument.partition(" ")
    if not number.isdecimal():
        number, name = "", argument
    selected = message_of(face, of)
    path = face.workspace.session.tree.path()
    messages = [selected] if selected else [message for message in path[::-1] if message.role == "assistant"]
    blocks = next((blocks for message in messages if (blocks := code_blocks(message.text))), [])
    if not blocks:
        raise RequestError("there is no block of code to copy")
    if number:
        if not 1 <= int(number) <= len(blocks):
            raise RequestError(f"there is no block {number}", f"give 1 to {len(blocks)}")
    elif len(blocks) > 1:
        choices = [Choice(str(i), *_outline(block)) for i, block in enumerate(blocks, 1)]
        title = "Save a block of code" if name else "Copy a block of code"

        async def told() -> None:
            for i, block in enumerate(blocks, 1):
                face.tell(f"{i}. {', '.join(_outline(block))}")
            face.tell("/code NUMBER copies one, /code NUMBER FILE saves it")

        chosen = await face.ask(lambda: PickScreen(title, choices), told)
        if not chosen:
            return
        number = chosen
    text = blocks[int(number or 1) - 1]
    if name:
        await save_text(face, "Save the block of code to", "" if name == "save" else name, text)
    else:
        await face.copy(text.removesuffix("\n"))


async def save_text(face: Face, title: str, name: str, text: str, proposed: str = "") -> None:
    """Write a text to a file; ask for its name where none is given, and before another one is replaced."""
    written = name or await face.line(title, proposed, "" if proposed else "file: ")
    if not written:
        return
    path = await asyncio.to_thread(file_to_write, written.strip())
    exists, question = await asyncio.to_thread(path.exists), f"{path} exists; replace it?"
    if exists and not await face.confirm(question, f"{path} exists.", "Replace it"):
        return
    try:
        await asyncio.to_thread(path.write_text, text, encoding="utf-8")
    except OSError as error:
        raise EdgeLMError(f"{path} cannot be written: {error.strerror}", "choose another file") from error
    face.tell(f"written to {path}")


def _outline(code: str) -> tuple[str, str]:
    lines = code.strip("\n").split("\n")
    return lines[0].strip()[:50] or "(empty)", f"{len(lines)} line{'' if len(lines) == 1 else 's'}"


def message_of(face: Face, argument: str) -> Message | None:
    """Return the message on which a key was pressed, as `#ID`."""
    number = argument.removeprefix("#")
    is_given = argument.startswith("#") and number.isdecimal()
    return face.workspace.session.tree.messages.get(int(number)) if is_given else None


def last_message(face: Face, role: str) -> Message | None:
    """Return the last message of a role on the branch."""
    path = face.workspace.session.tree.path()
    return next((message for message in path[::-1] if message.role == role), None)


def _question_of(message: Message) -> int:
    """Return the id of a message of the user, or of the one that an answer belongs to."""
    question = message.id if message.role == "user" else message.parent
    assert question is not None, "an answer has a question"
    return question


def _begin_answer(face: Face, parent: int, sent_from: int | None = None) -> None:
    """Answer a message; `sent_from` shortens the conversation from here on."""
    face.workspace.begin_answer(parent, sent_from)
    face.show("chat")


# The sent part of the conversation


async def shorten(face: Face, _argument: str) -> None:
    """Leave out the oldest messages; where the last answer is not complete, write a new one."""
    workspace = face.workspace
    workspace.require_no_answer()
    session = workspace.session
    plan = plan_shortening(session, await _context_size(face))
    if plan is None or (plan.proposed == plan.first and face.either(on_screen=False, in_lines=True)):
        key = face.keymap.label("run('edit')", "F4") or "/edit"
        alone = "the last message alone is shortened by /edit"
        raise RequestError(
            "there is nothing to leave out", face.either(f"edit the last message to shorten it alone: {key}", alone)
        )

    async def proposed() -> int | None:
        """Ask about the proposed shortening."""
        count, freed = plan.left_out(plan.proposed)
        before = " ".join(plan.exchanges[plan.proposed].messages[0].text.split())[:60]
        face.tell(f"{count:,} messages would be left out, up to the one before: {before}")
        is_agreed = await face.confirm(f"that frees about {freed:,} tokens; go on without them?")
        return plan.proposed if is_agreed else None

    first = await face.ask(lambda: ShortenScreen(plan), proposed)
    if first is None or workspace.session is not session or workspace.answer is not None:
        return
    leaf = session.tree.path()[-1]
    sent_from = plan.exchanges[first].messages[0].id if first else None
    if sent_from is None:
        session.send_all()
    if leaf.role == "user" or leaf.state == "failed" or leaf.note == "context":
        _begin_answer(face, _question_of(leaf), sent_from)
    elif sent_from is not None:
        session.shorten(leaf, sent_from)
        face.mention("they are left out; /whole sends all messages again")
    face.show("branch", "prompt")


async def whole(face: Face, _argument: str) -> None:
    """Send the whole conversation again."""
    face.workspace.require_no_answer()
    if not face.workspace.session.send_all():
        raise RequestError("the whole conversation is sent already", "/shorten leaves out the oldest messages")
    face.show("branch")
    face.tell("the whole conversation is sent again")


async def _context_size(face: Face) -> int | None:
    """Return the context size of the chat's model in tokens; None where the endpoint does not tell."""
    workspace = face.workspace
    if workspace.link.connected is None:
        return None
    with suppress(EdgeLMError):
        models = await workspace.link.models()
        return next((model.context for model in models if model.id == workspace.model), None)
    return None
