"""The turns of a conversation as the messages of a request.

Owns where a system turn behind the history goes if the endpoint takes none there, and the size of pictures. Knows
nothing of requests.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgelm.base.errors import RequestError
from edgelm.base.workers.pictures import MAX_STORED_BYTES, storable_picture
from edgelm.client.failures import ContextFullError

MAX_URL_LEN = MAX_STORED_BYTES * 4 // 3 + 100  # of a picture that is stored now, in base64
MAX_KEPT_LEN = 64 * 2**20  # of larger ones, for the next request
REFUSALS = (400, 422, 500)  # statuses with which servers answer what a chat template refuses


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool that the model asks for. `arguments` are JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A tool that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return the tool in OpenAI's form."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of the conversation; the role is `system`, `user`, `assistant` or `tool`.

    `reasoning` is the thought before an answer: sent to edgelm only, since other endpoints may refuse the field.
    `images` of a user are data URLs; `calls` are those of an assistant, and `call_id` is the call whose result the text
    of a `tool` is.
    """

    role: str
    text: str
    reasoning: str = ""
    images: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    call_id: str = ""


def as_messages(turns: Iterable[Turn], with_reasoning: bool) -> list[dict[str, Any]]:
    """Return turns in OpenAI's form."""
    return [_as_message(turn, with_reasoning) for turn in turns]


def _as_message(turn: Turn, with_reasoning: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.text}
    if turn.images:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in turn.images]
        message["content"] = [*parts, {"type": "text", "text": turn.text}]
    if turn.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.calls
        ]
    if turn.call_id:
        message["tool_call_id"] = turn.call_id
    if with_reasoning and turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    return message


def may_refuse_system(error: Exception, turns: Sequence[Turn]) -> bool:
    """Tell whether an endpoint may have refused a request because a system turn is not the first turn."""
    late = any(turn.role == "system" for turn in turns[1:])
    return late and not isinstance(error, ContextFullError) and getattr(error.__cause__, "status_code", 0) in REFUSALS


def with_joined_system(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return turns with each system turn behind the first turn at the beginning of the user's turn after it."""
    joined = list(turns[:1])
    for turn in turns[1:]:
        if turn.role == "user" and len(joined) > 1 and joined[-1].role == "system":
            turn = replace(turn, text=f"{joined.pop().text}\n\n{turn.text}")
        joined.append(turn)
    return tuple(joined)


class SmallPictures:
    """Reduces pictures that were stored whole: by an older version, or from an import. It waits for a worker."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, str] = OrderedDict()

    def apply(self, turns: Sequence[Turn]) -> tuple[Turn, ...]:
        """Return turns whose pictures are as large as pictures are stored now, or as they are if they are damaged."""
        return tuple(
            replace(turn, images=tuple(map(self._reduced, turn.images))) if turn.images else turn for turn in turns
        )

    def _reduced(self, url: str) -> str:
        if len(url) <= MAX_URL_LEN or not url.startswith("data:"):
            return url
        if (small := self._kept.get(url)) is None:
            try:
                picture = storable_picture(base64.b64decode(url.partition(",")[2]))
            except (RequestError, ValueError):
                return url
            small = f"data:{picture.media_type};base64,{base64.b64encode(picture.data).decode()}"
            self._kept[url] = small
            while sum(map(len, self._kept)) > MAX_KEPT_LEN and len(self._kept) > 1:
                self._kept.popitem(last=False)
        self._kept.move_to_end(url)
        return small
