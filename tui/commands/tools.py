"""The command about tools, on the full screen.

Owns what is asked and reported. How calls run is in tool_runner.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from textual.app import App

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.chats.tools.listing import Listing
from edgelm.client.session import Session
from edgelm.client.tool_runner import ToolRunner
from edgelm.library.names import STARTER
from edgelm.tui.dialogs.tools import ServerAct, ServerEntry, ToolsScreen
from edgelm.tui.lines import clean
from edgelm.tui.screen_view import ScreenView
from edgelm.tui.workspace import Workspace

HOW = 'write [tools."NAME"] into config.toml: /help How do I use tools?'
NO_STARTER = "the starter cannot call tools: /model chooses another model"


class ToolActions:
    """Runs the command `tools`. It may raise EdgeLMError."""

    def __init__(self, app: App[Any], workspace: Workspace, view: ScreenView) -> None:
        self._app = app
        self._workspace = workspace
        self._runner: ToolRunner = workspace.answers.tools
        self._view = view
        self.by_name: dict[str, Callable[[str], Awaitable[None]]] = {"tools": self._tools}

    async def _tools(self, argument: str) -> None:
        names, session = known_servers(self._runner, argument), self._workspace.session
        if argument == "off":
            session.set_tools(())
            self._notify("this chat uses no tools")
        elif argument:
            await self._use(session, (*(name for name in session.chat.tools if name not in names), *names))
        else:
            await self._list(session)

    async def _list(self, session: Session) -> None:
        """Show the servers until the dialog is closed."""
        chosen: ServerAct | None = None
        while True:
            entries = await self._entries(session)
            chosen = await self._app.push_screen_wait(ToolsScreen(entries, chosen.name if chosen else ""))
            if chosen is None:
                return
            name = chosen.name
            if chosen.act == "forget":
                count = await forget_consents(self._runner, session, name)
                self._notify(f"each tool of {name} is asked for again" if count else f"nothing of {name} was allowed")
            elif name in session.chat.tools:
                session.set_tools(tuple(used for used in session.chat.tools if used != name))
            else:
                await self._use(session, (*session.chat.tools, name))

    async def _use(self, session: Session, names: tuple[str, ...]) -> None:
        """Use servers in a chat; those that are new start now, so that it is seen whether they do."""
        new = [name for name in names if name not in session.chat.tools]
        session.set_tools(names)
        for name in new:
            try:
                listing = await self._started(name)
            except EdgeLMError as error:
                self._app.notify(clean(str(error)), severity="error", timeout=10, markup=False)
            else:
                self._notify(f"{name}: {len(listing.tools)} tools; each call is asked for")
        if self._workspace.model == STARTER:
            self._notify(NO_STARTER)

    async def _started(self, name: str) -> Listing:
        """Start a server, again if it has failed. Raises EdgeLMError."""
        self._runner.try_again(name)
        try:
            self._view.show_reading(f"starting {name}")
            return await self._runner.toolbox.connection(name).list_tools()
        finally:
            self._view.show_reading("")

    async def _entries(self, session: Session) -> list[ServerEntry]:
        toolbox, chat = self._runner.toolbox, session.chat
        marks = {*await asyncio.to_thread(toolbox.consents.marks), *chat.tool_consents}
        entries = []
        for name, server in toolbox.servers.items():
            connection = toolbox.connection(name)
            num_allowed = sum(mark.startswith(f"{name}/") for mark in marks)
            entries.append(ServerEntry(server, name in chat.tools, connection.listing, connection.error, num_allowed))
        return entries

    def _notify(self, text: str) -> None:
        self._app.notify(clean(text), markup=False)


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
