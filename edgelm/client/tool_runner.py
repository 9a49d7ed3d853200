"""The calls of tools that a model asks for in an answer: who is asked, what runs, and what the model gets.

Owns the order: each call is recorded, allowed, run, and recorded again, one after the other. Knows nothing of widgets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from edgelm.base.errors import EdgeLMError
from edgelm.chats.history import Message
from edgelm.chats.tool_calls import ToolCall, tool_name
from edgelm.chats.tools.connection import Connection
from edgelm.chats.tools.consents import has_changed, tool_of
from edgelm.chats.tools.listing import Listing, Tool
from edgelm.chats.tools.results import MAX_CHARS, Result
from edgelm.chats.tools.settings import ToolServer
from edgelm.chats.tools.toolbox import Toolbox
from edgelm.client.session import Session
from edgelm.client.turns import Call, FunctionTool

MAX_CALLS = 20  # of one answer; then the user is asked to go on
CHARS_PER_TOKEN = 3
LEAST_RESULT = 4_000  # characters, however small the context is
REFUSED = "The user refused this call. Go on without it, or ask the user."

Permit = Literal["no", "once", "chat", "always"]


@dataclass(frozen=True, slots=True)
class CallQuestion:
    """What the user is asked before a call. `changed`: another version of this tool was allowed before."""

    title: str  # of the chat, which need not be on the screen
    server: ToolServer
    tool: Tool
    arguments: str  # JSON
    changed: bool


@dataclass(frozen=True, slots=True)
class LimitQuestion:
    """What the user is asked when an answer makes many calls."""

    title: str
    num_calls: int  # that were made
    num_more: int  # that the model asks for now


class Asker:
    """Asks the user. Where no user can answer, each method returns the safe answer."""

    async def may_call(self, question: CallQuestion) -> Permit:
        """Ask whether a call may run."""
        return "no"

    async def may_go_on(self, question: LimitQuestion) -> bool:
        """Ask whether an answer may make more calls."""
        return False

    def tell(self, error: EdgeLMError) -> None:
        """Show that a server cannot be used; the answer continues without it."""


@dataclass
class Offer:
    """The tools that an answer may use, by their names for the model."""

    tools: dict[str, tuple[Connection, Tool]] = field(default_factory=dict)
    max_chars: int = MAX_CHARS  # of a result
    num_allowed: int = field(default_factory=lambda: MAX_CALLS)  # calls, until the user is asked

    @property
    def functions(self) -> tuple[FunctionTool, ...]:
        return tuple(FunctionTool(name, tool.description, tool.schema) for name, (_, tool) in self.tools.items())

    def fit(self, context: int | None) -> None:
        """Limit a result to a quarter of the model's context, if that is known in tokens."""
        if context:
            self.max_chars = min(MAX_CHARS, max(context * CHARS_PER_TOKEN // 4, LEAST_RESULT))


class ToolRunner:
    """Runs the calls of all chats."""

    def __init__(self, toolbox: Toolbox, asker: Asker) -> None:
        self.toolbox = toolbox
        self._asker = asker
        self._asking = asyncio.Lock()  # one question at a time
        self._reported: set[str] = set()  # servers whose failure was shown

    async def offer(self, session: Session, show: Callable[[str], None]) -> Offer:
        """Return the tools of the chat's servers; a server that cannot be used is reported and left out.

        `show` is called with the present activity.
        """
        offer = Offer()
        # A server that has failed is tried again by /tools only: each start may take long.
        names = [name for name in session.chat.tools if name not in self._reported or self._state(name) != "failed"]
        show(f"asking {', '.join(names)} for tools" if names else "")
        for name, listing in zip(names, await asyncio.gather(*map(self._list, names)), strict=True):
            for tool in listing.tools:
                offer.tools.setdefault(tool_name(name, tool.name), (self.toolbox.connection(name), tool))
        show("")
        return offer

    def _state(self, name: str) -> str:
        """Return the state of a server; one that the settings do not have any more has failed, too."""
        connections = self.toolbox.connections
        return connections[name].state if name in connections else "failed"

    async def _list(self, name: str) -> Listing:
        """Return the tools of a server; none where it cannot be used, which is reported once."""
        try:
            listing = await self.toolbox.connection(name).list_tools()
        except EdgeLMError as error:
            if name not in self._reported:
                self._reported.add(name)
                self._asker.tell(EdgeLMError(f"no tools: {error.message}", error.hint or "/tools tries it again"))
            return Listing()
        self._reported.discard(name)
        return listing

    def try_again(self, name: str) -> None:
        """Start a server again that has failed, when it is needed."""
        self._reported.discard(name)

    async def run(
        self, session: Session, message: Message, calls: Sequence[Call], offer: Offer, show: Callable[[str], None]
    ) -> bool:
        """Run the calls that end a part of an answer; return whether the model may go on.

        The calls are saved as they change. `show` is called after each change with the present activity.
        """
        first = len(message.calls)
        session.set_calls(message, (*message.calls, *_records(message, calls, offer)))
        show("")
        if first + len(calls) > offer.num_allowed:
            question = LimitQuestion(session.chat.title, first, len(calls))
            show("waits for you")
            async with self._asking:
                may_go_on = await self._asker.may_go_on(question)
            if not may_go_on:
                for place in range(first, len(message.calls)):
                    self._change(session, message, place, state="refused", result=REFUSED)
                show("")
                return False
            offer.num_allowed = first + len(calls) + MAX_CALLS
        for place in range(first, len(message.calls)):
            await self._run(session, message, place, calls[place - first].name, offer, show)
        show("")
        return True

    async def _run(
        self, session: Session, message: Message, place: int, name: str, offer: Offer, show: Callable[[str], None]
    ) -> None:
        call = message.calls[place]
        entry, arguments = offer.tools.get(name), call.values
        problem = ""
        if entry is None:
            problem = f"There is no tool {name}. The tools are: {', '.join(offer.tools) or 'none'}."
        elif arguments is None:
            problem = "The arguments are not a JSON object."
        if entry is None or arguments is None:
            self._change(session, message, place, state="failed", result=problem)
            return
        connection, tool = entry
        show(f"{call.name} waits for you")
        if not await self._is_allowed(session, connection, tool, call.arguments):
            self._change(session, message, place, state="refused", result=REFUSED)
            show("")
            return
        self._change(session, message, place, state="running")
        show(f"running {call.name}")
        started = time.monotonic()
        result = await self._call(connection, tool, arguments, offer.max_chars)
        self._change(
            session,
            message,
            place,
            state="failed" if result.failed else "done",
            result=result.text,
            took_s=round(time.monotonic() - started, 3),
        )
        show("")

    async def _call(self, connection: Connection, tool: Tool, arguments: Mapping[str, Any], max_chars: int) -> Result:
        """Call a tool that was allowed, unless the server has another tool under its name by now."""
        if connection.state != "ready":  # it ended while the user was asked: its new process may have other tools
            try:
                listing = await connection.list_tools()
            except EdgeLMError as error:
                return Result(str(error), failed=True)
            if tool.mark not in (other.mark for other in listing.tools):
                return Result("The tool has changed; it was not run.", failed=True)
        return await connection.call(tool.name, arguments, max_chars)

    async def _is_allowed(self, session: Session, connection: Connection, tool: Tool, arguments: str) -> bool:
        """Tell whether a call may run; ask the user where that is not known."""
        consents = self.toolbox.consents
        async with self._asking:
            always = await asyncio.to_thread(consents.marks)
            in_chat = session.chat.tool_consents
            if tool.mark in always or tool.mark in in_chat:
                return True
            changed = has_changed(tool.mark, always) or has_changed(tool.mark, in_chat)
            permit = await self._asker.may_call(
                CallQuestion(session.chat.title, connection.server, tool, arguments, changed)
            )
            if permit == "chat":
                others = (mark for mark in session.chat.tool_consents if tool_of(mark) != tool_of(tool.mark))
                session.set_tool_consents((*others, tool.mark))
            elif permit == "always":
                try:
                    await asyncio.to_thread(consents.allow, tool.mark)
                except EdgeLMError as error:
                    self._asker.tell(error)
        return permit != "no"

    def _change(self, session: Session, message: Message, place: int, **changes: Any) -> None:
        calls = list(message.calls)
        calls[place] = replace(calls[place], **changes)
        session.set_calls(message, tuple(calls))


def _records(message: Message, calls: Sequence[Call], offer: Offer) -> list[ToolCall]:
    """Return the calls as they are saved. Their ids differ from those of earlier calls: results are found by them."""
    used = {call.id for call in message.calls}
    records = []
    for number, call in enumerate(calls):
        _, tool = offer.tools.get(call.name, (None, None))
        call_id = call.id if call.id not in used else f"c{len(used):04}{number:04}"
        records.append(
            ToolCall(
                id=call_id,
                server=tool.server if tool else "",
                tool=tool.name if tool else call.name,
                arguments=call.arguments,
                at=len(message.text),
            )
        )
    return records
