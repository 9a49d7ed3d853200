"""The command about tools.

Owns what is asked and told. How calls run is in tool_runner.py.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from functools import partial

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.chats.attachments import Attachment
from edgelm.chats.tools.listing import Offer
from edgelm.chats.tools.toolbox import Toolbox
from edgelm.client.session import Session
from edgelm.client.tool_runner import ToolRunner
from edgelm.library.names import STARTER
from edgelm.tui.commands.face import Face
from edgelm.tui.commands.table import Command
from edgelm.tui.dialogs.tools import ServerEntry, ToolsScreen
from edgelm.tui.transcript.passages import one_line
from edgelm.tui.transcript.tool_rows import visible

HOW = 'write [tools."NAME"] into config.toml: /help How do I use tools?'
NO_STARTER = "the starter cannot call tools: /model chooses another model"


async def tools(face: Face, argument: str) -> None:
    """List the servers, use some in this chat, or none; `forget` asks again for each tool of a server."""
    runner, session = face.workspace.answers.tools, face.workspace.session
    verb, _, rest = argument.partition(" ")
    if verb == "forget" and rest:
        for name in known_servers(runner, rest):
            await forget_consents(runner, session, name)
            face.tell(f"each tool of {name} is asked for again")
        return
    names = known_servers(runner, argument)
    if argument == "off":
        session.set_tools(())
        face.tell("this chat uses no tools")
    elif argument:
        await _use(face, session, names)
    else:
        await _list(face, session)


async def _list(face: Face, session: Session) -> None:
    """Show the servers until the dialog is closed."""
    runner = face.workspace.answers.tools

    async def told() -> None:
        for name, server in runner.toolbox.servers.items():
            face.tell(f"{name}, {'on' if name in session.chat.tools else 'off'}: {visible(one_line(server.words))}")
        face.tell("/tools NAME uses one here, /tools off none, /tools forget NAME asks again for each of its tools")

    before = ""
    while True:
        entries = await _entries(runner, session)
        chosen = await face.ask(partial(ToolsScreen, entries, before), told)
        if chosen is None:
            return
        name = before = chosen.name
        if chosen.act == "forget":
            count = await forget_consents(runner, session, name)
            face.tell(f"each tool of {name} is asked for again" if count else f"nothing of {name} was allowed")
        elif name in session.chat.tools:
            session.set_tools(tuple(used for used in session.chat.tools if used != name))
        else:
            await _use(face, session, [name])


async def _use(face: Face, session: Session, names: Sequence[str]) -> None:
    """Use servers in a chat; they start now, again if they have failed, so that it is seen whether they do."""
    runner = face.workspace.answers.tools
    session.set_tools((*(name for name in session.chat.tools if name not in names), *names))
    for name in names:
        runner.try_again(name)
        try:
            connection = runner.toolbox.connection(name)
            listing = await face.wait(f"starting {name}", connection.list_tools())
            offers = await face.wait(f"starting {name}", connection.list_offers())
        except EdgeLMError as error:
            face.complain(error)
        else:
            if offers:
                face.tell(f"{name}: {len(offers)} prompts and resources; /{name}:{offers[0].name} is one")
            listed = ", ".join(visible(tool.name) for tool in listing.tools) or "no tools"
            face.tell(f"{name}: {face.either(f'{len(listing.tools)} tools; each call is asked for', listed)}")
    if face.workspace.model == STARTER:
        face.tell(NO_STARTER)


async def take_offer(face: Face, name: str, argument: str) -> None:
    """Put a prompt of a server into the message, or attach a resource of it; `name` is SERVER:NAME."""
    runner, session = face.workspace.answers.tools, face.workspace.session
    server, _, key = name.partition(":")
    if server not in session.chat.tools:
        raise RequestError(f"this chat does not use {server}", f"/tools {server} uses it")
    connection = runner.toolbox.connection(server)
    offers = connection.offers
    if offers is None:
        offers = await face.wait(f"starting {server}", connection.list_offers())
    offer = next((offer for offer in offers if offer.name == key), None)
    if offer is None:
        names = ", ".join(f"/{server}:{offer.name}" for offer in offers)
        raise RequestError(f"{server} has no prompt and no resource {key}", f"it has {names}" if names else "")
    if offer.kind == "resource":
        text = await face.wait(f"reading {name}", connection.take(offer, {}))
        face.workspace.require_open(session)
        await face.add(Attachment(kind="text", name=name, text=text, size=len(text.encode())))
        return
    arguments = parse_arguments(offer, argument)
    for missing in offer.required:
        if missing not in arguments:
            value = await face.line(f"{missing}, for the prompt {offer.name}", "", f"{visible(missing)}: ")
            if value is None:
                return
            arguments[missing] = value
    text = await face.wait(f"asking {server}", connection.take(offer, arguments))
    face.workspace.require_open(session)
    await face.propose(text)


def parse_arguments(offer: Offer, text: str) -> dict[str, str]:
    """Return the arguments of a prompt: NAME=VALUE, in quotes where a value has spaces; of a single one, all the text.

    Raises RequestError.
    """
    if not text:
        return {}
    if len(offer.arguments) == 1 and not text.startswith(f"{offer.arguments[0]}="):
        return {offer.arguments[0]: text}
    try:
        words = shlex.split(text)
    except ValueError:
        raise RequestError("a quote is not closed", "write NAME=VALUE or NAME='a value'") from None
    values = dict(word.partition("=")[::2] for word in words)
    if unknown := [name for name in values if name not in offer.arguments]:
        known = " ".join(f"{name}=VALUE" for name in offer.arguments)
        raise RequestError(f"the prompt has no {unknown[0]}", f"write {known}" if known else "it takes nothing")
    return values


def offer_commands(toolbox: Toolbox, servers: Sequence[str]) -> list[Command]:
    """Return the prompts and resources of servers as rows of the list of commands, as far as they are known."""
    commands = []
    for server in servers:
        connection = toolbox.connections.get(server)
        for offer in (connection.offers or ()) if connection is not None else ():
            usage = " ".join(name if name in offer.required else f"[{name}]" for name in offer.arguments)
            help_text = visible(one_line(offer.description)) or f"a {offer.kind} of {server}"
            commands.append(Command(f"{server}:{offer.name}", "", help_text, usage))
    return commands


async def _entries(runner: ToolRunner, session: Session) -> list[ServerEntry]:
    toolbox, chat = runner.toolbox, session.chat
    marks = {*await asyncio.to_thread(toolbox.consents.marks), *chat.tool_consents}
    entries = []
    for name, server in toolbox.servers.items():
        connection = toolbox.connection(name)
        num_allowed = sum(mark.startswith(f"{name}/") for mark in marks)
        entries.append(ServerEntry(server, name in chat.tools, connection.listing, connection.error, num_allowed))
    return entries


def known_servers(runner: ToolRunner, argument: str) -> list[str]:
    """Return the servers that an argument names; none for an empty one and for `off`. Raises RequestError."""
    servers = runner.toolbox.servers
    if not servers and argument != "off":
        raise RequestError("there are no servers of tools", HOW)
    names = [] if argument == "off" else argument.split()
    for name in names:
        if name not in servers:
            raise RequestError(f"there is no server of tools {name}", "the servers are " + ", ".join(servers))
    return names


async def forget_consents(runner: ToolRunner, session: Session, name: str) -> int:
    """Forget which tools of a server may run without a question; return how many there were. Raises EdgeLMError."""
    marks = session.chat.tool_consents
    kept = tuple(mark for mark in marks if not mark.startswith(f"{name}/"))
    if kept != marks:
        session.set_tool_consents(kept)
    return len(marks) - len(kept) + await asyncio.to_thread(runner.toolbox.consents.forget, name)
