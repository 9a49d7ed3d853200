"""The connection to one server of tools: made when it is needed, and again after it broke.

Owns the time that a start, a listing and a call may take. Knows nothing of who allows a call.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edgelm.base.errors import EdgeLMError
from edgelm.chats.tools.failures import ToolError, explained
from edgelm.chats.tools.listing import Listing, Offer, make_listing, make_offers
from edgelm.chats.tools.process import ServerProcess
from edgelm.chats.tools.results import MAX_CHARS, Result, contents_text, result_text
from edgelm.chats.tools.settings import ToolServer

if TYPE_CHECKING:
    from mcp import Client

START_S = 30.0  # a server may fetch its own parts first; a longer `timeout` is for this, too
LIST_S = 20.0
STUCK_S = 2.0  # for the list of a server whose last call did not end; then it is started again
MAX_PAGES = 50
CLOSE_S = 8.0
NOT_FOUND = 404
BEGUN_ANEW = "the server has started again, and the next call begins a new session"
REFUSALS = {  # by the status of HTTP
    401: "it refuses us (HTTP 401): give its key as `headers` in its table of config.toml",
    403: "it refuses us (HTTP 403): see `headers` in its table of config.toml",
    405: "it takes no messages there (HTTP 405): give the address of its streamable HTTP, often /mcp and not /sse",
}

State = Literal["not started", "starting", "ready", "failed"]


class Connection:
    """One server. Calls may run at the same time."""

    def __init__(self, server: ToolServer, environment: Mapping[str, str], log: Path) -> None:
        self.server = server
        self.listing = Listing()
        self.offers: tuple[Offer, ...] | None = None  # None: not asked for yet
        self.state: State = "not started"
        self.error = ""
        self._environment = environment
        self._log = log
        self._process: ServerProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Client] | None = None
        self._leave = asyncio.Event()
        self._maybe_stuck = False  # in a call that did not end
        self._status = 0  # of the last answer over HTTP
        self._has_lost = False  # its session: the server has started again

    async def list_tools(self) -> Listing:
        """Return the tools that the server has now; start it first. Raises ToolError."""
        if self._maybe_stuck:
            self._maybe_stuck = False
            with suppress(ToolError):
                return await self._list(STUCK_S)
            await self.close()
        return await self._list(LIST_S)

    async def _list(self, limit_s: float, *, again: bool = True) -> Listing:
        client = await self._connected()
        try:
            with self._explained(limit_s):
                async with asyncio.timeout(limit_s):
                    tools = await _tools_of(client)
        except ToolError as error:  # a server without a list is of no use, and may be stuck
            self._leave.set()
            if again and self._has_lost:
                return await self._list(limit_s, again=False)
            self.state, self.error = "failed", str(error)
            raise
        self.listing = make_listing(self.server, tools)
        return self.listing

    async def call(self, tool: str, arguments: Mapping[str, Any], max_chars: int = MAX_CHARS) -> Result:
        """Call a tool. What fails is a result, too: the model may do something else.

        Nothing is called twice, not even where a session ended: whether it has run, and as the same tool, is not known.
        """
        try:
            client = await self._connected()
            from mcp.types import CallToolRequest, CallToolRequestParams, CallToolResult

            request = CallToolRequest(params=CallToolRequestParams(name=tool, arguments=dict(arguments)))
            seconds = self.server.timeout_s
            with self._explained(seconds):
                async with asyncio.timeout(seconds):
                    # Not `call_tool`: it would check the result by a schema of the server, which can take long.
                    result = await client.session.send_request(request, CallToolResult)
        except asyncio.CancelledError:
            self._maybe_stuck = True
            raise
        except ToolError as error:
            self._maybe_stuck = error.silent
            self._leave_if_broken(error)
            return Result(f"{error}; {BEGUN_ANEW}" if self._has_lost else str(error), failed=True)
        return Result(result_text(result.content, result.structured_content, max_chars), failed=result.is_error)

    async def list_offers(self) -> tuple[Offer, ...]:
        """Return the prompts and resources that the server has now; start it first. Raises ToolError."""
        client = await self._connected()
        can = client.server_capabilities
        prompts: list[Any] = []
        resources: list[Any] = []
        try:
            with self._explained(LIST_S):
                async with asyncio.timeout(LIST_S):
                    if can.prompts is not None:
                        prompts = await _pages(client.list_prompts, "prompts")
                    if can.resources is not None:
                        resources = await _pages(client.list_resources, "resources")
        except ToolError as error:
            self._leave_if_broken(error)
            raise
        self.offers = make_offers(prompts, resources)
        return self.offers

    async def take(self, offer: Offer, arguments: Mapping[str, str]) -> str:
        """Return the text of a prompt or resource. Raises ToolError."""
        client = await self._connected()
        seconds = self.server.timeout_s
        try:
            with self._explained(seconds):
                async with asyncio.timeout(seconds):
                    if offer.kind == "prompt":
                        messages = (await client.get_prompt(offer.own_name, dict(arguments))).messages
                        return result_text([message.content for message in messages], None, MAX_CHARS)
                    contents = (await client.read_resource(offer.own_name)).contents
                    return contents_text(contents, MAX_CHARS)
        except ToolError as error:
            self._leave_if_broken(error)
            raise

    async def close(self) -> None:
        """End the server."""
        task, self._task = self._task, None
        if task is not None:
            self._leave.set()
            if not (await asyncio.wait((task,), timeout=CLOSE_S))[0]:
                task.cancel()
                await asyncio.wait((task,))
        self.state = "not started"

    async def _connected(self) -> Client:
        if self._task is not None and self._leave.is_set():
            await asyncio.wait((self._task,))
        if self._task is None or self._task.done():
            self.state, self.error, self._has_lost = "starting", "", False
            self._leave.clear()
            self._ready = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run(self._ready))
        assert self._ready is not None
        return await asyncio.shield(self._ready)  # another chat may wait for the same start

    async def _run(self, ready: asyncio.Future[Client]) -> None:
        """Start the server and keep the connection until it breaks or is closed."""
        try:
            await asyncio.to_thread(load_mcp)
            if not await self._serve("auto", ready):
                await self._serve("legacy", ready)
        except (EdgeLMError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError):
                error = ToolError(f"{self.server.name} was ended")
            self.state, self.error = "failed", str(error)
            if not ready.done():
                ready.set_exception(error)
                ready.exception()  # no warning where nobody waits any more
        else:
            self.state = "failed" if self.error else "not started"

    async def _serve(self, mode: str, ready: asyncio.Future[Client]) -> bool:
        """Keep a connection until its end; return False where the server left because of our first message.

        Raises EdgeLMError. `mode` says whether that message is the one of newer servers.
        """
        from mcp import Client
        from mcp.types import Implementation

        server = self.server
        process = self._process = None if server.url else ServerProcess(server, self._environment, self._log)
        if process is not None:
            transport = process.streams()
        else:
            from edgelm.chats.tools.web import web_streams

            transport = web_streams(server, self._note_status)
        info = Implementation(name="edgelm", version="1")
        start_s = max(START_S, server.timeout_s)
        try:
            with self._explained(start_s):
                async with AsyncExitStack() as stack:
                    async with asyncio.timeout(start_s):
                        client = await stack.enter_async_context(
                            Client(transport, mode=mode, cache=None, client_info=info)
                        )
                    self.state = "ready"
                    ready.set_result(client)
                    await self._until_end(process)
        except ToolError:
            if mode == "auto" and not ready.done() and process is not None and process.left:
                return False
            raise
        if process is not None and process.reason and not self._leave.is_set():
            raise ToolError(f"{server.name}: {process.reason}")
        return True

    async def _until_end(self, process: ServerProcess | None) -> None:
        waits = [asyncio.create_task(self._leave.wait())]
        if process is not None:
            waits.append(asyncio.create_task(process.ended.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _leave_if_broken(self, error: ToolError) -> None:
        """Let the next use connect anew where this connection is of no use any more."""
        if error.broken or self._has_lost:
            self._leave.set()

    def _note_status(self, status: int, of_session: bool) -> None:
        self._status = status
        self._has_lost |= status == NOT_FOUND and of_session  # the specification: begin a new one

    def _explained(self, seconds: float) -> AbstractContextManager[None]:
        return explained(self.server.name, seconds, self._reason)

    def _reason(self) -> str:
        if self._process is not None:
            return self._process.reason
        return REFUSALS.get(self._status, "")


async def _tools_of(client: Client) -> list[Any]:
    """Return the tools of a server, none of one that has prompts or resources only."""
    from mcp.shared.exceptions import MCPError
    from mcp.types import METHOD_NOT_FOUND

    try:
        return await _pages(client.list_tools, "tools")
    except MCPError as error:
        if error.code == METHOD_NOT_FOUND and client.server_capabilities.tools is None:
            return []
        raise


async def _pages(ask: Callable[..., Awaitable[Any]], name: str) -> list[Any]:
    """Return the entries of all pages of a list."""
    entries: list[Any] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        page = await ask(cursor=cursor)
        entries += getattr(page, name)
        cursor = page.next_cursor
        if not cursor:
            break
    return entries


def load_mcp() -> None:
    """Import the package `mcp`, which takes a second. Raises ToolError where it is not installed."""
    try:
        importlib.import_module("mcp")
    except ImportError as error:
        raise ToolError(
            f"tools need the package mcp ({error.name or 'it cannot be imported'})",
            "`pipx inject edgelm mcp`, or install `edgelm[mcp]`",
        ) from None
    for name in ("mcp", "client"):  # they would write into the picture
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())
            logger.propagate = False
