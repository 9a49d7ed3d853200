"""A chat as a file for people (Markdown, the branch on screen) and for programs (JSON, every branch).

Owns the two formats. Knows nothing of where they are written.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime

from edgelm.chats.model import Chat, Tree


def to_markdown(chat: Chat, tree: Tree) -> str:
    """Return the branch on screen as Markdown, each answer as the model wrote it."""
    parts = [f"# {chat.title}"]
    if chat.system:
        parts.append("\n".join(f"> {line}".rstrip() for line in chat.system.splitlines()))
    for message in tree.path():
        who = "You" if message.role == "user" else (message.model or "Assistant")
        parts.append(f"## {who}")
        if message.text:
            parts.append(message.text.rstrip("\n"))
        if message.state == "failed":
            parts.append(f"*{message.note}*")
    return "\n\n".join(parts) + "\n"


def to_json(chat: Chat, tree: Tree) -> str:
    """Return the chat with every branch as JSON; fields may be added, none renamed."""
    messages = [
        {
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
            "created": _moment(message.created),
        }
        for message in tree.messages.values()
    ]
    head = asdict(chat) | {"created": _moment(chat.created), "changed": _moment(chat.changed)}
    document = {"format": "edgelm-chat", "version": 1, **head, "messages": messages}
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"


def file_name(chat: Chat, ending: str) -> str:
    """Return a name for the file of a chat: its title with only what every file system takes."""
    words = "".join(each if each.isalnum() else "-" for each in chat.title.lower())
    stem = "-".join(part for part in words.split("-") if part)[:50].strip("-")
    return f"{stem or 'chat'}.{ending}"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
