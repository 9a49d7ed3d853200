"""A chat as JSON: every branch and all that is known of it. `imports/own.py` reads it again.

Owns the format: fields may be added, never renamed.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from edgelm.chats.attachments import Attachment
from edgelm.chats.history import Chat, Message, Tree
from edgelm.chats.tool_calls import calls_as_json

FORMAT = "edgelm-chat"
VERSION = 1


def to_json(chat: Chat, tree: Tree) -> str:
    """Return the chat with every branch as JSON."""
    messages = [_message(message) for message in tree.messages.values()]
    document = {"format": FORMAT, "version": VERSION, **chat_values(chat), "messages": messages}
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"


def chat_values(chat: Chat) -> dict[str, Any]:
    """Return a chat without its messages as values of JSON, its times in ISO 8601."""
    times = {
        name: iso_time(value)
        for name in ("created", "changed", "deleted")
        if (value := getattr(chat, name)) is not None
    }
    return asdict(chat) | times


def iso_time(seconds: float) -> str:
    """Return a time in ISO 8601, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _message(message: Message) -> dict[str, Any]:
    return {
        "id": message.id,
        "parent": message.parent,
        "role": message.role,
        "text": message.text,
        "reasoning": message.reasoning,
        "state": message.state,
        "note": message.note,
        "model": message.model,
        "stats": json.loads(message.stats) if message.stats else None,
        "sent_from": message.sent_from,
        "reading": message.reading.as_json() if message.reading else None,
        "attachments": [_attachment(attachment) for attachment in message.attachments],
        "calls": calls_as_json(message.calls),
        "created": iso_time(message.created),
    }


def _attachment(attachment: Attachment) -> dict[str, Any]:
    return asdict(attachment) | {"data": attachment.url if attachment.data else ""}
