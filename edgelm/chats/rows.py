"""Rows of the chats' tables, and the values that they hold.

Owns the columns of each table and how lists and tables stand in them. Knows nothing of queries and files.
"""

from __future__ import annotations

import json
from typing import Any

from edgelm.chats.attachments import Attachment
from edgelm.chats.history import Chat, Message
from edgelm.chats.reading import reading_from_text, reading_to_text
from edgelm.chats.tool_calls import calls_from_text, calls_to_text

CHAT_COLUMNS = (
    "id, title, renamed, system, model, sampling, leaf, created, changed, knowledge, consents, summarized, preset,"
    " tools, tool_consents, pinned, archived, tags, deleted"
)
PLACE_COLUMNS = ("pinned", "archived", "tags", "deleted")  # of a chat: its place in the list
CHAT = ", ".join(f"chat.{column}" for column in CHAT_COLUMNS.split(", "))
MESSAGE_COLUMNS = (
    "id, chat, parent, role, text, reasoning, state, note, model, stats, created, sent_from, reading, calls"
)
ATTACHMENT_COLUMNS = "kind, name, path, text, data, media_type, digest, size, mtime_ns, tokens"

_MESSAGE_NAMES = MESSAGE_COLUMNS.split(", ")
_ATTACHMENT_NAMES = ATTACHMENT_COLUMNS.split(", ")


def chat_values(chat: Chat) -> tuple[object, ...]:
    """Return the values of CHAT_COLUMNS."""
    return (
        chat.id, clean(chat.title), chat.renamed, clean(chat.system), clean(chat.model),
        json.dumps(dict(chat.sampling)), chat.leaf, chat.created, chat.changed, json.dumps(chat.knowledge),
        json.dumps(dict(chat.consents)), chat.summarized, clean(chat.preset), json.dumps(chat.tools),
        json.dumps(chat.tool_consents), chat.pinned, chat.archived, json.dumps(chat.tags), chat.deleted,
    )  # fmt: skip


def chat_from_row(row: Any) -> Chat:
    """Return the chat of a row of CHAT_COLUMNS."""
    # The shortest way: the chat reads all rows at its start, and there may be ten thousand.
    (
        id_, title, renamed, system, model, sampling, leaf, created, changed, knowledge, consents, summarized, preset,
        tools, tool_consents, pinned, archived, tags, deleted,
    ) = row  # fmt: skip
    return Chat(
        id=id_, title=title, renamed=bool(renamed), summarized=bool(summarized), system=system, model=model,
        sampling=_table(sampling), knowledge=_list(knowledge), consents=_table(consents), preset=preset,
        tools=_list(tools), tool_consents=_list(tool_consents), pinned=bool(pinned), archived=bool(archived),
        tags=_list(tags), deleted=deleted, leaf=leaf, created=created, changed=changed,
    )  # fmt: skip


def _table(text: str) -> dict[str, Any]:
    values: dict[str, Any] = {} if text == "{}" else json.loads(text)
    return values


def _list(text: str) -> tuple[str, ...]:
    return () if text == "[]" else tuple(json.loads(text))


def message_values(message: Message) -> tuple[object, ...]:
    """Return the values of MESSAGE_COLUMNS."""
    return (
        message.id, message.chat, message.parent, message.role, clean(message.text), clean(message.reasoning),
        message.state, clean(message.note), clean(message.model), message.stats, message.created,
        message.sent_from, reading_to_text(message.reading), calls_to_text(message.calls),
    )  # fmt: skip


def message_from_row(row: Any) -> Message:
    """Return the message of a row of MESSAGE_COLUMNS, without its attachments."""
    values = dict(zip(_MESSAGE_NAMES, row, strict=True))
    reading, calls = reading_from_text(values["reading"]), calls_from_text(values["calls"])
    return Message(**values | {"reading": reading, "calls": calls})


def attachment_values(attachment: Attachment) -> tuple[object, ...]:
    """Return the values of ATTACHMENT_COLUMNS."""
    return (
        attachment.kind, clean(attachment.name), clean(attachment.path), clean(attachment.text), attachment.data,
        attachment.media_type, attachment.digest, attachment.size, attachment.mtime_ns, attachment.tokens,
    )  # fmt: skip


def attachment_from_row(row: Any) -> Attachment:
    """Return the attachment of a row of ATTACHMENT_COLUMNS."""
    return Attachment(**dict(zip(_ATTACHMENT_NAMES, row, strict=True)))


def clean(text: str) -> str:
    """Replace characters that SQLite cannot store as text: halves of surrogate pairs, and NUL."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
