"""A conversation of ChatGPT's export: `conversations.json`, in newer ones several `conversations-001.json`.

It is a tree: `mapping` has its nodes, and `current_node` is the last one shown. Between a question and the end of its
answer there may be many nodes, with thoughts, code, and results of tools; they become one answer. The format is
documented nowhere: this follows exports from 2023 to 2026, as people describe them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from edgelm.chats.attachments import Attachment
from edgelm.chats.imports.draft import (
    BadChatError,
    DraftChat,
    DraftMessage,
    Said,
    draft_of,
    fenced,
    items,
    joined,
    key_of,
    seconds,
    table,
    text,
    together,
)

FindImage = Callable[[str], Attachment | None]  # by the end of an asset's pointer

_HIDDEN_TYPES = ("user_editable_context", "model_editable_context", "reasoning_recap", "tether_browsing_display")
_MARKS = re.compile("\ue200[^\ue201]*\ue201")  # of citations, for ChatGPT's own page
_UNFINISHED = ("in_progress", "finished_partial_completion")


def is_chatgpt(document: Mapping[str, Any]) -> bool:
    """Tell whether a JSON object may be a conversation of ChatGPT."""
    return isinstance(document.get("mapping"), dict)


def read_chatgpt(document: Mapping[str, Any], find_image: FindImage = lambda _: None) -> DraftChat:
    """Return a conversation. Raises BadChatError."""
    nodes = table(document.get("mapping"))
    key = key_of(document.get("conversation_id")) or key_of(document.get("id"))
    if key is None:
        raise BadChatError("it has no id")
    messages, ends = _messages(nodes, find_image)
    return DraftChat(
        key=f"chatgpt:{key}",
        messages=messages,
        leaf=_leaf(nodes, key_of(document.get("current_node")), ends),
        title=text(document.get("title")),
        created=seconds(document.get("create_time")),
        changed=seconds(document.get("update_time")),
        archived=document.get("is_archived") is True,
        pinned=document.get("is_starred") is True,
    )


def _messages(nodes: Mapping[str, Any], find_image: FindImage) -> tuple[list[DraftMessage], dict[str, str]]:
    """Return the messages, and the key of the message that ends at a node."""
    pieces = {name: _piece(table(node), find_image) for name, node in nodes.items()}
    children: dict[str | None, list[str]] = {}
    for name, node in nodes.items():
        parent = key_of(table(node).get("parent"))
        children.setdefault(parent if parent in nodes else None, []).append(name)
    messages: list[DraftMessage] = []
    ends: dict[str, str] = {}

    def add(name: str, above: str | None, piece: Said) -> None:
        messages.append(draft_of(replace(piece, text=piece.text.strip("\n")), name, above))
        ends[name] = name

    # Of each node still to visit: the message above it, and the answer so far that has not ended above it.
    waiting: list[tuple[str, str | None, Said | None]] = [(name, None, None) for name in children.get(None, [])]
    waiting.reverse()
    while waiting:
        name, above, begun = waiting.pop()
        below = children.get(name, [])
        if pieces[name].is_question:
            add(name, above, pieces[name])
            above = name
        else:
            if not pieces[name].is_empty:
                begun = together(begun, pieces[name]) if begun else pieces[name]
            if begun is not None and (not below or any(pieces[child].is_question for child in below)):
                add(name, above, begun)
        for child in reversed(below):
            is_question = pieces[child].is_question
            waiting.append((child, ends.get(name, above) if is_question else above, None if is_question else begun))
    return messages, ends


def _leaf(nodes: Mapping[str, Any], current: str | None, ends: Mapping[str, str]) -> str | None:
    """Return the message that the last node shown belongs to, or the nearest one above it."""
    seen: set[str] = set()
    while current is not None and current in nodes and current not in seen:
        if current in ends:
            return ends[current]
        seen.add(current)
        current = key_of(table(nodes[current]).get("parent"))
    return None


def _piece(node: Mapping[str, Any], find_image: FindImage) -> Said:
    message = table(node.get("message"))
    role = text(table(message.get("author")).get("role"))
    metadata, content = table(message.get("metadata")), table(message.get("content"))
    kind = text(content.get("content_type"))
    hidden = metadata.get("is_visually_hidden_from_conversation") is True or message.get("weight") == 0
    if role not in ("user", "assistant", "tool") or hidden or kind in _HIDDEN_TYPES:
        return Said("")
    written, attachments, reasoning = "", tuple[Attachment, ...](), ""
    if kind == "thoughts":
        reasoning = _thoughts(content)
    elif kind == "code":
        language = text(content.get("language"))
        written = fenced(text(content.get("text")), "" if language == "unknown" else language)
    elif kind == "execution_output":
        written = fenced(text(content.get("text"))) if text(content.get("text")).strip() else ""
    elif kind == "system_error":
        written = f"{text(content.get('name'))}: {text(content.get('text'))}"
    else:
        written, attachments = _parts(content, find_image)
    to_tool = role == "assistant" and text(message.get("recipient")) not in ("", "all") and kind != "code"
    from_tool = role == "tool" and kind != "execution_output" and not attachments
    if to_tool or from_tool:  # a query of a search, or the pages that it found: ChatGPT does not show them either
        written = ""
    return Said(
        role,
        text=_MARKS.sub("", written),
        reasoning=reasoning,
        model=text(metadata.get("model_slug")) or text(metadata.get("default_model_slug")),
        created=seconds(message.get("create_time")),
        state="stopped" if text(message.get("status")) in _UNFINISHED else "done",
        attachments=attachments,
    )


def _thoughts(content: Mapping[str, Any]) -> str:
    thoughts = [table(thought) for thought in items(content.get("thoughts"))]
    return "\n\n".join(joined(text(thought.get("summary")), text(thought.get("content"))) for thought in thoughts)


def _parts(content: Mapping[str, Any], find_image: FindImage) -> tuple[str, tuple[Attachment, ...]]:
    """Return the text of a message's parts, and its pictures as far as the export has them."""
    written: list[str] = []
    attachments: list[Attachment] = []
    for part in items(content.get("parts")) or [content.get("text")]:
        if isinstance(part, str):
            written.append(part)
            continue
        values = table(part)
        pointer = text(values.get("asset_pointer"))
        if text(values.get("content_type")).startswith("image") and pointer:
            found = find_image(pointer.rsplit("/", 1)[-1].partition("#")[0])
            if found is None:
                written.append("[an image that is not in the export]")
            else:
                attachments.append(found)
        elif text(values.get("text")):
            written.append(text(values.get("text")))
    return "\n\n".join(filter(None, written)), tuple(attachments)
