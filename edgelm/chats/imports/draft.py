"""A conversation as an export has it, before it gets the ids of our store; and careful readers of its values.

An export may have any value at any place: the readers here return something empty for what does not fit, and
`BadChatError` is for a conversation without anything to keep.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from edgelm.chats.attachments import Attachment
from edgelm.chats.history import Role, State
from edgelm.chats.printable import printable
from edgelm.chats.reading import Reading
from edgelm.chats.tool_calls import ToolCall

MAX_TIME = 4_102_444_800.0  # the year 2100
MAX_IMAGE_BYTES = 20 * 2**20
MAX_TAGS = 100
MAX_TAG_LEN = 40
_UNITS = (1, 1e3, 1e6, 1e9)  # that exports count times in, per second
_SIGNATURES = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}


class BadChatError(Exception):
    """A conversation that cannot be imported; the text says why."""


@dataclass(slots=True, kw_only=True)
class DraftMessage:
    """A message; `key` and `parent` are names of messages in the export."""

    key: str
    parent: str | None
    role: Role
    text: str = ""
    reasoning: str = ""
    model: str = ""
    created: float | None = None
    state: State = "done"
    note: str = ""
    stats: str = ""
    attachments: tuple[Attachment, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    reading: Reading | None = None
    sent_from: str | None = None  # a key
    id: int | None = None  # of our own export


@dataclass(slots=True, kw_only=True)
class DraftChat:
    """A conversation; `key` is its name in all exports of the program, `leaf` the key of the last message shown."""

    key: str
    messages: list[DraftMessage]
    leaf: str | None = None
    title: str = ""
    system: str = ""
    created: float | None = None
    changed: float | None = None
    pinned: bool = False
    archived: bool = False
    tags: tuple[str, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)  # other fields of Chat, of our own export
    dropped: tuple[str, ...] = ()  # what stands in the file and is not taken from it, in words
    id: int | None = None  # of our own export


@dataclass(frozen=True, slots=True)
class Said:
    """A message of an export. The role may be that of a tool or of the system, and every field may be empty."""

    role: str
    _: KW_ONLY
    text: str = ""
    reasoning: str = ""
    model: str = ""
    created: float | None = None
    state: State = "done"
    note: str = ""
    attachments: tuple[Attachment, ...] = ()

    @property
    def is_question(self) -> bool:
        return self.role == "user" and not self.is_empty

    @property
    def is_empty(self) -> bool:
        return not (self.text.strip() or self.reasoning.strip() or self.attachments or self.note)


def linear(said: Iterable[Said]) -> tuple[str, list[DraftMessage]]:
    """Return the system prompt and the messages of a list without branches.

    Several answers in a row, with results of tools between them, become one: an answer of edgelm has its calls inside.
    """
    system: list[str] = []
    turns: list[Said] = []
    for message in said:
        if message.role == "system":
            system.append(message.text)
        elif not message.is_empty:
            if turns and not (turns[-1].is_question or message.is_question):
                turns[-1] = together(turns[-1], message)
            else:
                turns.append(message)
    messages = [draft_of(turn, str(place), str(place - 1) if place else None) for place, turn in enumerate(turns)]
    return "\n\n".join(filter(None, system)), messages


def together(first: Said, other: Said) -> Said:
    """Return two parts of one answer as one."""
    return replace(
        first,
        text=joined(first.text, other.text),
        reasoning=joined(first.reasoning, other.reasoning),
        model=other.model or first.model,
        state=other.state,
        note=other.note,
        attachments=first.attachments + other.attachments,
    )


def draft_of(said: Said, key: str, parent: str | None) -> DraftMessage:
    """Return an exported message as one of our own, whose role is the user's or the model's."""
    return DraftMessage(
        key=key, parent=parent, role="user" if said.role == "user" else "assistant", text=said.text,
        reasoning=said.reasoning, model=said.model, created=said.created, state=said.state,
        note=said.note, attachments=said.attachments,
    )  # fmt: skip


def joined(one: str, other: str) -> str:
    """Return two texts with an empty line between them."""
    return "\n\n".join(filter(None, (one.rstrip("\n"), other.lstrip("\n"))))


def tool_text(name: str, arguments: str, result: str = "") -> str:
    """Return a call of a tool as text of the answer.

    It is no call of ours: sent to a model again, that would need a tool of this name.
    """
    parts = [fenced(f"{name} {arguments}".strip())] if name or arguments else []
    return "\n\n".join([*parts, *([fenced(result)] if result.strip() else [])])


def fenced(text: str, language: str = "") -> str:
    """Return a block of code."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def table(value: object) -> Mapping[str, Any]:
    """Return a JSON object; an empty one for any other value."""
    return value if isinstance(value, dict) else {}


def items(value: object) -> list[Any]:
    """Return a JSON list; an empty one for any other value."""
    return value if isinstance(value, list) else []


def text(value: object) -> str:
    """Return a string; an empty one for any other value."""
    return value if isinstance(value, str) else ""


def strings(value: object) -> tuple[str, ...]:
    """Return the strings of a JSON list, each once."""
    return tuple(dict.fromkeys(item for item in items(value) if isinstance(item, str) and item))


def one_line(value: object) -> str:
    """Return a string on one line, without characters that move a terminal's cursor; empty for any other value."""
    return printable(" ".join(text(value).split()))


def tag_names(values: Iterable[object]) -> tuple[str, ...]:
    """Return the tags of a chat, each on one line and once, as far as they are strings."""
    names = (one_line(value)[:MAX_TAG_LEN].strip() for value in values)
    return tuple(dict.fromkeys(filter(None, names)))[:MAX_TAGS]


def key_of(value: object) -> str | None:
    """Return the name of a message or chat, a string or a number; None for any other value."""
    if isinstance(value, str):
        return value or None
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


def seconds(value: object) -> float | None:
    """Return a time in seconds since 1970, from a number in any usual unit or a date in ISO 8601; else None."""
    if isinstance(value, str):
        return _seconds_of_date(value)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_TIME * _UNITS[-1]:
        return None
    return next(value / unit for unit in _UNITS if value / unit <= MAX_TIME)


def _seconds_of_date(value: str) -> float | None:
    try:
        return seconds(float(value))
    except ValueError:
        pass
    try:
        date = datetime.fromisoformat(value.strip())
    except ValueError:
        return None
    try:
        stamp = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except (OverflowError, OSError):
        return None
    return stamp if 0 <= stamp <= MAX_TIME else None


def image(data: bytes, name: str = "") -> Attachment | None:
    """Return the bytes of a picture as an attachment; None for what is not one, or too large."""
    media_type = next((kind for start, kind in _SIGNATURES.items() if data.startswith(start)), None)
    if media_type is None or len(data) > MAX_IMAGE_BYTES:
        return None
    name = name or f"image.{media_type.removeprefix('image/')}"
    return Attachment(kind="image", name=name, data=data, media_type=media_type, size=len(data))


def image_of_base64(value: object) -> Attachment | None:
    """Return the picture of a data URL, or of base64 alone; None if there is none."""
    encoded = text(value)
    if encoded.startswith("data:"):
        head, _, encoded = encoded.partition(",")
        if not head.endswith(";base64"):
            return None
    try:
        return image(base64.b64decode(encoded, validate=True))
    except (ValueError, binascii.Error):
        return None
