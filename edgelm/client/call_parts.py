"""The calls of tools in an answer, put together from the parts that stream.

Owns the differences between endpoints in these: calls without an index or an id, whole ones, arguments as an object.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import NamedTuple

from edgelm.client.json_values import clean_text, mapping, whole
from edgelm.client.turns import Call

MAX_CALLS = 128  # of one answer


@dataclass(eq=False)
class _Parts:
    index: int | None
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        try:
            return isinstance(json.loads("".join(self.arguments)), dict)
        except (ValueError, RecursionError):
            return False


class Piece(NamedTuple):
    """What a delta adds to a call. Id and name are empty until they are known."""

    number: int  # of the call, from 0
    id: str
    name: str
    arguments: str


class CallParts:
    """The calls of one answer while they arrive."""

    def __init__(self) -> None:
        self._calls: list[_Parts] = []

    @property
    def name(self) -> str:
        """Return the name of the tool whose call is being written; empty: none is."""
        return self._calls[-1].name if self._calls else ""

    def take(self, items: object) -> list[Piece]:
        """Take the `tool_calls` of one delta; return what it adds to each call."""
        pieces = []
        for item in items if isinstance(items, list) else ():
            part = mapping(item)
            function = mapping(part.get("function"))
            name, arguments = _text(function.get("name")), function.get("arguments")
            call = self._parts_of(whole(part.get("index")), _text(part.get("id")), name)
            if call is None:
                continue
            num_before = len(call.arguments)
            call.name = call.name or name
            if arguments is not None and arguments != "":
                call.arguments.append(clean_text(arguments) if isinstance(arguments, str) else json.dumps(arguments))
            pieces.append(Piece(self._calls.index(call), call.id, call.name, "".join(call.arguments[num_before:])))
        return pieces

    def finish(self) -> tuple[Call, ...]:
        """Return the calls, each with an id of its own."""
        used: set[str] = set()
        calls = []
        for call in self._calls:
            if not call.name:
                continue
            call_id = call.id if call.id and call.id not in used else secrets.token_hex(5)[:9]
            used.add(call_id)
            calls.append(Call(call_id, call.name, "".join(call.arguments).strip() or "{}"))
        return tuple(calls)

    def _parts_of(self, index: int | None, call_id: str, name: str) -> _Parts | None:
        """Return the call that a part belongs to; None where there are too many."""
        same = [call for call in self._calls if call.index == index]
        call = same[-1] if same else None
        # Some endpoints give all calls one index, or none: another id or name then begins another call.
        begins = call is not None and (
            (call_id and call.id and call_id != call.id) or (name and call.name and not call_id and call.is_whole)
        )
        if call is None or begins:
            if len(self._calls) >= MAX_CALLS:
                return None
            call = _Parts(index, call_id)
            self._calls.append(call)
        call.id = call.id or call_id
        return call


def _text(value: object) -> str:
    return clean_text(value) if isinstance(value, str) else ""
