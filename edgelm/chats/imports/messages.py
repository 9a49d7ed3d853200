"""A conversation as a list of messages with `role` and `content`: what Ollama's API takes and returns, and what other
programs write.

A list has no id, so its content is its id: the same list again is the same chat, a longer one is another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from edgelm.chats.attachments import Attachment
from edgelm.chats.imports.draft import (
    BadChatError,
    DraftChat,
    Said,
    image_of_base64,
    items,
    joined,
    linear,
    seconds,
    table,
    text,
    tool_text,
)


def is_messages(document: Mapping[str, Any]) -> bool:
    """Tell whether a JSON object has a list of messages."""
    return any(is_message(item) for item in items(document.get("messages")))


def is_message(document: object) -> bool:
    """Tell whether a JSON value is a message."""
    return isinstance(document, dict) and isinstance(document.get("role"), str) and "content" in document


def read_messages(document: Mapping[str, Any]) -> DraftChat:
    """Return a conversation. Raises BadChatError."""
    written = items(document.get("messages"))
    if not written:
        raise BadChatError("it has no messages")
    content = json.dumps([[table(item).get("role"), table(item).get("content")] for item in written])
    model = text(document.get("model"))
    system, messages = linear(_said(table(item), model) for item in written)
    created = seconds(document.get("created_at")) or seconds(document.get("created"))
    return DraftChat(
        key=f"messages:{hashlib.sha256(content.encode()).hexdigest()}",
        messages=messages,
        leaf=messages[-1].key if messages else None,
        title=text(document.get("title")),
        system=system or text(document.get("system")),
        created=created,
        changed=seconds(document.get("updated_at")) or created,
    )


def content_of(value: object) -> tuple[str, tuple[Attachment, ...]]:
    """Return the text and the pictures of a content, which is a text or a list of parts."""
    if not isinstance(value, list):
        return text(value), ()
    written = ""
    attachments: list[Attachment] = []
    for part in value:
        written = joined(written, part if isinstance(part, str) else text(table(part).get("text")))
        picture = image_of_base64(table(table(part).get("image_url")).get("url"))
        attachments += [picture] if picture else []
    return written, tuple(attachments)


def _said(message: Mapping[str, Any], model: str) -> Said:
    role = text(message.get("role"))
    written, attachments = content_of(message.get("content"))
    pictures = (image_of_base64(item) for item in items(message.get("images")))
    if role == "tool":
        written = tool_text("", "", written)
    for call in map(table, items(message.get("tool_calls"))):
        function = table(call.get("function"))
        arguments = function.get("arguments")
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        written = joined(written, tool_text(text(function.get("name")), arguments))
    return Said(
        role="system" if role == "developer" else role,
        text=written,
        reasoning=text(message.get("thinking")) or text(message.get("reasoning_content")),
        model="" if role == "user" else text(message.get("model")) or model,
        created=seconds(message.get("created_at")) or seconds(message.get("timestamp")),
        attachments=attachments + tuple(picture for picture in pictures if picture),
    )
