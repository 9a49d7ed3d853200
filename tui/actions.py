"""What each command does.

Owns one function for each command of the table. Knows the screen; nothing of widgets' insides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from edgelm.chats.export import file_name, to_json, to_markdown
from edgelm.chats.model import Message
from edgelm.errors import EdgeLMError, RequestError
from edgelm.tui import conversation_actions, model_actions
from edgelm.tui.dialogs import Choice, ConfirmScreen, LineScreen, PickScreen, TextScreen
from edgelm.tui.help import HelpScreen
from edgelm.tui.markdown import code_blocks
from edgelm.tui.params import ParamsScreen, parse_params

if TYPE_CHECKING:
    from edgelm.tui.screen import ChatScreen

Action = Callable[["ChatScreen", str], Awaitable[None]]


async def _new(screen: ChatScreen, _argument: str) -> None:
    screen.new_chat()


async def _search(screen: ChatScreen, argument: str) -> None:
    screen.sidebar.display = True
    screen.sidebar.search(argument)


async def _system(screen: ChatScreen, argument: str) -> None:
    text: str | None = argument
    if not argument:
        help_text = "Sent before the conversation, for this chat only; empty: none."
        text = await screen.app.push_screen_wait(TextScreen("System prompt", screen.session.chat.system, help_text))
    if text is not None:
        screen.session.set_system(text)
        screen.notify("system prompt set" if text else "no system prompt")


async def _params(screen: ChatScreen, argument: str) -> None:
    session = screen.session
    if argument:
        values: dict[str, float | int] | None = parse_params(argument, session.chat.sampling)
    else:
        connected = screen.link.connected
        is_edgelm = connected.is_edgelm if connected else screen.link.remote is None
        defaults = screen.wishes.options or {}
        values = await screen.app.push_screen_wait(ParamsScreen(session.chat.sampling, defaults, is_edgelm=is_edgelm))
    if values is not None:
        session.set_sampling(values)
        shown = ", ".join(f"{name} {value}" for name, value in values.items())
        screen.notify(f"this chat: {shown}" if shown else "this chat: as the endpoint decides", markup=False)


async def _title(screen: ChatScreen, argument: str) -> None:
    title: str | None = argument
    if not title:
        title = await screen.app.push_screen_wait(LineScreen("Title of the chat", screen.session.chat.title))
    if title:
        screen.session.rename(" ".join(title.split()))
        screen.exchange()


async def _regenerate(screen: ChatScreen, argument: str) -> None:
    screen.require_no_answer()
    message = _message(screen, argument) or _last(screen, "assistant") or _last(screen, "user")
    if message is None:
        raise RequestError("there is nothing to answer yet", "write a message")
    parent = message.id if message.role == "user" else message.parent
    assert parent is not None, "an answer has a question"
    screen.begin_answer(parent)
    screen.prompt.focus()


async def _edit(screen: ChatScreen, argument: str) -> None:
    screen.require_no_answer()
    message = _message(screen, argument) or _last(screen, "user")
    if message is not None and message.role == "assistant":
        assert message.parent is not None, "an answer has a question"
        message = screen.session.tree.messages[message.parent]
    if message is None:
        raise RequestError("there is nothing to edit yet", "write a message")
    screen.begin_edit(message)


async def _copy(screen: ChatScreen, argument: str) -> None:
    message = _message(screen, argument) or _last(screen, "assistant")
    if message is None or not message.text:
        raise RequestError("there is no answer to copy yet")
    screen.copy(message.text)


async def _code(screen: ChatScreen, argument: str) -> None:
    chosen = _message(screen, argument)
    messages = [chosen] if chosen else [each for each in screen.session.tree.path()[::-1] if each.role == "assistant"]
    blocks = next((found for each in messages if (found := code_blocks(each.text))), [])
    if not blocks:
        raise RequestError("there is no block of code to copy")
    index: str | None = "1"
    if argument.isdecimal():
        index = argument
        if not 1 <= int(index) <= len(blocks):
            raise RequestError(f"there is no block {index}", f"give 1 to {len(blocks)}")
    elif len(blocks) > 1:
        choices = [Choice(str(i), *_outline(block)) for i, block in enumerate(blocks, 1)]
        index = await screen.app.push_screen_wait(PickScreen("Copy a block of code", choices))
    if index:
        screen.copy(blocks[int(index) - 1].removesuffix("\n"))


async def _export(screen: ChatScreen, argument: str) -> None:
    session = screen.session
    kind, _, name = argument.partition(" ")
    if kind not in ("md", "json"):
        kind, name = ("json" if argument.endswith(".json") else "md"), argument
    if not session.tree.messages:
        raise RequestError("there is nothing to export yet", "write a message")
    if not name.strip():
        chosen = await screen.app.push_screen_wait(LineScreen("Export to", file_name(session.chat, kind)))
        if chosen is None:
            return
        name = chosen
    path = await asyncio.to_thread(Path(name.strip()).expanduser)
    text = (to_json if kind == "json" else to_markdown)(session.chat, session.tree)
    if await asyncio.to_thread(path.exists):
        replace = ConfirmScreen(f"{path} exists.", "Replace it")
        if not await screen.app.push_screen_wait(replace):
            return
    try:
        await asyncio.to_thread(path.write_text, text, encoding="utf-8")
    except OSError as error:
        raise EdgeLMError(f"{path} cannot be written: {error.strerror}", "give another file") from error
    screen.notify(f"written to {path.absolute()}", markup=False)


async def _delete(screen: ChatScreen, argument: str) -> None:
    chat_id = int(argument) if argument.isdecimal() else screen.session.chat.id
    chat = screen.chats.get(chat_id)
    if chat is None:
        raise RequestError("this chat is empty")
    question = f"Delete “{chat.title}” with all its messages? This cannot be undone."
    if await screen.app.push_screen_wait(ConfirmScreen(question, "Delete it")):
        await screen.answers.end(chat_id)
        screen.keeper.write(lambda store: store.delete_chat(chat_id))
        screen.chats.pop(chat_id, None)
        if chat_id == screen.session.chat.id:
            screen.new_chat()
        else:
            screen.show_chats()


async def _theme(screen: ChatScreen, argument: str) -> None:
    app = screen.app
    names = sorted(app.available_themes)
    if argument:
        chosen: str | None = {"dark": "textual-dark", "light": "textual-light"}.get(argument, argument)
        if chosen not in names:
            raise RequestError(f"there is no theme {argument}", "/theme shows all; dark and light are the usual ones")
    else:
        choices = [Choice(each, each, "dark" if app.available_themes[each].dark else "light") for each in names]
        chosen = await app.push_screen_wait(PickScreen("Colours", choices, app.theme))
    if chosen:
        app.theme = chosen
        screen.remember("theme", chosen)


async def _help(screen: ChatScreen, _argument: str) -> None:
    screen.app.push_screen(HelpScreen())


async def _quit(screen: ChatScreen, _argument: str) -> None:
    if names := ", ".join(pull.model for pull in screen.pulls.running):
        question = f"{names}: leaving stops the pull. What came is kept; pulling it again goes on there."
        if not await screen.app.push_screen_wait(ConfirmScreen(question, "Leave")):
            return
    await screen.answers.end()
    await screen.pulls.end()
    problem, unsaved = screen.keeper.problem, screen.keeper.unsaved
    if problem and unsaved:
        question = f"{problem.message}. The last {unsaved:,} changes are not saved."
        if not await screen.app.push_screen_wait(ConfirmScreen(question, "Leave and lose them")):
            return
    screen.app.exit()


ACTIONS: dict[str, Action] = {
    "new": _new,
    "search": _search,
    "model": model_actions.choose,
    "pull": model_actions.pull,
    "system": _system,
    "params": _params,
    "title": _title,
    "regenerate": _regenerate,
    "edit": _edit,
    "shorten": conversation_actions.shorten,
    "whole": conversation_actions.send_all,
    "drafts": conversation_actions.drafts,
    "copy": _copy,
    "code": _code,
    "export": _export,
    "delete": _delete,
    "theme": _theme,
    "help": _help,
    "quit": _quit,
}


def _message(screen: ChatScreen, argument: str) -> Message | None:
    """Return the message that a key was pressed on: `#ID`."""
    return screen.session.tree.messages.get(int(argument[1:])) if argument.startswith("#") else None


def _last(screen: ChatScreen, role: str) -> Message | None:
    return next((each for each in screen.session.tree.path()[::-1] if each.role == role), None)


def _outline(code: str) -> tuple[str, str]:
    lines = code.strip("\n").split("\n")
    return lines[0].strip()[:50] or "(empty)", f"{len(lines)} lines"
